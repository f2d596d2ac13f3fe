"""Lab 08: ZeRO-3 engines whose numbers are off: gradients, factors, overflow, groups, and what the engine promises."""

from __future__ import annotations

import contextlib
import math

import torch
import torch.distributed as dist

from zoo import wrong
from zoo.zero3_base import ZERO3, Engine


@wrong(ZERO3, reason="values", says=r"")
class NoBroadcast(Engine):
    """Each rank cuts its own weights: the model is made of chunks of N different models."""

    def broadcast(self):
        pass


@wrong(ZERO3, reason="values", says=r"")
class ParametersOnly(Engine):
    """Buffers stay different on every rank."""

    def broadcast(self):
        for parameter in self.module.parameters():
            dist.broadcast(parameter.data, src=0)


@wrong(ZERO3, reason="values", says=r"")
class Sums(Engine):
    """Gradients are summed, not averaged."""

    def scaled(self, loss):
        return loss * self.scale


@wrong(ZERO3, reason="values", says=r"")
class DividesTwice(Engine):
    """By N in the loss and by N again when the sum is there."""

    def add(self, bucket):
        bucket.flat /= dist.get_world_size()
        super().add(bucket)


@wrong(ZERO3, reason="values", says=r"")
class OverwritesTheShard(Engine):
    """The second backward replaces what the first has left."""

    def add(self, bucket):
        bucket.gradient.copy_(bucket.flat[bucket.mine])


@wrong(ZERO3, reason="values", says=r"")
class NeverUnscales(Engine):
    """The loss scale stays in the gradients."""

    def factor(self, norm):
        return super().factor(norm) * self.scale


@wrong(ZERO3, reason="values", says=r"")
class UnscalesTwice(Engine):
    """Divides by the scale twice."""

    def factor(self, norm):
        return super().factor(norm) / self.scale


@wrong(ZERO3, reason="values", says=r"")
class OverflowOfTheOwnShard(Engine):
    """Each rank looks at its own shard only: some skip, others step."""

    def norm(self):
        norm = super().norm()
        own = sum(float(torch.linalg.vector_norm(unit.gradient.double())) for unit in self.buckets)
        return norm if math.isfinite(norm) else own


@wrong(ZERO3, reason="values", says=r"")
class MissesNaN(Engine):
    """Looks for numbers that are too large. NaN is not larger than anything."""

    def norm(self):
        norm = super().norm()
        return norm if norm > 1e300 or norm < 1e300 else 1.0


@wrong(ZERO3, reason="values", says=r"")
class ZeroesInsteadOfSkipping(Engine):
    """After an overflow gradients are set to zero, and the step is made: moments and weight decay still move."""

    @torch.no_grad()
    def step(self):
        if not math.isfinite(self.norm()):
            self.zero_grad()
            for unit in self.buckets:
                self.update(unit, 1.0)
            self.publish()
            self.overflowed()
            return False
        return super().step()


@wrong(ZERO3, reason="values", says=r"")
class ScaleChangedFirst(Engine):
    """The scale grows before the gradients are unscaled, so they are divided by the wrong one."""

    def factor(self, norm):
        if self.good + 1 == self.growth_interval:
            return super().factor(norm) / 2
        return super().factor(norm)


@wrong(ZERO3, reason="values", says=r"")
class GrowthNotRestarted(Engine):
    """An overflow halves the scale, and the count of good steps goes on."""

    def overflowed(self):
        self.scale = max(self.scale / 2, 1.0)


@wrong(ZERO3, reason="values", says=r"")
class NoFloor(Engine):
    """The scale falls below 1."""

    def overflowed(self):
        self.scale, self.good = self.scale / 2, 0


@wrong(ZERO3, reason="values", says=r"")
class MasterFromHalf(Engine):
    """The float32 weights are made anew from the 16-bit ones in every step: small updates are lost."""

    def update(self, bucket, factor):
        if bucket.master is not None:
            bucket.master.copy_(bucket.own)
        super().update(bucket, factor)


@wrong(ZERO3, reason="values", says=r"")
class LocalNorm(Engine):
    """Clips by the norm of this rank's shard."""

    def factor(self, norm):
        own = sum(float(torch.linalg.vector_norm(unit.gradient.double())) ** 2 for unit in self.buckets)
        return super().factor(math.sqrt(own))


@wrong(ZERO3, reason="values", says=r"")
class ClipsScaled(Engine):
    """Compares max_norm with the norm of gradients that still carry the scale."""

    def factor(self, norm):
        return super().factor(norm * self.scale)


@wrong(ZERO3, reason="values|signature", says=r"")
class OneGroup(Engine):
    """Options of the groups are lost: all have those of the first."""

    def adam(self, state, group, gradient, steps):
        super().adam(state, self.param_groups[0], gradient, steps)


@wrong(ZERO3, reason="values", says=r"")
class RateOfTheFirstStep(Engine):
    """Reads the learning rate once."""

    def adam(self, state, group, gradient, steps):
        state.options = getattr(state, "options", dict(group))
        super().adam(state, state.options, gradient, steps)


@wrong(ZERO3, reason="values", says=r"")
class NoBiasCorrection(Engine):
    """Adam's moments as they are."""

    def adam(self, state, group, gradient, steps):
        super().adam(state, group, gradient, 1000)


@wrong(ZERO3, reason="values", says=r"")
class DecayInTheGradient(Engine):
    """Weight decay as in the old Adam: added to the gradient."""

    def adam(self, state, group, gradient, steps):
        gradient = gradient + group["weight_decay"] * state.master
        super().adam(state, {**group, "weight_decay": 0.0}, gradient, steps)


@wrong(ZERO3, reason="signature|values", says=r"inside gathered")
class GatheredDoesNothing(Engine):
    """gathered() is that of lab 07."""

    @contextlib.contextmanager
    def gathered(self):
        yield


@wrong(ZERO3, reason="values|signature", says=r"")
class StepReturnsNothing(Engine):
    """Nobody learns whether the step was skipped."""

    def step(self):
        super().step()


@wrong(ZERO3, reason="signature", says=r"other objects")
class NewParameters(Engine):
    """Replaces the model's parameters by new ones."""

    def __init__(self, model, **options):
        super().__init__(model, **options)
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, torch.nn.Parameter(parameter.data, parameter.requires_grad))


@wrong(ZERO3, reason="values", says=r"")
class ForgetsAFrozenLayer(Engine):
    """Frozen parameters are not sharded: their weights are trained like the others'."""

    def plan(self):
        for parameter in self.module.parameters():
            parameter.requires_grad_(True)
        return super().plan()


@wrong(ZERO3, reason="crash|values|memory", says=r"")
class OneUserAtATime(Engine):
    """Does not count users: the first pass that ends frees the unit, whoever else needs it."""

    def release(self, units):
        for unit in units:
            unit.users = 0
            unit.free()
