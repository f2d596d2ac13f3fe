"""The way from one device to another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .device import Device, LogicalDevice
from .world import World, current_world


def move(tensor: torch.Tensor, device: Device, what: str = "") -> torch.Tensor:
    """The tensor on `device`: a copy of its elements, counted; or the tensor itself, uncounted, when it is there.

    It is `tensor.to(device)` with a name for the record. Like that, it is differentiable: in backward the gradient goes
    back the same way and is counted too. `tensor.detach()` first, or no_grad, makes a copy that has no past.

    what: "parameters", "gradients", "inputs", ... for `run.calls` and `traffic.by_what`; without it, what the meters
    know of the tensor. A copy from the host (the batch, a model that was just made) is not counted: it is no traffic
    between devices. Raises RuntimeError outside launch_devices for a logical device, TypeError for what is no device.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"move(tensor, device): expected a tensor, got a {type(tensor).__name__}")
    if not isinstance(device, (LogicalDevice, torch.device)) or device.index is None:
        raise TypeError(f"move(tensor, device): expected one of the devices that your function was given, got {device}")
    world = current_world()
    if world is None:
        if isinstance(device, LogicalDevice):
            raise RuntimeError(f"{device} exists only inside a function that is given to launch_devices")
        return tensor.to(device)
    if device not in world.devices:
        known = ", ".join(map(str, world.devices))
        raise RuntimeError(f"there is no {device}; the devices of this launch are {known}")
    if world.places.of(tensor) == device.index:
        return tensor
    return _Move.apply(tensor, device, what, world)


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, device: Device, what: str, world: World) -> torch.Tensor:
        ctx.source, ctx.what, ctx.world = world.places.of(tensor), what, world
        return _copy(tensor, device, what, world)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        what = "gradients" if ctx.what in ("", "parameters") else f"gradients of {ctx.what}"
        back = torch.device("cpu") if ctx.source is None else ctx.world.devices[ctx.source]
        return _copy(gradient, back, what, ctx.world), None, None, None


def _copy(tensor: torch.Tensor, device: Device, what: str, world: World) -> torch.Tensor:
    """device: any of the world's, or the host."""
    source, target = world.places.of(tensor), device.index
    if source == target:
        return tensor.clone()
    with torch.no_grad(), torch._C._DisableTorchDispatch():  # it is written down here, not by the mode
        on_gpu = isinstance(device, torch.device) and world.places.device == "cuda"
        copied = tensor.detach().to(device) if on_gpu else tensor.detach().clone()  # type: ignore[arg-type]
    if target is not None:
        world.places.put(copied, target)
        world.meters[target].saw((copied,))
    world.progressed()
    if source is not None:
        world.count(tensor, source, target, what)
    return copied


def device_of(tensor: torch.Tensor) -> Device | torch.device:
    """The device that holds a tensor; `torch.device("cpu")` for the host. On GPUs this is `tensor.device`."""
    world = current_world()
    index = world.places.of(tensor) if world is not None else None
    return tensor.device if world is None or index is None else world.devices[index]


@contextmanager
def to_moves() -> Iterator[None]:
    """Within it `tensor.to(device)` and `module.to(device)` know logical devices, as they know GPUs."""
    of_tensors, of_modules = torch.Tensor.to, torch.nn.Module.to

    def tensor_to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        device, args, kwargs = _logical(args, kwargs)
        moved = tensor if device is None else move(tensor, device)
        return of_tensors(moved, *args, **kwargs) if args or kwargs else moved

    def module_to(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        device, args, kwargs = _logical(args, kwargs)
        if device is not None:
            module._apply(lambda tensor: move(tensor, device))
        return of_modules(module, *args, **kwargs) if args or kwargs else module

    torch.Tensor.to, torch.nn.Module.to = tensor_to, module_to  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        del torch.Tensor.to  # it is inherited
        torch.nn.Module.to = of_modules  # type: ignore[method-assign]


def _logical(args: tuple, kwargs: dict[str, Any]) -> tuple[LogicalDevice | None, tuple, dict[str, Any]]:
    """The logical device among the arguments of `to`, None if there is none, and the other arguments."""
    if args and isinstance(args[0], LogicalDevice):
        return args[0], args[1:], {name: value for name, value in kwargs.items() if name != "non_blocking"}
    if isinstance(kwargs.get("device"), LogicalDevice):
        others = {name: value for name, value in kwargs.items() if name not in ("device", "non_blocking")}
        return kwargs["device"], args, others
    return None, args, kwargs
