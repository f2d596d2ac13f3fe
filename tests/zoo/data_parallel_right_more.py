"""Lab 02: more right ways to DataParallel: how gradients come together, who makes replicas."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from shardlab import move

from . import right
from .data_parallel_plain import Plain, in_threads, scatter


@right("02.DataParallel")
class FlatGradients(Plain):
    """All gradients of a replica in one message; zeros where a parameter has none."""

    def collect(self, replicas):
        learning = [one for one in self.module.parameters() if one.requires_grad]
        for replica in replicas[1:]:
            theirs = [one for one in replica.parameters() if one.requires_grad]
            parts = [torch.zeros_like(one) if one.grad is None else one.grad for one in theirs]
            flat = move(torch.cat([part.reshape(-1) for part in parts]), self.devices[0], "gradients")
            for mine, piece in zip(learning, flat.split([one.numel() for one in learning]), strict=True):
                piece = piece.view_as(mine)
                mine.grad = piece.clone() if mine.grad is None else mine.grad.add_(piece)


class AllCopies(Plain):
    """Replica 0 is a copy too, with the module's own buffers, so that device 0's are kept."""

    def replicas(self, count):
        first = copy.deepcopy(self.module)
        for name, buffer in self.module.named_buffers():
            owner = first.get_submodule(name.rpartition(".")[0])
            owner._buffers[name.rpartition(".")[2]] = buffer
        return [first, *super().replicas(count)[1:]]


@right("02.DataParallel")
class StackedGradients(AllCopies):
    """All devices' gradients of a parameter stacked on device 0, then a weighted sum."""

    def weight(self, mine, rows, count):
        self.rows = rows
        return mine

    def collect(self, replicas):
        for mine, *theirs in zip(self.module.parameters(), *(one.parameters() for one in replicas), strict=True):
            there = [one.grad for one in theirs if one.grad is not None]
            if there:
                total = torch.stack([move(one, self.devices[0]) for one in there]).sum(0) / self.rows
                mine.grad = total if mine.grad is None else mine.grad + total

    def total(self, losses):
        return super().total(losses) / self.rows


@right("02.DataParallel")
class ReplicatesInThreads(Plain):
    """Every thread makes its own replica."""

    def __call__(self, inputs):
        xs = [piece for piece in self.scatter(inputs) if len(piece)]
        work = lambda i: self.replica(i)(xs[i])  # noqa: E731
        return self.gathered(self.parallel(work, len(xs)))

    def replica(self, i):
        return self.module if i == 0 else copy.deepcopy(self.module).to(self.devices[i])

    def replicas(self, count):
        return in_threads(self.replica, self.devices[:count])


@right("02.DataParallel")
class KeptPool(Plain):
    """One pool of threads for the whole life of the object."""

    def __init__(self, module, devices):
        super().__init__(module, devices)
        self.pool = ThreadPoolExecutor(len(devices))

    def parallel(self, work, count):
        return [future.result() for future in [self.pool.submit(work, i) for i in range(count)]]


@right("02.DataParallel")
class AsGradientsAppear(Plain):
    """Hooks on the replicas' parameters: a gradient travels as soon as it is there."""

    def replicas(self, count):
        replicas, self.arrived = super().replicas(count), []
        for replica in replicas[1:]:
            for mine, theirs in zip(self.module.parameters(), replica.parameters(), strict=True):
                if theirs.requires_grad:
                    theirs.register_post_accumulate_grad_hook(self.hook(mine))
        return replicas

    def hook(self, mine):
        def arrived(theirs):
            self.arrived.append((mine, move(theirs.grad, self.devices[0])))
            theirs.grad = None

        return arrived

    def collect(self, replicas):
        for mine, gradient in self.arrived:
            self.add(mine, gradient)


@right("02.DataParallel")
class ToEveryDevice(Plain):
    """Devices without samples get a replica too, and work on nothing."""

    def replicas(self, count):
        return super().replicas(len(self.devices))[:count]


@right("02.DataParallel")
class AModule(nn.Module):
    """An nn.Module, as torch's own is, with nn.Module's __call__."""

    def __init__(self, module, devices):
        super().__init__()
        self.module = module
        self.plain = [Plain(module, devices)]

    def forward(self, inputs):
        return self.plain[0](inputs)

    def forward_backward(self, *arguments):
        return self.plain[0].forward_backward(*arguments)


@right("02.DataParallel")
class LocksAndOneSum(AllCopies):
    """Every thread adds its gradients on device 0 itself, under a lock."""

    def forward_backward(self, inputs, targets, loss_function):
        xs = [piece for piece in scatter(inputs, self.devices) if len(piece)]
        ys = scatter(targets, self.devices)
        replicas, lock = self.replicas(len(xs)), threading.Lock()

        def work(i):
            loss = loss_function(replicas[i](xs[i]), ys[i]) * (len(xs[i]) / len(inputs))
            loss.backward()
            with lock:  # no replica is the module: nobody else writes into its .grad meanwhile
                self.collect([None, replicas[i]])
            return loss.detach()

        return self.total(self.parallel(work, len(xs)))
