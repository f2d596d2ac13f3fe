"""Lab 02: DataParallel with wrong outputs and manners."""

from __future__ import annotations

import torch

from shardlab import move

from . import wrong
from .data_parallel_plain import Plain


@wrong("02.DataParallel", reason="device", says="the output lives on device [12]")
class OutputsOnTheLast(Plain):
    """Gathers on the last device."""

    def gathered(self, outputs):
        last = self.devices[len(outputs) - 1]
        return torch.cat([move(one, last) for one in outputs])


@wrong("02.DataParallel", reason="values", says="the output is a list")
class OutputsInAList(Plain):
    """Never gathers."""

    def gathered(self, outputs):
        return outputs


@wrong("02.DataParallel", reason="values", says="the output has the shape")
class OutputsAveraged(Plain):
    """Averages the outputs instead of joining them."""

    def gathered(self, outputs):
        return torch.stack([move(one, self.devices[0])[:1] for one in outputs]).mean(0)


@wrong("02.DataParallel", reason="bytes", says="talks to")
class OutputsToEverybody(Plain):
    """Sends all outputs to all devices."""

    def gathered(self, outputs):
        for device in self.devices:
            everything = torch.cat([move(one, device) for one in outputs])
        return move(everything, self.devices[0])


@wrong("02.DataParallel", reason="values|crash", says="worked on|no replica|samples")
class DeviceZeroAlone(Plain):
    """Does everything on device 0."""

    def scatter(self, tensor):
        return [tensor]


@wrong("02.DataParallel", reason="not written", says="not written yet")
class Stub:
    """What the notebook starts with."""

    def __init__(self, module, devices):
        raise NotImplementedError

    def __call__(self, inputs):
        raise NotImplementedError

    def forward_backward(self, inputs, targets, loss_function):
        raise NotImplementedError


@wrong("02.DataParallel", reason="not written", says="not written yet")
class HalfWritten(Plain):
    """forward_backward is still to do."""

    def forward_backward(self, inputs, targets, loss_function):
        raise NotImplementedError


@wrong("02.DataParallel", reason="signature", says="def __init__\\(self, module, devices\\)\n.*def __init__")
class NoDevices(Plain):
    """Takes the module only."""

    def __init__(self, module):
        super().__init__(module, [])


@wrong("02.DataParallel", reason="signature", says="def __call__\\(self, inputs\\)\n  look at: .*def __call__")
class NoSelf(Plain):
    """Forgets `self`."""

    def __call__(inputs):  # noqa: N805
        return inputs


@wrong("02.DataParallel", reason="signature", says="def __init__\\(self, module, devices\\)\n  look at: .*def __init__")
class NoSelfAtTheBeginning(Plain):
    """Forgets `self` in the constructor."""

    def __init__(module, devices):  # noqa: N805
        module.devices = devices


@wrong("02.DataParallel", reason="signature", says="no forward_backward")
class ForwardOnly:
    """Only dp(inputs)."""

    def __init__(self, module, devices):
        self.module = module

    def __call__(self, inputs):
        return self.module(inputs)


@wrong("02.DataParallel", reason="signature", says="forward_backward\\(self, inputs, targets\\)\n")
class NoLossFunction(Plain):
    """Brings its own loss."""

    def forward_backward(self, inputs, targets):
        return torch.zeros(())


@wrong("02.DataParallel", reason="values", says="the inputs|is not|comes out|differs")
class ScalesTheInputs(Plain):
    """Writes into the batch."""

    def scatter(self, tensor):
        if tensor.is_floating_point():
            tensor.mul_(2)
        return super().scatter(tensor)
