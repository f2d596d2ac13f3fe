"""Lab 02: right ways to DataParallel, usual and unusual."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.func import functional_call

from shardlab import move, on

from . import right
from .data_parallel_plain import Plain


@right("02.DataParallel")
class WeightedLosses(Plain):
    """Replica 0 is the module; every loss is weighted before its backward."""


@right("02.DataParallel")
class WeightedAfterwards(Plain):
    """Gradients of the devices' mean losses, weighted when they are added up; nothing goes into .grad before that."""

    def forward_backward(self, inputs, targets, loss_function):
        xs = [piece for piece in self.scatter(inputs) if len(piece)]
        ys = self.scatter(targets)
        replicas = self.replicas(len(xs))

        def work(i):
            loss = loss_function(replicas[i](xs[i]), ys[i])
            learning = [one for one in replicas[i].parameters() if one.requires_grad]
            return loss.detach(), torch.autograd.grad(loss, learning, allow_unused=True)

        results = self.parallel(work, len(xs))
        total = 0.0
        for (loss, gradients), piece in zip(results, xs, strict=True):
            share = len(piece) / len(inputs)
            total = total + move(loss, self.devices[0]) * share
            learning = [one for one in self.module.parameters() if one.requires_grad]
            for mine, gradient in zip(learning, gradients, strict=True):
                self.add(mine, None if gradient is None else gradient * share)
        return total


@right("02.DataParallel")
class ByPool(Plain):
    """A thread pool instead of threads, and futures for exceptions."""

    def parallel(self, work, count):
        def there(i):
            with on(self.devices[i]):
                return work(i)

        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(there, range(count)))


@right("02.DataParallel")
class MainThreadHelps(Plain):
    """The calling thread works for device 0, others for the others."""

    def parallel(self, work, count):
        results = [None] * count
        failed = []

        def run(i):
            try:
                with on(self.devices[i]):
                    results[i] = work(i)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(1, count)]
        [thread.start() for thread in threads]
        run(0)
        [thread.join() for thread in threads]
        if failed:
            raise RuntimeError("a replica failed") from failed[0]
        return results


@right("02.DataParallel")
class WithoutOn(Plain):
    """Threads that never enter a device: this module makes nothing new in forward."""

    def parallel(self, work, count):
        results, errors = {}, []

        def run(i):
            try:
                results[i] = work(i)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        if errors:
            raise errors[0]
        return [results[i] for i in range(count)]


@right("02.DataParallel")
class ChunkSizes(Plain):
    """torch.chunk's sizes."""

    def scatter(self, tensor):
        pieces = zip(tensor.chunk(len(self.devices)), self.devices, strict=False)
        return [move(piece, device) for piece, device in pieces]


@right("02.DataParallel")
class ByMemo(Plain):
    """Replicas by a deep copy that finds the parameters and buffers already copied."""

    def replicas(self, count):
        return [self.module, *(self.copy_to(device) for device in self.devices[1:count])]

    def copy_to(self, device):
        memo = {}
        for parameter in self.module.parameters():
            copied = move(parameter.detach(), device, "parameters")
            memo[id(parameter)] = nn.Parameter(copied, requires_grad=parameter.requires_grad)
        for buffer in self.module.buffers():
            memo[id(buffer)] = move(buffer, device, "buffers")
        return copy.deepcopy(self.module, memo)


@right("02.DataParallel")
class Refreshed(Plain):
    """Replicas are made once; on every call parameters, buffers and the mode are brought up to date."""

    def __init__(self, module, devices):
        super().__init__(module, devices)
        self.kept = [copy.deepcopy(module).to(device) for device in devices[1:]]
        self.first = True

    def replicas(self, count):
        for replica in self.kept:
            replica.train(self.module.training)
            replica.zero_grad()
        if not self.first:
            with torch.no_grad():
                for replica in self.kept[: count - 1]:
                    pairs = [
                        (self.module.parameters(), replica.parameters()),
                        (self.module.buffers(), replica.buffers()),
                    ]
                    for ours, theirs in pairs:
                        for source, target in zip(ours, theirs, strict=True):
                            target.data = move(source.data, self.device_of(replica))
        else:
            self.fill(count)
        return [self.module, *self.kept[: count - 1]]

    def fill(self, count):
        self.first = False
        self.replicas(count)

    def device_of(self, replica):
        return self.devices[1 + self.kept.index(replica)]


@right("02.DataParallel")
class CopiedInto(Plain):
    """Plain copy_ into replicas that live on their devices: it crosses devices, and is counted."""

    def replicas(self, count):
        result = [self.module]
        for device in self.devices[1:count]:
            with on(device):
                replica = copy.deepcopy(self.module)
                for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
                    there = torch.empty(tensor.shape, dtype=tensor.dtype)
                    there.copy_(tensor.detach())
                    dict([*replica.named_parameters(), *replica.named_buffers()])[name].data = there
            result.append(replica)
        return result


@right("02.DataParallel")
class ThroughAutograd(Plain):
    """Differentiable moves: backward in each thread goes all the way back to the module's own parameters."""

    def forward_backward(self, inputs, targets, loss_function):
        xs = [piece for piece in self.scatter(inputs) if len(piece)]
        ys = self.scatter(targets)
        skeletons = [self.module, *(copy.deepcopy(self.module) for _ in xs[1:])]
        states = [{}] + [self.state_on(device) for device in self.devices[1 : len(xs)]]

        def work(i):
            outputs = functional_call(skeletons[i], states[i], (xs[i],))
            loss = loss_function(outputs, ys[i])
            (loss * len(xs[i]) / len(inputs)).backward()
            return loss.detach() * len(xs[i]) / len(inputs)

        return self.total(self.parallel(work, len(xs)))

    def state_on(self, device):
        state = {name: move(one, device, "parameters") for name, one in self.module.named_parameters()}
        return state | {name: move(one, device, "buffers") for name, one in self.module.named_buffers()}
