"""What one call of a torch.distributed operation makes a rank send and receive, by the bandwidth-optimal algorithm."""

from __future__ import annotations

from typing import NamedTuple

from shardlab.theory.arguments import one_of, rank_of, ranks, whole

OPERATIONS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
    "send",
    "recv",
)


class Volume(NamedTuple):
    """What one rank sends and receives, both in elements or both in bytes."""

    sent: float
    received: float


def collective_cost(op: str, nbytes_full: int, world_size: int, rank: int = 0, root: int = 0) -> Volume:
    """(sent, received) of this rank for one operation, in the unit of `nbytes_full` (the cost is linear in it).

    `rank` and `root` count within the group of `world_size` ranks. `nbytes_full` is n, the full, unsharded size:

    | op             | n is the size of                          | sent           | received       |
    |----------------|-------------------------------------------|----------------|----------------|
    | all_reduce     | the tensor, on every rank                 | 2(N-1)/N n     | 2(N-1)/N n     |
    | reduce_scatter | the input of a rank: N shards             | (N-1)/N n      | (N-1)/N n      |
    | all_gather     | the output of a rank: N shards            | (N-1)/N n      | (N-1)/N n      |
    | broadcast      | the tensor                                | n, last rank 0 | n, root 0      |
    | reduce         | the tensor                                | n, root 0      | n, last rank 0 |
    | gather         | the N parts together, as the root ends    | n/N, root 0    | root (N-1)/N n |
    | scatter        | the N parts together, as the root begins  | root (N-1)/N n | n/N, root 0    |
    | all_to_all     | the input of a rank: N parts              | (N-1)/N n      | (N-1)/N n      |
    | barrier        | nothing                                   | 0              | 0              |
    | send, recv     | the message                               | n, 0           | 0, n           |

    Broadcast and reduce are counted as a pipelined chain, the choice that keeps every link at n, as published, and
    still adds up: over all ranks (N-1) n is sent and (N-1) n received. A broadcast goes root, root+1, ... (modulo N):
    every rank passes all of it on, except the last, root-1. A reduce is the same chain run backwards, from root-1 to
    the root.

    Over all ranks, sent equals received for every operation. When N does not divide n the result is a fraction: the
    average over the ranks (`ring_volume` gives each rank's integer). With N = 1 nothing moves.

    Sources: nccl-tests (all_reduce, reduce_scatter, all_gather, broadcast, reduce); Patarasuk & Yuan 2009 (all_reduce).
    """
    one_of("op", op, OPERATIONS)
    n, count = whole("nbytes_full", nbytes_full), ranks(world_size)
    here, start = rank_of(rank, count), rank_of(root, count, "root")
    others = (count - 1) * n / count
    from_root = (here - start) % count
    if op == "all_reduce":
        return Volume(2 * (count - 1) * n / count, 2 * (count - 1) * n / count)
    if op in ("reduce_scatter", "all_gather", "all_to_all"):
        return Volume(others, others)
    first, last = from_root == 0, from_root == count - 1
    if op == "broadcast":
        return Volume(0 if last else n, 0 if first else n)
    if op == "reduce":
        return Volume(0 if first else n, 0 if last else n)
    if op == "gather":
        return Volume(0, others) if first else Volume(n / count, 0)
    if op == "scatter":
        return Volume(others, 0) if first else Volume(0, n / count)
    if op == "send":
        return Volume(n, 0)
    if op == "recv":
        return Volume(0, n)
    return Volume(0, 0)  # barrier
