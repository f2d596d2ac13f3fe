"""Lab 03: a sampler is asked for the shards of all ranks, in every rank's process, and the lists are judged there."""

from __future__ import annotations

import builtins
import hashlib
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.distributed as dist

from .ddp_orders import Shards, judge_orders
from .notes import Finding, Judged, Prepared

EPOCHS = (0, 1, 2, 3, 10)
SEEDS = (0, 1, 7)
ORDERED_FROM = 100  # items: with fewer, two orders may be equal by chance


@dataclass(frozen=True)
class Answers:
    """What a sampler gave. shards[epoch, seed]; again: (0, 0) asked for once more at the end; plain: without a seed.

    faults: a list that is none, in words. changed: which global random state is not what it was.
    """

    shards: dict[tuple[int, int], Shards]
    again: Shards
    plain: Shards
    fault: str
    changed: str


@dataclass(frozen=True)
class Table:
    """Stands in for the sampler inside a rank: asks for the shards of all ranks.

    Every process has random states, a clock and a hash() of texts of its own, as processes that were started one by one
    have. (Ranks of a launch are forked from one server and would share the last.)
    """

    solution: Callable

    def __call__(self, length: int, world_size: int) -> Answers:
        _differ_between_processes(dist.get_rank())
        before = _global_states()
        fault = ""

        def shards(*more: int) -> Shards:
            nonlocal fault
            lists = []
            for rank in range(world_size):
                answer = self.solution(length, rank, world_size, *more)
                try:
                    len(answer)  # a generator, which can be gone through only once, has none
                    lists.append([_index(one) for one in answer])
                except TypeError:
                    shown = repr(answer)
                    of_things = " of other things" if hasattr(answer, "__len__") else ", which has no length"
                    fault = fault or (shown if len(shown) < 60 else f"a {type(answer).__name__}{of_things}")
                    lists.append([])
            return lists

        table = {(epoch, seed): shards(epoch, seed) for epoch in EPOCHS for seed in SEEDS}
        answers = shards(EPOCHS[0], SEEDS[0]), shards(EPOCHS[0])
        after = _global_states()
        changed = [name for name in before if before[name] != after[name]]
        return Answers(table, *answers, fault, changed[0] if changed else "")


def _index(value: Any) -> int:
    """A whole number: of Python, of numpy, or a tensor of one."""
    if isinstance(value, torch.Tensor):
        value = value.item()
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError
    return value.__index__()


def _differ_between_processes(rank: int) -> None:
    torch.manual_seed(1000 + rank)
    random.seed(2000 + rank)
    numpy.random.seed(3000 + rank)
    if not hasattr(builtins.hash, "salted"):
        plain_hash, plain_time = builtins.hash, time.time

        def salted(value: Any) -> int:
            return plain_hash((value, f"of rank {rank}", rank)) if _has_text(value) else plain_hash(value)

        salted.salted = True  # type: ignore[attr-defined]
        builtins.hash = salted  # type: ignore[assignment]
        time.time = lambda: plain_time() + 1000.0 * rank


def _has_text(value: Any) -> bool:
    return isinstance(value, (str, bytes)) or (isinstance(value, tuple) and any(map(_has_text, value)))


def _global_states() -> dict[str, Any]:
    numpy_state = numpy.random.get_state()
    return {
        "torch's": torch.get_rng_state().numpy().tobytes(),
        "Python's (module random)": random.getstate(),
        "numpy's": (numpy_state[1].tobytes(), numpy_state[2]),  # type: ignore[index, union-attr, call-overload]
    }


@dataclass(frozen=True)
class IndicesCase:
    """length items. ranks: the argument world_size, when it is not the number of processes."""

    length: int
    ranks: int = 0

    @property
    def name(self) -> str:
        said = f"{self.length:,} item{'s' * (self.length != 1)}"
        return said + (f", asked for world_size={self.ranks}" if self.ranks else "")

    def prepare(self, rank: int, world_size: int) -> Prepared:
        n = self.ranks or world_size
        return Prepared((self.length, n), lambda answers: judged(answers, self.length, n), lambda: None)


