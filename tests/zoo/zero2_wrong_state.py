"""Lab 07: ZeRO-2 engines that are wrong in scale, skipped steps, master weights, or in who gets what."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from zoo import wrong
from zoo.zero2_base import ZERO2, Bucket, Engine


@wrong(ZERO2, reason="values", says=r"never divided by the scale")
class NeverUnscales(Engine):
    """The scale stays in the gradients."""

    def factor(self, norm):
        return super().factor(norm) * self.scale


@wrong(ZERO2, reason="values", says=r"divided by the scale twice")
class UnscalesTwice(Engine):
    """Once when the gradients arrive, once in the step."""

    def factor(self, norm):
        return super().factor(norm) / self.scale


@wrong(ZERO2, reason="values", says=r"unscale first, grow last")
class ScalesBeforeUnscaling(Engine):
    """The scale grows before this step's gradients are divided by it."""

    def step(self):
        before = self.scale
        if self.good + 1 == self.growth_interval:
            self.scale *= 2
        stepped = super().step()
        if stepped and self.good == 0:
            self.scale = before * 2
        return stepped


@wrong(ZERO2, reason="values", says=r"was skipped, yet")
class ZeroesInsteadOfSkipping(Engine):
    """After an overflow it steps with gradients of zero: the moments move, and so do the weights."""

    def norm(self):
        norm = super().norm()
        self.bad = not math.isfinite(norm)
        if self.bad:
            self.zero_grad()
        return 0.0 if self.bad else norm

    def grow(self):
        if self.bad:
            self.overflowed()
        else:
            super().grow()

    def step(self):
        super().step()
        return not self.bad


@wrong(ZERO2, reason="values", says=r"also counts the skipped steps")
class CountsSkippedSteps(Engine):
    """The step count of the bias correction goes on in a skipped step."""

    def overflowed(self):
        super().overflowed()
        for bucket in self.buckets:
            bucket.steps += 1


@wrong(ZERO2, reason="values", says=r"scale 0\.5")
class NoFloor(Engine):
    """The scale halves below 1."""

    def overflowed(self):
        self.scale, self.good = self.scale / 2, 0


@wrong(ZERO2, reason="values", says=r"scale 8 after (?s:.*)counted anew")
class GrowthIsNotReset(Engine):
    """Good steps are counted across overflows."""

    def overflowed(self):
        self.scale = max(self.scale / 2, 1.0)


@wrong(ZERO2, reason="values", says=r"scale \d")
class ScaleOfItsOwn(Engine):
    """All ranks skip, but only rank 0 keeps the books: the scales part."""

    def overflowed(self):
        if dist.get_rank() == 0:
            super().overflowed()


@wrong(ZERO2, reason="values", says=r"rounded to 16 bits in every step")
class MasterMadeAnew(Engine):
    """The master weights are made from the fp16 weights in every step: small updates are lost."""

    def update(self, bucket, factor):
        bucket.master = bucket.weights[bucket.mine].float()
        super().update(bucket, factor)


@wrong(ZERO2, reason="values|memory", says=r"rounded to 16 bits in every step|holds")
class NoMaster(Engine):
    """fp16 weights are updated directly, and so are fp16 moments."""

    class make(Bucket):  # noqa: N801
        def __init__(self, parameters, group):
            super().__init__(parameters, group)
            self.master = self.weights[self.mine]
            self.first, self.second = torch.zeros_like(self.master), torch.zeros_like(self.master)

    def update(self, bucket, factor):
        bucket.steps += 1
        self.adam(bucket, bucket.group, (bucket.gradient.float() * factor).to(bucket.master.dtype), bucket.steps)


@wrong(ZERO2, reason="values", says=r'the first "lr"')
class OptionsAreCopied(Engine):
    """The learning rate is the one of the constructor, whatever the schedule says."""

    class make(Bucket):  # noqa: N801
        def __init__(self, parameters, group):
            super().__init__(parameters, dict(group))


@wrong(ZERO2, reason="values", says=r"'frozen\.weight'")
class TrainsFrozenOnes(Engine):
    """Frozen parameters are in the buckets, and decay."""

    def __init__(self, model, *args, **options):
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)
        super().__init__(model, *args, **options)
        for parameter in frozen:
            parameter.requires_grad_(False)


@wrong(ZERO2, reason="values", says=r"has not moved")
class DropsTheTail(Engine):
    """Chunks are rounded down: what N does not divide is nobody's."""

    class make(Bucket):  # noqa: N801
        def __init__(self, parameters, group):
            super().__init__(parameters, group)
            self.rest = sum(self.sizes) % dist.get_world_size()
            if self.rest:
                self.tail = self.weights[: sum(self.sizes)][-self.rest :].clone()

    def publish(self):
        super().publish()
        for bucket in self.buckets:
            if bucket.rest:
                bucket.weights[: sum(bucket.sizes)][-bucket.rest :] = bucket.tail


@wrong(ZERO2, reason="values", says=r"branches")
class FillsWithGarbage(Engine):
    """The flat tensor is torch.empty: parameters without gradient, and the padding, are whatever was there."""

    def open(self, bucket):
        if bucket.flat is None:
            super().open(bucket)
            bucket.flat.fill_(3.0)  # what the allocator had


@wrong(ZERO2, reason="values|hang|calls", says=r"branches|leaves out a layer")
class ForgetsTheIncompleteBucket(Engine):
    """A bucket in which a gradient is missing is not sent: an unused layer keeps its neighbours' gradients back."""

    def finish(self):
        for bucket in self.waiting:
            bucket.flat = None
        self.waiting = [bucket for bucket in self.waiting if not bucket.missing]
        super().finish()

    def advance(self):
        while self.waiting and not self.waiting[0].missing:
            self.launch(self.waiting.pop(0))


@wrong(ZERO2, reason="values|hang|calls|order", says=r"leaves out a layer|branches")
class SendsWhatIsComplete(Engine):
    """Buckets leave when they are complete, in whatever order that is on this rank."""

    def advance(self):
        for bucket in [each for each in self.waiting if not each.missing]:
            self.waiting.remove(bucket)
            self.launch(bucket)


@wrong(ZERO2, reason="values", says=r"rank [12], N = 3(?s:.*)has not moved")
class NobodyIsRankZero(Engine):
    """`if owner`: rank 0's part is never handed round."""

    def publish(self):
        for bucket in self.buckets:
            for owner, part in enumerate(bucket.weights.chunk(dist.get_world_size())):
                if owner:
                    self.communicator.broadcast(part, owner).wait()
