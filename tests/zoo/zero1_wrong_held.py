"""Lab 06: engines that hold too much for a moment, or that take short cuts which small cases do not show."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist

from shardlab.communicator import Library
from zoo import wrong
from zoo.zero1_base import ZERO1, Bucket, Engine
from zoo.zero_replicated import Alone, Replicated


class CutAfterwards(Bucket):
    def make_state(self):
        whole = self.weights.float()
        first, second = torch.zeros_like(whole), torch.zeros_like(whole)
        self.master, self.first, self.second = (each[self.mine].clone() for each in (whole, first, second))
        if self.weights.dtype == torch.float32:
            self.master = self.weights[self.mine]


@wrong(ZERO1, reason="memory", says=r"all in one bucket(?s:.*)during construction rank \d holds up to")
class FullStateFirst(Engine):
    """The state of a whole bucket is made and then cut."""

    make = CutAfterwards


@wrong(ZERO1, reason="calls", says=r"calls of all_reduce on one number(?s:.*)one for the norm")
class OneNormForEachBucket(Engine):
    """The sum of squares is added up over the ranks bucket by bucket."""

    def norm(self):
        total = 0.0
        for bucket in self.buckets:
            square = torch.linalg.vector_norm(self.own(bucket), dtype=torch.float64).square().reshape(1)
            self.communicator.all_reduce(square).wait()
            total += square.item()
        return total**0.5


@wrong(ZERO1, reason="crash", says=r"all parameters frozen(?s:.*)list index out of range")
class AtLeastOneBucket(Engine):
    """Takes the device from the first bucket."""

    def squares(self):
        return super().squares().to(self.buckets[0].weights.device)


@wrong(ZERO1, reason="values", says=r"clipping shrinks")
class ClipsUpwards(Engine):
    """Scales every gradient to max_norm, small ones, too."""

    def factor(self, norm):
        if self.max_norm is None:
            return 1 / self.scale
        return self.max_norm / (norm / self.scale + 1e-6) / self.scale


@wrong(ZERO1, reason="values", says=r"stepped(?s:.*)inf counts as well as nan")
class LooksForNanOnly(Engine):
    """isnan instead of isfinite."""

    def fine(self, norm):
        return norm == norm  # noqa: PLR0124


@wrong(ZERO1, reason="calls", says=r"go round the communicator(?s:.*)all_gather")
class GathersByItself(Engine):
    """The weights do not go through the communicator."""

    def publish(self):
        for bucket in self.buckets:
            Library().all_gather(bucket.weights).wait()


@wrong(ZERO1, reason="calls", says=r"go round the communicator")
class IgnoresTheCommunicator(Engine):
    """Uses the library, whatever was handed in."""

    def __init__(self, model, communicator=None, **options):
        super().__init__(model, **options)


@wrong("06.partition", reason="values", says=r"two processes(?s:.*)nothing random")
def shuffled(sizes, world_size):
    """Equal slices of everything, dealt out at random."""
    total = sum(sizes)
    chunk = -(-total // world_size)
    parts, start = [[] for _ in range(world_size)], 0
    for index, size in enumerate(sizes):
        for rank in range(world_size):
            low, high = max(start, rank * chunk), min(start + size, (rank + 1) * chunk)
            if low < high:
                parts[rank].append((index, low - start, high - start))
        start += size
    random.shuffle(parts)
    return parts


@wrong("06.partition", reason="values", says=r"two processes(?s:.*)no rank")
def turned_by_rank(sizes, world_size):
    """Each rank puts its own part first."""
    parts = [[] for _ in range(world_size)]
    flat = [(index, element) for index, size in enumerate(sizes) for element in range(size)]
    chunk = -(-len(flat) // world_size)
    for place, (index, element) in enumerate(flat):
        parts[(place // chunk + dist.get_rank()) % world_size].append((index, element, element + 1))
    return parts


@wrong("06.partition", reason="values", says=r"rank \d has \d+ elements(?s:.*)only if there is a remainder")
def one_too_many(sizes, world_size):
    """total // N + 1, also where nothing is left over."""
    parts, rank = [[] for _ in range(world_size)], 0
    chunk = sum(sizes) // world_size + 1
    room = chunk
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + room)
            parts[rank].append((index, start, stop))
            room -= stop - start
            start = stop
            if not room:
                rank, room = rank + 1, chunk
    return parts


@wrong("06.partition", reason="values", says=r"one list stands for several ranks")
def the_same_list(sizes, world_size):
    """[[]] * N."""
    parts = [[]] * world_size
    for index, size in enumerate(sizes):
        chunk = -(-size // world_size)
        for rank in range(world_size):
            if rank * chunk < min(size, (rank + 1) * chunk):
                parts[rank].append((index, rank * chunk, min(size, (rank + 1) * chunk)))
    return parts


@wrong(ZERO1, reason="values", says=r"not clipped")
class PlainDDP(Replicated):
    """DDP and AdamW with moments of 16 bits: 8 psi bytes in all, what ZeRO-1 holds at N = 3. What it can't do shows."""


@wrong(ZERO1, reason="values", says=r"")
class PlainAdamW(Alone):
    """Sends nothing at all: each rank trains a model of its own."""
