"""Lab 02: DataParallel with wrong replicas."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.func import functional_call

from shardlab import move

from . import wrong
from .data_parallel_plain import Plain, replicate


@wrong("02.DataParallel", reason="memory", says="same module object")
class OneModuleForAll(Plain):
    """All threads call the same module: its parameters are on one device only."""

    def replicas(self, count):
        return [self.module] * count


@wrong("02.DataParallel", reason="memory", says="same module object")
class OneModuleOtherParameters(Plain):
    """One module in all threads, with parameters of each device slipped in: what forward keeps on self is shared."""

    def __call__(self, inputs):
        xs = [piece for piece in self.scatter(inputs) if len(piece)]
        states = [self.state_on(device) for device in self.devices[: len(xs)]]
        return self.gathered(self.parallel(lambda i: functional_call(self.module, states[i], (xs[i],)), len(xs)))

    def state_on(self, device):
        return {
            name: move(one.detach(), device)
            for name, one in [*self.module.named_parameters(), *self.module.named_buffers()]
        }


@wrong("02.DataParallel", reason="values", says="parameters have changed.*\n.*\n.*made anew")
class MadeOnce(Plain):
    """Replicas are made in __init__ and never again."""

    def __init__(self, module, devices):
        super().__init__(module, devices)
        self.made = [module, *(replicate(module, device) for device in devices[1:])]

    def replicas(self, count):
        for replica in self.made[1:]:
            replica.zero_grad()
        return self.made[:count]


@wrong("02.DataParallel", reason="values", says="step 2.*\n.*\n.*made anew")
class AnewInForwardOnly(Plain):
    """dp(inputs) makes new replicas, forward_backward uses those of the first time."""

    def forward_backward(self, inputs, targets, loss_function):
        plain, kept = self.replicas, getattr(self, "kept", None)
        self.kept = kept or plain(len(self.devices))
        for replica in self.kept[1:]:
            replica.zero_grad()
        self.replicas = lambda count: self.kept[:count]
        try:
            return super().forward_backward(inputs, targets, loss_function)
        finally:
            del self.replicas


class _Kept(Plain):
    """Replicas are made once and brought up to date, but not in everything."""

    def __init__(self, module, devices):
        super().__init__(module, devices)
        self.made = [module, *(replicate(module, device) for device in devices[1:])]

    def replicas(self, count):
        for replica, device in zip(self.made[1:count], self.devices[1:count], strict=True):
            self.refresh(replica, device)
        return self.made[:count]

    def refresh(self, replica, device):
        replica.zero_grad()
        replica.train(self.module.training)
        self.copy(self.module.parameters(), replica.parameters(), device)
        self.copy(self.module.buffers(), replica.buffers(), device)

    def copy(self, ours, theirs, device):
        for source, target in zip(ours, theirs, strict=True):
            target.data = move(source.detach(), device)


@wrong("02.DataParallel", reason="bytes|values", says="buffers")
class BuffersStay(_Kept):
    """Parameters are brought up to date, buffers are not."""

    def refresh(self, replica, device):
        replica.zero_grad()
        replica.train(self.module.training)
        self.copy(self.module.parameters(), replica.parameters(), device)


@wrong("02.DataParallel", reason="values", says="eval")
class ModeStays(_Kept):
    """A replica stays in the mode in which it was made."""

    def refresh(self, replica, device):
        replica.zero_grad()
        self.copy(self.module.parameters(), replica.parameters(), device)
        self.copy(self.module.buffers(), replica.buffers(), device)


@wrong("02.DataParallel", reason="values", says="without zero_grad|twice|steps of SGD")
class GradientsStay(_Kept):
    """A replica's .grad of the last call is still there in the next."""

    def refresh(self, replica, device):
        replica.train(self.module.training)
        self.copy(self.module.parameters(), replica.parameters(), device)
        self.copy(self.module.buffers(), replica.buffers(), device)


@wrong("02.DataParallel", reason="values|bytes", says="changed|did not travel|buffer")
class ByStateDict(_Kept):
    """state_dict leaves out buffers that are not persistent."""

    def refresh(self, replica, device):
        replica.zero_grad()
        replica.train(self.module.training)
        replica.load_state_dict(self.module.state_dict())


