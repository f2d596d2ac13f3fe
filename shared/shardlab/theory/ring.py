"""The ring, to the element: which chunks a rank sends, and what that weighs when N does not divide n.

The tensor is cut into N chunks. In the reduce-scatter phase rank r starts by sending chunk r-1 to rank r+1 (modulo N),
adds what it receives to its own copy and passes that on in the next step; N-1 steps later chunk r is complete on rank
r. The all-gather phase starts there and copies: rank r sends chunk r first. The number of messages depends on N alone.
Sources: Patarasuk & Yuan 2009; Thakur, Rabenseifner & Gropp 2005 (ring all-gather).
"""

from __future__ import annotations

from collections.abc import Sequence

from shardlab.errors import UsageError
from shardlab.theory.arguments import one_of, rank_of, ranks, whole
from shardlab.theory.chunks import chunk_sizes
from shardlab.theory.collectives import Volume

RING_OPERATIONS = ("reduce_scatter", "all_gather", "all_reduce")


def ring_messages(op: str, world_size: int) -> int:
    """Messages each rank sends, and receives: N-1 for reduce_scatter and all_gather, 2(N-1) for all_reduce."""
    one_of("op", op, RING_OPERATIONS)
    phase = ranks(world_size) - 1
    return 2 * phase if op == "all_reduce" else phase


def ring_sent_chunks(op: str, world_size: int, rank: int) -> list[int]:
    """Chunks this rank sends, one a step, in order.

    Reduce-scatter: r-1, r-2, ..., r+1, every chunk but r (that one ends here). All-gather: r, r-1, ..., r+2, every
    chunk but r+1 (the next rank has that one already).
    """
    one_of("op", op, RING_OPERATIONS)
    count = ranks(world_size)
    here = rank_of(rank, count)
    if op == "all_reduce":
        return ring_sent_chunks("reduce_scatter", count, here) + ring_sent_chunks("all_gather", count, here)
    first = here - 1 if op == "reduce_scatter" else here
    return [(first - step) % count for step in range(count - 1)]


def ring_received_chunks(op: str, world_size: int, rank: int) -> list[int]:
    """Chunks this rank receives, one a step: what rank r-1 sends."""
    count = ranks(world_size)
    return ring_sent_chunks(op, count, (rank_of(rank, count) - 1) % count)


def ring_chunk_bytes(elements: float, element_bytes: int, world_size: int, split: str = "balanced") -> list[int]:
    """Bytes of each of the N chunks of a tensor."""
    width = whole("element_bytes", element_bytes, least=1)
    return [size * width for size in chunk_sizes(elements, world_size, split)]


def ring_volume(op: str, sizes: Sequence[int], rank: int) -> Volume:
    """What this rank sends and receives, exactly, when chunk c has `sizes[c]` elements (or bytes); N = len(sizes).

    Reduce-scatter: all chunks but r go out, all but r-1 come in. All-gather: all but r+1 go out, all but r come in. If
    the N sizes are equal this is (N-1)/N n a phase, as in `collective_cost`.
    """
    one_of("op", op, RING_OPERATIONS)
    if isinstance(sizes, str) or not isinstance(sizes, Sequence) or not sizes:
        raise UsageError(f"sizes must be a list with one size per rank; got {sizes!r}")
    sizes = [whole("every chunk size", size) for size in sizes]
    n, count = sum(sizes), len(sizes)
    here = rank_of(rank, count)
    before, after = (here - 1) % count, (here + 1) % count
    reduce_scatter = Volume(n - sizes[here], n - sizes[before])
    all_gather = Volume(n - sizes[after], n - sizes[here])
    if op == "reduce_scatter":
        return reduce_scatter
    if op == "all_gather":
        return all_gather
    return Volume(reduce_scatter.sent + all_gather.sent, reduce_scatter.received + all_gather.received)


def ring_all_reduce_bytes(
    elements: float, element_bytes: int, world_size: int, rank: int, split: str = "balanced"
) -> Volume:
    """Bytes this rank sends and receives, exactly, in a ring all-reduce of a tensor."""
    return ring_volume("all_reduce", ring_chunk_bytes(elements, element_bytes, world_size, split), rank)
