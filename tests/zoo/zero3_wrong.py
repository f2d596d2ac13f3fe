"""Lab 08: ZeRO-3 by name only: what these engines hold or send is too much."""

from __future__ import annotations

import torch

from shardlab.communicator import Library
from zoo import wrong
from zoo.zero2_base import Engine as Engine2
from zoo.zero3_base import ZERO3, Engine, Renewed, Unit
from zoo.zero_replicated import Alone, Replicated


@wrong(ZERO3, reason="memory", says=r"12 psi/N")
class PlainDDP(Replicated):
    """DDP renamed: every rank holds everything."""


@wrong(ZERO3, reason="values", says=r"")
class PlainAdamW(Alone):
    """Sends nothing: each rank trains a model of its own."""


@wrong(ZERO3, reason="memory", says=r"weights|whole")
class Zero2Renamed(Engine2):
    """The engine of lab 07 under another name."""


@wrong(ZERO3, reason="memory", says=r"during forward|between forward and backward")
class AllAtOnce(Engine):
    """Gathers everything when the forward begins, and lets go when backward is over."""

    def forward(self, *inputs):
        if not torch.is_grad_enabled():
            return super().forward(*inputs)
        self.acquire(self.units)
        return super().forward(*inputs)

    def finish(self):
        super().finish()
        for unit in self.units:
            unit.users = 0
            unit.free()


@wrong(ZERO3, reason="memory", says=r"during forward")
class AllForEachPass(Engine):
    """Everything is gathered before the forward and freed after it; then again around backward."""

    def forward(self, *inputs):
        with self.gathered():
            return super().forward(*inputs)

    def backward(self, loss):
        with self.gathered():
            super().backward(loss)


@wrong(ZERO3, reason="memory", says=r"between forward and backward|graph")
class SwapsData(Engine):
    """Gives the parameters other memory; the graph keeps the old one, with the whole weights."""

    make = Renewed


class KeptWhole(Unit):
    def release(self):
        pass


@wrong(ZERO3, reason="memory", says=r"")
class NeverFrees(Engine):
    """The parameters look empty at rest, but the flat tensors stay."""

    make = KeptWhole


@wrong(ZERO3, reason="memory", says=r"between forward and backward")
class KeepsUntilBackward(Engine):
    """Does not gather again: what the forward gathered stays whole until its backward."""

    def forward_ends(self, units, output):
        if torch.is_grad_enabled():
            for unit in units:
                unit.users += 1
        super().forward_ends(units, output)

    def backward_begins(self, run):
        if not run.entered:
            run.entered = True
            self.entered.append(run)

    def settle(self):
        self.order = list(self.now)


@wrong(ZERO3, reason="memory", says=r"after backward|during backward")
class FreesInForwardOnly(Engine):
    """Gathers again in backward, and frees nothing there before the step."""

    def backward_ends(self, run):
        self.entered.remove(run)
        for unit in run.units:
            unit.users -= 1

    def free_unused(self):
        if not self.entered and not self.active:
            return
        super().free_unused()

    def publish(self):
        for unit in self.units:
            unit.free()


@wrong(ZERO3, reason="memory", says=r"during forward|during backward")
class FetchesAllAhead(Engine):
    """Prefetch without a limit: when the first layer runs, all others are on their way."""

    ahead = 1000


@wrong(ZERO3, reason="bytes", says=r"4\.")
class GathersAfterTheStep(Engine):
    """Sends the new weights round after the step, as ZeRO-2 does, and then frees them."""

    def publish(self):
        self.free_unused()
        for unit in self.units:
            unit.gather(self.communicator)
            unit.free()


@wrong(ZERO3, reason="bytes", says=r"")
class AllReduces(Engine):
    """Gradients are summed on every rank, and each takes its part."""

    def reduce(self, bucket):
        return self.communicator.all_reduce(bucket.flat)


@wrong(ZERO3, reason="bytes|memory", says=r"")
class GathersTwiceInForward(Engine):
    """Frees after each fetch ahead, so every layer is sent twice before it runs."""

    def fetch(self, units):
        for unit in units:
            if unit.users == 0:
                unit.gather(self.communicator)
                unit.free()


class FullMaster(Unit):
    def __init__(self, parameters, group):
        super().__init__(parameters, group)
        if group is not None:
            self.gather(Library())
            self.everything = self.weights.float().clone()
            self.free()


@wrong(ZERO3, reason="memory", says=r"")
class WholeMaster(Engine):
    """Keeps a float32 copy of all weights, and shards the rest."""

    make = FullMaster


@wrong(ZERO3, reason="memory", says=r"construction")
class StateOfAllFirst(Engine):
    """Makes the optimizer's state of the whole model first and cuts it afterwards."""

    def plan(self):
        whole = [torch.zeros(p.shape) for p in self.module.parameters() for _ in range(3)]
        for tensor in whole:
            tensor.add_(0)
        return super().plan()


@wrong(ZERO3, reason="memory|order", says=r"backward|reduction")
class GradientsUntilTheEnd(Engine):
    """Weights come and go; gradients stay whole until backward is over."""

    def advance(self):
        pass