@wrong("02.DataParallel", reason="values", says="tied weight")
class TiesBroken(Plain):
    """Copies parameter by parameter, layer by layer: a shared weight becomes two."""

    def replicas(self, count):
        return [self.module, *(self.copy_to(device) for device in self.devices[1:count])]

    def copy_to(self, device):
        replica = copy.deepcopy(self.module)
        for layer in replica.modules():
            for name, parameter in list(layer._parameters.items()):
                if parameter is not None:
                    layer._parameters[name] = nn.Parameter(move(parameter.detach(), device), parameter.requires_grad)
            for name, buffer in list(layer._buffers.items()):
                layer._buffers[name] = move(buffer, device)
        return replica

    def collect(self, replicas):
        for replica in replicas[1:]:
            theirs = dict(replica.named_parameters())
            for name, mine in self.module.named_parameters():
                self.add(mine, theirs[name].grad)


@wrong("02.DataParallel", reason="values", says="frozen has a gradient|is frozen")
class EverythingLearns(Plain):
    """A new nn.Parameter requires gradients, also where the module's does not."""

    def replicas(self, count):
        replicas = super().replicas(count)
        for replica in replicas[1:]:
            replica.requires_grad_(True)
        return replicas


@wrong("02.DataParallel", reason="values", says="running_mean has not changed")
class StatisticsLost(Plain):
    """Replica 0 is a copy, and its buffers are thrown away with it."""

    def replicas(self, count):
        return [copy.deepcopy(self.module), *super().replicas(count)[1:]]

    def collect(self, replicas):
        super().collect([None, *replicas])


@wrong("02.DataParallel", reason="values", says="not what device 0's replica made of it")
class StatisticsOfTheLast(Plain):
    """Keeps the buffers of the last device's replica."""

    def collect(self, replicas):
        super().collect(replicas)
        for mine, theirs in zip(self.module.buffers(), replicas[-1].buffers(), strict=True):
            mine.copy_(theirs)


@wrong("02.DataParallel", reason="bytes", says="talks to device 1|talks to device 2")
class FromReplicaToReplica(Plain):
    """Each replica is copied from the one before: no load on device 0, but not what is asked for here."""

    def replicas(self, count):
        replicas = [self.module]
        for device in self.devices[1:count]:
            replicas.append(copy.deepcopy(replicas[-1]).to(device))
        return replicas


@wrong("02.DataParallel", reason="bytes", says="talks to device")
class EverybodyGetsTheMean(Plain):
    """All devices exchange all gradients, as DDP's would."""

    def collect(self, replicas):
        for one in replicas[1:]:
            for other, device in zip(replicas, self.devices, strict=False):
                if other is not one:
                    for parameter in one.parameters():
                        if parameter.grad is not None:
                            move(parameter.grad, device)
        super().collect(replicas)


@wrong("02.DataParallel", reason="bytes", says="receives.*\n.*\n.*travelled twice")
class ReplicatesTwice(Plain):
    """New replicas for backward, after those for a forward that only checks shapes."""

    def replicas(self, count):
        super().replicas(count)
        return super().replicas(count)


@wrong("02.DataParallel", reason="bytes", says="receives.*\n.*\n.*whole batch")
class WholeBatchEverywhere(Plain):
    """Moves the batch to every device and cuts there."""

    def scatter(self, tensor):
        return [move(tensor, device).tensor_split(len(self.devices))[i] for i, device in enumerate(self.devices)]


@wrong("02.DataParallel", reason="device|bytes|values", says="device 0|on the host|did not travel|worked on")
class AllOnDeviceZero(Plain):
    """Copies, but never moves anything."""

    def scatter(self, tensor):
        return list(tensor.tensor_split(len(self.devices)))

    def replicas(self, count):
        return [self.module, *(copy.deepcopy(self.module) for _ in range(count - 1))]


@wrong("02.DataParallel", reason="memory", says="holds.*bytes after steps")
class Hoards(Plain):
    """Keeps all replicas ever made, for a look at them later."""

    def __init__(self, module, devices):
        super().__init__(module, devices)
        self.history = []

    def replicas(self, count):
        replicas = super().replicas(count)
        self.history.append(replicas)
        return replicas


@wrong("02.DataParallel", reason="memory", says="device 0 holds")
class HoardsLosses(Plain):
    """Keeps the losses with their graphs."""

    def __init__(self, module, devices):
        super().__init__(module, devices)
        self.losses = []

    def add(self, mine, gradient):
        super().add(mine, gradient)
        self.losses.append(mine.grad.clone() if mine.grad is not None else torch.zeros(()))


@wrong("02.DataParallel", reason="values|device|crash", says="devices .2, 0, 3.")
class CountsOnNumbers(Plain):
    """Takes device.index for the place in the list."""

    def parallel(self, work, count):
        there = super().parallel(work, count)
        results = {device.index: result for device, result in zip(self.devices, there, strict=False)}
        return [results[i] for i in range(count)]
