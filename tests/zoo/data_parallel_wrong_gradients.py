"""Lab 02: DataParallel with wrong losses and gradients."""

from __future__ import annotations

import torch

from shardlab import move

from . import wrong
from .data_parallel_plain import Plain


@wrong("02.DataParallel", reason="values", says="N = 4, 13 samples.*\n.*\n.*plain mean.*had 4, 3, 3, 3 samples")
class MeanOfMeans(Plain):
    """Every device counts the same, however many samples it had."""

    def weight(self, mine, rows, count):
        return 1 / count


@wrong("02.DataParallel", reason="values", says="sum of the devices' gradients, divided by nothing")
class NeverDivided(Plain):
    """Adds up mean gradients."""

    def weight(self, mine, rows, count):
        return 1.0


@wrong("02.DataParallel", reason="values", says="plain mean|without the part|is it|N = 4, 2 samples|N = 3, 1 samples")
class DividedByDevices(Plain):
    """Divides by N, also when fewer devices have samples; right weights otherwise."""

    def weight(self, mine, rows, count):
        return mine / rows if count == len(self.devices) else 1 / len(self.devices)


@wrong("02.DataParallel", reason="values", says="divided twice")
class DividedTwice(Plain):
    """Weights the losses, and divides the sum by N again."""

    def collect(self, replicas):
        super().collect(replicas)
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad /= len(replicas)


@wrong("02.DataParallel", reason="values", says="sum over all samples")
class SumOfSamples(Plain):
    """Weights by the number of samples and forgets to divide."""

    def weight(self, mine, rows, count):
        return mine


@wrong("02.DataParallel", reason="values", says="holds something|.grad holds|lost")
class Overwrites(Plain):
    """The new gradient replaces what was in .grad."""

    def forward_backward(self, inputs, targets, loss_function):
        self.module.zero_grad()
        return super().forward_backward(inputs, targets, loss_function)


@wrong("02.DataParallel", reason="values", says="before, times 0.143")
class AveragesWhatWasThere(Plain):
    """Divides all of .grad, also what was there before."""

    def weight(self, mine, rows, count):
        return mine

    def forward_backward(self, inputs, targets, loss_function):
        loss = super().forward_backward(inputs, targets, loss_function)
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad /= len(inputs)
        return loss / len(inputs)


@wrong("02.DataParallel", reason="values", says="part of shard 0 alone")
class NeverGathered(Plain):
    """Only device 0's gradient arrives."""

    def collect(self, replicas):
        pass


@wrong("02.DataParallel", reason="values", says="counted twice|twice the gradient")
class FirstTwice(Plain):
    """Adds replica 0's gradient to the module's, but replica 0 is the module."""

    def collect(self, replicas):
        super().collect([self.module, *replicas])


@wrong("02.DataParallel", reason="values", says="the loss is")
class LossOfDeviceZero(Plain):
    """Returns device 0's part of the loss."""

    def total(self, losses):
        return losses[0]


@wrong("02.DataParallel", reason="values", says="N = 2, 6 samples: the loss is")
class MeanOfWeightedLosses(Plain):
    """Divides the weighted losses by N again."""

    def total(self, losses):
        return super().total(losses) / len(losses)


@wrong("02.DataParallel", reason="values", says="the loss is a float")
class LossAsFloat(Plain):
    """Takes the loss off the device."""

    def total(self, losses):
        return super().total(losses).item()


@wrong("02.DataParallel", reason="values", says="the loss has the shape \\(1,\\)")
class LossWithADimension(Plain):
    """A loss of one element is not 0-d."""

    def total(self, losses):
        return super().total(losses).reshape(1)


@wrong("02.DataParallel", reason="device", says="the loss lives on device 1")
class LossElsewhere(Plain):
    """Adds up the losses on the last device."""

    def total(self, losses):
        home = self.devices[len(losses) - 1]
        return sum(move(loss, home) for loss in losses)


@wrong("02.DataParallel", reason="crash", says="expected a tensor, got a NoneType")
class NoneIsNoTensor(Plain):
    """Takes it for granted that every parameter has a gradient on every device."""

    def add(self, mine, gradient):
        moved = move(gradient, self.devices[0])
        mine.grad = moved if mine.grad is None else mine.grad + moved


@wrong("02.DataParallel", reason="values", says="rare")
class OnlyIfEverybodyHasOne(Plain):
    """Drops a gradient that some device does not have."""

    def collect(self, replicas):
        for mine, *theirs in zip(self.module.parameters(), *(one.parameters() for one in replicas[1:]), strict=True):
            if all(one.grad is not None for one in theirs):
                for one in theirs:
                    self.add(mine, one.grad)


@wrong("02.DataParallel", reason="values", says="rare")
class OnlyWhereDeviceZeroHasOne(Plain):
    """Goes by the module's own .grad."""

    def add(self, mine, gradient):
        if mine.grad is not None and gradient is not None:
            mine.grad += move(gradient, self.devices[0])

    def scatter(self, tensor):
        return super().scatter(tensor)


@wrong("02.DataParallel", reason="values", says="N = 4, 13 samples.*12 samples in all|12 samples in all")
class TailDropped(Plain):
    """Sizes rounded down."""

    def scatter(self, tensor):
        size = max(1, len(tensor) // len(self.devices))
        pieces = [tensor[i * size : (i + 1) * size] for i in range(len(self.devices))]
        return [move(piece, device) for piece, device in zip(pieces, self.devices, strict=True)]


@wrong("02.DataParallel", reason="values|device", says="module|on device 1|is None")
class AveragesParameters(Plain):
    """Averages parameters instead of gradients: nothing arrives in .grad."""

    def collect(self, replicas):
        self.module.zero_grad()
        with torch.no_grad():
            for replica in replicas[1:]:
                for mine, theirs in zip(self.module.parameters(), replica.parameters(), strict=True):
                    mine.lerp_(move(theirs.detach(), self.devices[0]), 1 / len(replicas))


@wrong("02.DataParallel", reason="bytes", says="float32.*device 1 sends")
class WideGradients(Plain):
    """Gradients travel as float64, whatever they are."""

    def add(self, mine, gradient):
        if gradient is not None:
            super().add(mine, move(gradient.double(), self.devices[0]).to(mine.dtype))


@wrong("02.DataParallel", reason="bytes", says="device 1 sends.*\n.*\n.*twice")
class GradientsTwice(Plain):
    """Moves every gradient a second time, to look at its norm."""

    def collect(self, replicas):
        self.norms = [
            move(one.grad, self.devices[0]).norm()
            for r in replicas[1:]
            for one in r.parameters()
            if one.grad is not None
        ]
        super().collect(replicas)


@wrong("02.DataParallel", reason="values", says="\\bnan\\b.*\n.*does nothing\n.*0 times nan is nan")
class EmptyPiecesToo(Plain):
    """Lets devices without samples work: the mean over nothing is nan."""

    def forward_backward(self, inputs, targets, loss_function):
        xs, ys = self.scatter(inputs), self.scatter(targets)
        replicas = self.replicas(len(xs))

        def work(i):
            loss = loss_function(replicas[i](xs[i]), ys[i]) * (len(xs[i]) / len(inputs))
            loss.backward()
            return loss.detach()

        losses = self.parallel(work, len(xs))
        self.collect(replicas)
        return self.total(losses)


@wrong("02.DataParallel", reason="values", says="wrong sign")
class Descends(Plain):
    """Subtracts the gradients."""

    def weight(self, mine, rows, count):
        return -mine / rows

    def total(self, losses):
        return -super().total(losses)
