"""Lab 02: one plain solution in parts, so that a specimen need only say what it does differently."""

from __future__ import annotations

import copy
import threading

import torch

from shardlab import move, on


def scatter(tensor, devices):
    return [move(piece, device) for piece, device in zip(tensor.tensor_split(len(devices)), devices, strict=True)]


def gather(pieces, device):
    return torch.cat([move(piece, device) for piece in pieces])


def replicate(module, device):
    """Copies on the module's device and takes the copy to the other one."""
    return copy.deepcopy(module).to(device)


def in_threads(work, devices):
    """work(0), work(1), ... at the same time, each in a thread that works on its device."""
    results, errors = [None] * len(devices), []

    def run(number):
        try:
            with on(devices[number]):
                results[number] = work(number)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(devices))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


class Plain:
    """Replica 0 is the module itself; losses are weighted before backward; gradients are added on devices[0]."""

    def __init__(self, module, devices):
        self.module, self.devices = module, devices

    def scatter(self, tensor):
        return scatter(tensor, self.devices)

    def replicas(self, count):
        return [self.module, *(replicate(self.module, device) for device in self.devices[1:count])]

    def parallel(self, work, count):
        return in_threads(work, self.devices[:count])

    def __call__(self, inputs):
        pieces = [piece for piece in self.scatter(inputs) if len(piece)]
        replicas = self.replicas(len(pieces))
        return self.gathered(self.parallel(lambda i: replicas[i](pieces[i]), len(pieces)))

    def gathered(self, outputs):
        return gather(outputs, self.devices[0])

    def forward_backward(self, inputs, targets, loss_function):
        xs = [piece for piece in self.scatter(inputs) if len(piece)]
        ys = self.scatter(targets)
        replicas = self.replicas(len(xs))

        def work(i):
            loss = loss_function(replicas[i](xs[i]), ys[i]) * self.weight(len(xs[i]), len(inputs), len(xs))
            loss.backward()
            return loss.detach()

        losses = self.parallel(work, len(xs))
        self.collect(replicas)
        return self.total(losses)

    def weight(self, mine, rows, count):
        return mine / rows

    def collect(self, replicas):
        for replica in replicas[1:]:
            for mine, theirs in zip(self.module.parameters(), replica.parameters(), strict=True):
                self.add(mine, theirs.grad)

    def add(self, mine, gradient):
        if gradient is not None:
            moved = move(gradient, self.devices[0], "gradients")
            mine.grad = moved if mine.grad is None else mine.grad + moved

    def total(self, losses):
        return sum(move(loss, self.devices[0]) for loss in losses)
