"""Lab 07: engines that hold a little more than their formula says, at rest."""

from __future__ import annotations

import torch

from shardlab.communicator import Library
from zoo import wrong
from zoo.zero2_base import ZERO2, Engine


@wrong(ZERO2, reason="memory", says=r"holds 8\.")
class ViewOfTheFlatTensor(Engine):
    """The first backward's shard is a view, and so keeps all chunks."""

    def add(self, bucket):
        if bucket.gradient is None:
            bucket.gradient = bucket.flat[bucket.mine]
        else:
            bucket.gradient.add_(bucket.flat[bucket.mine])

    def zero_grad(self):
        for bucket in self.buckets:
            bucket.gradient = None

    def step(self):
        for bucket in self.buckets:
            if bucket.gradient is None:
                bucket.gradient = bucket.weights.new_zeros(bucket.chunk)
        return super().step()


@wrong(ZERO2, reason="memory", says=r"holds 8\.")
class KeepsTheHandle(Engine):
    """The flat tensor goes, and the handle that still has it does not."""

    def land(self, bucket):
        bucket.handle.wait()
        self.add(bucket)
        bucket.flat = None


@wrong(ZERO2, reason="memory", says=r"holds 7\.1")
class AQuarterMore(Engine):
    """Every fourth bucket's flat tensor stays."""

    kept = ()

    def land(self, bucket):
        place = self.buckets.index(bucket)
        if place % 8 == 1:
            self.kept = {**dict(self.kept), place: bucket.flat}
        super().land(bucket)


@wrong(ZERO2, reason="memory", says=r"during backward rank \d holds up to(?s:.*)at most 7\.[56]")
class LandsTheNewest(Engine):
    """Nothing lands before the end: `flat = None` comes while a view of it is kept in the list."""

    def open(self, bucket):
        if bucket.flat is None:
            bucket.flat = torch.zeros_like(bucket.weights)


@wrong(ZERO2, reason="memory", says=r"during backward rank \d holds up to")
class KeepsGradUntilTheEnd(Engine):
    """Each `.grad` goes when backward is over."""

    def drop(self, parameter):
        pass

    def finish(self):
        super().finish()
        for parameter in self.module.parameters():
            parameter.grad = None


@wrong(ZERO2, reason="calls", says=r"go round the communicator")
class OwnLibrary(Engine):
    """Reduces with torch.distributed, whatever was handed in."""

    def reduce(self, bucket):
        return Library().reduce_scatter(bucket.flat)
