"""Lab 08: ZeRO-3 by name only: what these engines hold or send is too much, or weights are old, lost or untouched."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import nn

from shardlab.communicator import Library, mine_of
from zoo import wrong
from zoo.zero2_base import Engine as Engine2
from zoo.zero3_base import ZERO3, Engine, Renewed, Unit


@wrong(ZERO3, reason="memory", says=r"12 psi/N")
class PlainDDP(nn.Module):
    """DDP renamed: every rank holds everything."""

    def __init__(
        self, model, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, groups=None, scale=2.0**16, **others
    ):
        super().__init__()
        self.module = model
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.data, src=0)
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.optimizer = torch.optim.AdamW(groups or model.parameters(), **options)
        self.scale, self.param_groups = scale, self.optimizer.param_groups

    def forward(self, *inputs):
        return self.module(*inputs)

    @contextlib.contextmanager
    def gathered(self):
        yield

    def backward(self, loss):
        loss.backward()
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad /= dist.get_world_size()
                dist.all_reduce(parameter.grad)

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        self.optimizer.step()
        return True


@wrong(ZERO3, reason="values", says=r"")
class PlainAdamW(PlainDDP):
    """Sends nothing: each rank trains a model of its own."""

    def backward(self, loss):
        loss.backward()


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
