"""Lab 07: ZeRO-2 engines whose sums, norm or verdict on an overflow are wrong."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from zoo import wrong
from zoo.zero2_base import ZERO2, Engine


@wrong(ZERO2, reason="values", says=r"'layers\.0\.weight' is still this rank's own")
class NoBroadcast(Engine):
    """Every rank starts from weights of its own."""

    def broadcast(self):
        pass


@wrong(ZERO2, reason="values", says=r"'drift\.\w+' is still this rank's own")
class BuffersAreForgotten(Engine):
    """Parameters are broadcast, buffers are not."""

    def broadcast(self):
        for parameter in self.module.parameters():
            dist.broadcast(parameter.data, src=0)


@wrong(ZERO2, reason="values", says=r"the sum of the ranks' gradients")
class SumsInsteadOfMean(Engine):
    """Nobody divides by N."""

    def scaled(self, loss):
        return loss * self.scale


@wrong(ZERO2, reason="values", says=r"divided by N twice")
class DividesTwice(Engine):
    """In the loss, and again when the sum has arrived."""

    def add(self, bucket):
        bucket.gradient.add_(bucket.flat[bucket.mine] / dist.get_world_size())


@wrong(ZERO2, reason="values", says=r"the last backward alone")
class OverwritesTheShard(Engine):
    """The second backward replaces what the first one brought."""

    def add(self, bucket):
        bucket.gradient.copy_(bucket.flat[bucket.mine])


@wrong(ZERO2, reason="values", says=r"the last backward alone")
class ClearsInBackward(Engine):
    """zero_grad at the beginning of each backward, to be on the safe side."""

    def backward(self, loss):
        self.zero_grad()
        super().backward(loss)


@wrong(ZERO2, reason="values", says=r"zero_grad\(\) did not clear")
class ZeroGradForgetsTheShard(Engine):
    """zero_grad() clears `.grad`, where there is nothing."""

    def zero_grad(self):
        for parameter in self.module.parameters():
            parameter.grad = None


@wrong(ZERO2, reason="values|calls|hang", says=r"overflow on some ranks only")
class OverflowOfTheOwnShard(Engine):
    """Each rank decides by its own chunks: one skips, the others step."""

    def norm(self):
        norm = super().norm()
        finite = all(bucket.gradient.isfinite().all() for bucket in self.buckets)
        return (norm if math.isfinite(norm) else 1.0) if finite else math.inf


@wrong(ZERO2, reason="values", says=r"max_norm=0\.5(?s:.*)over all ranks' parts")
class NormOfTheOwnShard(Engine):
    """Clips by the norm of the own chunks, having agreed about overflow."""

    def norm(self):
        norm = super().norm()
        own = torch.stack([torch.linalg.vector_norm(bucket.gradient.float()) for bucket in self.buckets]).norm().item()
        return own if math.isfinite(norm) else norm


@wrong(ZERO2, reason="values", says=r"max_norm=0\.5")
class ClipsTheScaledNorm(Engine):
    """max_norm is compared with the norm that still has the scale in it."""

    def factor(self, norm):
        return super().factor(norm * self.scale)


@wrong(ZERO2, reason="values|calls|hang", says=r"overflow on some ranks only")
class LooksAtTheLoss(Engine):
    """Overflow is what shows in the loss."""

    def backward(self, loss):
        self.bad = not loss.isfinite()
        super().backward(loss)

    def norm(self):
        norm = super().norm()
        return math.inf if self.bad else norm if math.isfinite(norm) else 1.0


@wrong(ZERO2, reason="values", says=r"overflow")
class LooksAtTheFirstBucket(Engine):
    """The first bucket stands for all."""

    def norm(self):
        bucket = self.buckets[0]
        bad = (~bucket.gradient.isfinite()).sum().double().reshape(1)
        self.communicator.all_reduce(bad).wait()
        norm = super().norm()
        return math.inf if bad.item() else norm if math.isfinite(norm) else 1.0


@wrong(ZERO2, reason="values", says=r"a gradient element is nan(?s:.*)stepped")
class MissesNaN(Engine):
    """Asks whether the norm is inf, and NaN is not."""

    def norm(self):
        norm = super().norm()
        return 1.0 if math.isnan(norm) else norm


@wrong(ZERO2, reason="values|calls|hang", says=r"overflow on some ranks only")
class LooksBeforeTheSum(Engine):
    """Each rank looks at its own gradients in backward, and keeps what it found to itself."""

    def backward(self, loss):
        self.bad = False
        super().backward(loss)

    def take(self, bucket, place, parameter):
        self.bad = self.bad or not parameter.grad.isfinite().all()
        parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
        super().take(bucket, place, parameter)

    def step(self):
        if self.bad:
            self.overflowed()
            self.norm()
            return False
        return super().step()

    def publish(self):
        for bucket in self.buckets:
            self.communicator.all_gather(bucket.weights).wait()
