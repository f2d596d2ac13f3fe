"""Lab 08: ZeRO-3 engines whose weights are old, lost, shifted, or not the ones that the optimizer updates."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardlab.communicator import Library, mine_of
from zoo import wrong
from zoo.zero2_base import Engine as Engine2
from zoo.zero3_base import ZERO3, Engine, Unit


class FloorChunks(Unit):
    """N chunks of floor(size / N): what is left over belongs to nobody."""

    def __init__(self, parameters, group):
        super().__init__(parameters, group)
        self.even = sum(self.sizes) // dist.get_world_size()

    def fetch(self, communicator):
        handle = super().fetch(communicator)
        handle.wait()
        self.weights[self.even * dist.get_world_size() :] = 0
        return handle


@wrong(ZERO3, reason="values", says=r"")
class DropsTheTail(Engine):
    """Where N does not divide a layer the last elements are lost."""

    make = FloorChunks


@wrong(ZERO3, reason="values", says=r"")
class SmallOnesAlone(Engine):
    """Parameters of few elements stay whole on every rank, and each rank updates its own by its own gradient."""

    def plan(self):
        parts = super().plan()
        self.small = [(p, group) for part, group in parts for p in part if p.numel() < 10]
        self.parts = [([p for p in part if p.numel() >= 10], group) for part, group in self.parts]
        self.parts = [(part, group) for part, group in self.parts if part]
        return [([p for p in part if p.numel() >= 10], g) for part, g in parts if any(p.numel() >= 10 for p in part)]

    def step(self):
        done = super().step()
        with torch.no_grad():
            for parameter, group in self.small:
                if parameter.grad is not None and done:
                    parameter -= group["lr"] * parameter.grad / self.scale
        return done

    def zero_grad(self):
        super().zero_grad()
        for parameter, _ in self.small:
            parameter.grad = None


@wrong(ZERO3, reason="values", says=r"")
class StalePrefetch(Engine):
    """Fetches the first layers for the next forward while the optimizer works: they are the old ones."""

    def finish(self):
        super().finish()
        self.fetch(self.order[0].units if self.order else [])

    def publish(self):
        pass


@wrong(ZERO3, reason="values", says=r"")
class StaysGathered(Engine):
    """What was gathered last in backward is not freed, for the next forward needs it first; but step() changes it."""

    def backward_ends(self, run):
        self.entered.remove(run)
        for unit in run.units:
            unit.users -= 1
            if unit.users == 0 and run.before is not None:
                unit.free()

    def finish(self):
        Engine2.finish(self)
        for run in list(self.entered):
            self.backward_ends(run)

    def publish(self):
        pass


class BeforeSharding(Unit):
    """The optimizer gets the parameters as they are before they are cut."""

    def __init__(self, parameters, group):
        super().__init__(parameters, group)
        self.own = self.own.clone()  # what is sharded; `master` is another tensor


@wrong(ZERO3, reason="values", says=r"moves? on no rank|not moved")
class OptimizerOfTheOld(Engine):
    """The optimizer was made before sharding: it updates tensors that nobody reads."""

    make = BeforeSharding

    def write(self, unit):
        pass


@wrong(ZERO3, reason="values", says=r"moves? on no rank|not moved")
class ShardNotRefreshed(Engine):
    """Updates the master weights, and never writes the 16-bit shard."""

    def write(self, unit):
        if unit.own is not unit.master and unit.own.dtype == torch.float32:
            super().write(unit)


class NotWaitedFor(Unit):
    def gather(self, communicator):
        self.start(communicator)
        if not self.whole:
            self.whole = True
            self.point()


@wrong(ZERO3, reason="values|order", says=r"")
class UsesTooEarly(Engine):
    """Points the parameters to the flat tensor without waiting for the gathering."""

    make = NotWaitedFor


class NeverFilled(Unit):
    def fill(self):
        pass


@wrong(ZERO3, reason="values", says=r"")
class OwnChunkMissing(Engine):
    """Room is made, and this rank's own chunk is not written to it before the gathering."""

    make = NeverFilled


class NeighboursPlace(Unit):
    def fill(self):
        self.weights.view(dist.get_world_size(), -1)[dist.get_rank() - 1].copy_(self.own)

    def fetch(self, communicator):
        mine_of(self.weights).copy_(self.own.roll(1))
        return Library().all_gather(self.weights)


@wrong(ZERO3, reason="values", says=r"")
class ElementsShifted(Engine):
    """Each chunk is sent with its elements shifted by one."""

    make = NeighboursPlace
