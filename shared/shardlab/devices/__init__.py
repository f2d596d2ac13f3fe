"""One process with several devices: GPUs, or logical devices on the CPU that behave like GPUs.

    run = launch_devices(fn, devices=4)        # fn(devices, ...) runs in a fresh process
    with on(devices[1]):                       # this thread works on device 1
        x = torch.zeros(3)
    y = move(x, devices[0], "activations")     # the way from device to device: counted

What a logical device is: a number that each tensor's memory carries. An operation's results live where its inputs live,
new tensors where the thread works, and what mixes devices raises the error that it would raise on GPUs. So code that
forgot a move fails on a laptop too.
"""

from .device import LogicalDevice, on
from .launching import launch_devices
from .moving import device_of, move

__all__ = ["LogicalDevice", "device_of", "launch_devices", "move", "on"]
