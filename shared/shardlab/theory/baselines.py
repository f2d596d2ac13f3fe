"""What a ring is measured against: reducing to one rank, a tree, and the least that any all-reduce can do."""

from __future__ import annotations

from shardlab.theory.arguments import rank_of, ranks, whole
from shardlab.theory.collectives import Volume


def naive_all_reduce_volume(size: float, world_size: int, rank: int = 0, root: int = 0) -> Volume:
    """All ranks send their whole tensor to the root, which adds them up and sends the sum to each.

    The root receives (N-1) n and sends (N-1) n, every other rank sends n and receives n. In total that is the same
    2(N-1) n as a ring; but the root does half of it, and all wait for the root.
    """
    n, count = whole("size", size), ranks(world_size)
    busy = rank_of(rank, count) == rank_of(root, count, "root")
    here = (count - 1) * n if busy else n
    return Volume(here, here)


def naive_all_reduce_messages(world_size: int, rank: int = 0, root: int = 0) -> int:
    """Messages this rank sends, and receives: N-1 on the root, 1 on every other rank."""
    count = ranks(world_size)
    return count - 1 if rank_of(rank, count) == rank_of(root, count, "root") else 1


def tree_rounds(world_size: int) -> int:
    """Rounds of a binomial-tree broadcast or reduce: ceil(log2 N), because each round doubles the ranks reached.

    Source: Thakur, Rabenseifner & Gropp 2005.
    """
    return (ranks(world_size) - 1).bit_length()


def all_reduce_total_lower_bound(size: float, world_size: int) -> int:
    """Elements that all ranks together must send in any all-reduce of n elements: 2(N-1) n.

    Look at one element and at the first rank that holds its complete sum. The contributions of the N-1 other ranks had
    to get there, so each of these ranks has sent something on the way: at least N-1 messages. The message that
    completed the sum completed it on that rank only; each of the N-1 others still has to receive one: at least N-1
    more. A message carries one partial sum per element, so elements share nothing and their costs add up.

    Source: Patarasuk & Yuan 2009.
    """
    return 2 * (ranks(world_size) - 1) * whole("size", size)


def all_reduce_lower_bound(size: float, world_size: int) -> float:
    """The least that the busiest rank sends (and receives) in any all-reduce of n elements: 2(N-1)/N n.

    The N ranks together send at least 2(N-1) n (`all_reduce_total_lower_bound`), and the busiest is not below the
    average. The ring meets this bound on every rank, so no all-reduce is better balanced. A single rank may send less
    (n, in the naive way), but then another sends more.

    Source: Patarasuk & Yuan 2009.
    """
    return all_reduce_total_lower_bound(size, world_size) / ranks(world_size)