def index_cases(n: int) -> list[IndicesCase]:
    lengths = dict.fromkeys((13, 0, 1, max(n - 1, 0), n, n + 1, 24, 1000))
    cases = [IndicesCase(length) for length in lengths]
    return [*cases, IndicesCase(30, ranks=n + 3)] if n in (2, 3) else cases


def judged(answers: Answers, length: int, n: int) -> Judged:
    digest = hashlib.blake2b(repr(answers.shards).encode(), digest_size=16).hexdigest()
    return Judged(_finding(answers, length, n), digest)


def _finding(answers: Answers, length: int, n: int) -> Finding | None:
    if answers.fault:
        return Finding(f"it returned {answers.fault}", "a list of whole numbers, which may be empty")
    if answers.changed:
        return Finding(
            f"{answers.changed} global random state is not what it was before the call",
            "an order from a generator of your own, seeded by seed and epoch: the global state differs between ranks, "
            "and dropout and others draw from it",
            "torch.Generator().manual_seed(...) and randperm(..., generator=...)",
        )
    for (epoch, seed), shards in answers.shards.items():
        found = _cover(shards, length, n)
        if found:
            return Finding(f"epoch {epoch}, seed {seed}: {found.seen}", found.expected, found.look)
    if answers.again != answers.shards[EPOCHS[0], SEEDS[0]]:
        return Finding("asked a second time for epoch 0, it gives other lists", "the same arguments, the same list")
    if answers.plain != answers.shards[EPOCHS[0], 0]:
        return Finding("without a seed it gives other lists than with seed=0", "seed=0 is the default")
    return judge_orders(answers.shards) if length >= ORDERED_FROM else None


def _cover(shards: Shards, length: int, n: int) -> Finding | None:
    """Whether every index occurs once, on one rank, and shards are equally long."""
    holders: dict[int, list[int]] = {}
    for rank, shard in enumerate(shards):
        for index in shard:
            holders.setdefault(index, []).append(rank)
    sizes = f"shards of {', '.join(str(len(shard)) for shard in shards)}"
    strange = sorted(index for index in holders if not 0 <= index < length)
    if strange:
        return Finding(
            f"index {strange[0]} is no index of {length} items", f"0 to {length - 1}" if length else "no index at all"
        )
    twice = sorted(index for index, ranks in holders.items() if len(ranks) > 1)
    lost = sorted(set(range(length)) - set(holders))
    if twice:
        ranks = holders[twice[0]]
        times = f"{len(ranks)} times" if len(ranks) > 2 else "twice"
        where = f"on ranks {ranks[0]} and {ranks[1]}" if ranks[0] != ranks[1] else f"on rank {ranks[0]}"
        seen = f"index {twice[0]} comes {times} ({where}); {_count(twice)} more than once, {len(lost)} never; {sizes}"
        return Finding(seen, "every index once", _why_twice(shards, twice, lost, length, n))
    if lost:
        tail = length % n and len(set(map(len, shards))) == 1
        look = "is a tail dropped that N does not divide? Some ranks get one item more instead" if tail else ""
        seen = f"{len(lost)} of {length} items never come, such as index {lost[0]}; {sizes}"
        return Finding(seen, "every index once", look or "which items does no rank get?")
    if max(map(len, shards)) - min(map(len, shards)) > 1:
        look = "deal the items like cards: one to each rank in turn"
        return Finding(sizes, "lengths that differ by one at most: the longest decides how long an epoch takes", look)
    return None


def _count(indices: Sequence[int]) -> str:
    return f"{len(indices)} come{'s' * (len(indices) == 1)}"


def _why_twice(shards: Shards, twice: list[int], lost: list[int], length: int, n: int) -> str:
    lengths = set(map(len, shards))
    if not lost and len(lengths) == 1 and sum(map(len, shards)) == -(-length // n) * n:
        return "shards are filled up to one length, as torch's DistributedSampler does; here they may differ by one"
    if any(len(shard) == length for shard in shards) and len(twice) == length:
        return "every rank gets all items: which part is this rank's?"
    if all(shard == shards[0] for shard in shards):
        return "all ranks get the same list: is it the argument `rank` that is used?"
    counts = Counter(index for shard in shards for index in set(shard))
    if lost and max(counts.values()) > 1:
        return "do all ranks divide the same order? It must not depend on the rank"
    return "where does one rank's part end, and the next one's begin?"
