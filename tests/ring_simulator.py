"""Ring all-reduces in pure Python, right and wrong, as RingTraces: pictures are tested without running any process."""

from __future__ import annotations

from shardlab.records import Call, RingStep, RingTrace, Run, Transfer

Counts = tuple[int, ...] | None
WRONG = ("gather_adds", "overwrites", "too_few_steps", "garbage", "gathers_the_unfinished")


def simulate(world_size: int, *, wrong: str = "", chunk_bytes: int = 1_048_576) -> RingTrace:
    """A ring all-reduce of `world_size` chunks. wrong: "" or one of WRONG."""
    n = world_size
    held: list[list[Counts]] = [[_own(rank, n) for _ in range(n)] for rank in range(n)]
    steps = [_step((), held, "")]
    last_chunk = 1 if wrong == "gathers_the_unfinished" else 0
    for number in range(n - 1 - (wrong == "too_few_steps")):
        moves = [(rank, (rank + 1) % n, (rank - 1 - number) % n) for rank in range(n)]
        steps.append(_move(held, moves, "reduce-scatter", chunk_bytes, add=wrong != "overwrites"))
        if wrong == "garbage" and number == 0:
            held[n - 1][0] = None
            steps[-1] = _step(steps[-1].transfers, held, "reduce-scatter")
    for number in range(n - 1):
        moves = [(rank, (rank + 1) % n, (rank - number + last_chunk) % n) for rank in range(n)]
        steps.append(_move(held, moves, "all-gather", chunk_bytes, add=wrong == "gather_adds"))
    return RingTrace(n, tuple(steps), f"ring all-reduce on {n} ranks" + (f" ({wrong})" if wrong else ""))


def scatter_only(world_size: int, off_by_one: bool = False) -> RingTrace:
    """A reduce-scatter alone. off_by_one: chunk r is complete on rank r-1 in the end, which is not where it belongs."""
    n = world_size
    held: list[list[Counts]] = [[_own(rank, n) for _ in range(n)] for rank in range(n)]
    steps = [_step((), held, "")]
    for number in range(n - 1):
        moves = [(rank, (rank + 1) % n, (rank - 1 + off_by_one - number) % n) for rank in range(n)]
        steps.append(_move(held, moves, "reduce-scatter", 4096, add=True))
    return RingTrace(n, tuple(steps), f"reduce-scatter on {n} ranks")


def gather_only(world_size: int) -> RingTrace:
    """An all-gather alone: each rank begins with its own chunk finished and garbage in the others."""
    n = world_size
    held: list[list[Counts]] = [[(1,) * n if chunk == rank else None for chunk in range(n)] for rank in range(n)]
    steps = [_step((), held, "")]
    for number in range(n - 1):
        moves = [(rank, (rank + 1) % n, (rank - number) % n) for rank in range(n)]
        steps.append(_move(held, moves, "all-gather", 4096, add=False))
    return RingTrace(n, tuple(steps), f"all-gather on {n} ranks")


def reduce_to_one(world_size: int, chunk_bytes: int = 1_048_576) -> RingTrace:
    """The naive way: everyone sends everything to rank 0, one after the other, and gets the sum back; one chunk."""
    n = world_size
    held: list[list[Counts]] = [[_own(rank, n)] for rank in range(n)]
    steps = [_step((), held, "")]
    for rank in range(1, n):
        steps.append(_move(held, [(rank, 0, 0)], "reduce", chunk_bytes, add=True))
    steps.append(_move(held, [(0, rank, 0) for rank in range(1, n)], "broadcast", chunk_bytes, add=False))
    return RingTrace(n, tuple(steps), "reduce to rank 0, then broadcast")


def strange_messages() -> RingTrace:
    """Messages of no chunk, over a distance, to oneself, both ways at once, against the ring."""
    held = [[_own(rank, 5) for _ in range(5)] for rank in range(5)]
    transfers = (
        Transfer(0, 1, None, 12),
        Transfer(0, 2, 1, 4096),
        Transfer(2, 2, 3, 4096),
        Transfer(1, 2, 0, 4096),
        Transfer(2, 1, 0, 4096),
        Transfer(0, 4, 4, 4096),
    )
    return RingTrace(5, (_step((), held, ""), _step(transfers, held, "")), "strange messages")


def _own(rank: int, n: int) -> Counts:
    return tuple(int(other == rank) for other in range(n))


def _step(transfers: tuple[Transfer, ...], held: list[list[Counts]], phase: str) -> RingStep:
    return RingStep(transfers, tuple(map(tuple, held)), phase)


def _move(
    held: list[list[Counts]], moves: list[tuple[int, int, int]], phase: str, chunk_bytes: int, add: bool
) -> RingStep:
    """All messages of a step at once; the receiver adds or replaces. Changes `held`."""
    sent = [held[source][chunk] for source, _, chunk in moves]
    for (_, destination, chunk), counts in zip(moves, sent, strict=True):
        mine = held[destination][chunk]
        if not add:
            held[destination][chunk] = counts
        elif mine is None or counts is None:
            held[destination][chunk] = None
        else:
            held[destination][chunk] = tuple(a + b for a, b in zip(mine, counts, strict=True))
    return _step(tuple(Transfer(*move, chunk_bytes) for move in moves), held, phase)


def _send(rank: int, index: int, peer: int, size: int) -> Call:
    return Call(rank, index, "send", peer, size // 4, "float32", size, 0, 0.0)


def _receive(rank: int, index: int, peer: int, size: int) -> Call:
    return Call(rank, index, "recv", peer, size // 4, "float32", 0, size, 0.0)


def ring_run(world_size: int) -> Run:
    """A run in which every rank sent 3000 bytes to the next."""
    calls = [
        [_send(r, 0, (r + 1) % world_size, 3000), _receive(r, 1, (r - 1) % world_size, 3000)] for r in range(world_size)
    ]
    return Run(world_size, "cpu", "gloo", 0.1, [None] * world_size, calls)
