"""Lab 03: whether a sampler's orders are new for each epoch and seed, and new in every respect that matters."""

from __future__ import annotations

from collections.abc import Iterator

from .notes import Finding

Shards = list[list[int]]  # by rank
Table = dict[tuple[int, int], Shards]  # by epoch and seed


def judge_orders(table: Table) -> Finding | None:
    """The first two epochs of a seed, or seeds of an epoch, whose orders have too much in common.

    For some hundred items or more: with few, two orders may be equal by chance.
    """
    neighbours = {key: _neighbours(shards) for key, shards in table.items()}
    partitions = {key: {frozenset(shard) for shard in shards} for key, shards in table.items()}
    for what, one, other in _pairs(table):
        place = 0 if what == "epoch" else 1
        numbers = f"{what}s {one[place]} and {other[place]}"
        at = f"seed {one[1]}" if what == "epoch" else f"epoch {one[0]}"
        expected = "a new order each epoch" if what == "epoch" else "another order for another seed"
        if table[one] == table[other]:
            return Finding(f"{numbers} have the same order ({at})", expected, _why_equal(table, what, one, other))
        over_all = f"{expected}, drawn over all items, before they are dealt to the ranks"
        kept = len(neighbours[one] & neighbours[other]) / max(1, len(neighbours[one]))
        if kept > 0.5:
            seen = f"in {numbers} {kept:.0%} of the items follow the same one as before ({at})"
            return Finding(seen, over_all, f"one order rolled or reversed is no new order: draw one for each {what}")
        if len(partitions[one]) > 1 and partitions[one] == partitions[other]:
            seen = f"in {numbers} the same items are together on one rank, in another order ({at})"
            return Finding(seen, over_all, "shuffle all items first, then take this rank's part")
    return None


def _pairs(table: Table) -> Iterator[tuple[str, tuple[int, int], tuple[int, int]]]:
    """All pairs of epochs of one seed, then all pairs of seeds of one epoch."""
    keys = list(table)
    for what, shared in (("epoch", 1), ("seed", 0)):
        for place, one in enumerate(keys):
            for other in keys[place + 1 :]:
                if one[shared] == other[shared]:
                    yield what, one, other


def _neighbours(shards: Shards) -> set[frozenset[int]]:
    """Items that come one after the other on a rank, in whichever direction."""
    return {frozenset(pair) for shard in shards for pair in zip(shard, shard[1:], strict=False)}


def _why_equal(table: Table, what: str, one: tuple[int, int], other: tuple[int, int]) -> str:
    """The number may go into the generator's seed and be multiplied by a zero there."""
    shared = 1 if what == "epoch" else 0
    value = one[shared]
    elsewhere = [key for key in table if key[shared] != value]
    differ = any(
        table[first] != table[second]
        for first in elsewhere
        for second in elsewhere
        if first[shared] == second[shared]
        and {first[1 - shared], second[1 - shared]} == {one[1 - shared], other[1 - shared]}
    )
    if value == 0 and differ:
        also = "seed" if what == "epoch" else "epoch"
        return f"only with {also} 0: in a product with {also} the {what} is lost, 0 * {what} = 0; add instead"
    return f"the {what} must go into the generator's seed"
