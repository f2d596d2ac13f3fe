"""Makes a `ShardMap` from what each rank's `watch_states` left."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate

from .errors import UsageError
from .intervals import intersection, union
from .pieces import Piece
from .programs import side_by_side
from .records import MemorySample, RankMemory, Run
from .shard_map import Column, Holding, MapFrame, Range, Ranges, ShardMap
from .state_records import KINDS, Flight, RankStates, StateFrame
from .theory import SHARDED_STATES, StateBytes, model_state_bytes

OPTIMIZER = KINDS[2:]


def build(run: Run, strategy: str, title: str, state: StateBytes, watch: int) -> ShardMap:
    """See `shard_map.shard_map`."""
    if strategy not in SHARDED_STATES:
        raise UsageError(f"shard_map: {strategy!r} is no strategy; there are {', '.join(SHARDED_STATES)}")
    ranks = _watched(run, watch)
    columns = _columns(ranks)
    starts = [column.start for column in columns]
    rows = side_by_side([[(f.kind, f.label, f.ends) for f in rank.frames] for rank in ranks])
    holdings = [_Holdings(rank, starts, run.memory[number]) for number, rank in enumerate(ranks)]
    frames = _frames(ranks, rows, holdings)
    psi = columns[-1].stop if columns else 0
    formula = model_state_bytes(strategy, psi, len(ranks), state)
    return ShardMap(columns, tuple(frames), _owners(frames, psi), strategy, formula, title or f"shard map, {strategy}")


def _watched(run: Run, watch: int) -> list[RankStates]:
    if not run.states or not all(run.states):
        raise UsageError(
            "shard_map: this run has no snapshots of every rank. Open `with watch_states(engine):` around a step, "
            "inside the launched function, on all ranks, and launch with meter=True."
        )
    most = min(map(len, run.states))
    if not -most <= watch < most:
        raise UsageError(f"shard_map: no watch {watch}; on some rank `watch_states` was open {most} times")
    return [states[watch] for states in run.states]


def _columns(ranks: Sequence[RankStates]) -> tuple[Column, ...]:
    if len({rank.names for rank in ranks}) != 1:
        raise UsageError("shard_map: the ranks watched models with different parameters")
    sizes = [max(each) for each in zip(*(rank.sizes for rank in ranks), strict=True)]
    ends = list(accumulate(sizes))
    return tuple(Column(name, end - size, end) for name, size, end in zip(ranks[0].names, sizes, ends, strict=True))


class _Holdings:
    """What one rank held, in elements of the map, at any of its frames."""

    def __init__(self, rank: RankStates, starts: Sequence[int], memory: RankMemory) -> None:
        self.rank, self._starts = rank, starts
        self._samples, self._times = memory.samples, [sample.time for sample in memory.samples]
        self._known: dict[tuple[Piece, ...], Ranges] = {}
        self.all = [self._of(frame) for frame in rank.frames]

    def _of(self, frame: StateFrame) -> Holding:
        held = {kind: self._ranges(pieces) for kind, pieces in frame.held.items()}
        flying: dict[str, list[Range]] = defaultdict(list)
        for flight in self.rank.flights:
            if _under_way(flight, frame):
                flying[flight.kind] += self._ranges(flight.pieces)
        # What is in flight in storage that is freed meanwhile is not held.
        alive = {kind: _whole(intersection(held.get(kind, ()), ranges)) for kind, ranges in flying.items()}
        return Holding(held, {kind: ranges for kind, ranges in alive.items() if ranges}, self._memory_at(frame.time))

    def _ranges(self, pieces: tuple[Piece, ...]) -> Ranges:
        if pieces not in self._known:
            starts = self._starts
            self._known[pieces] = _whole(union((starts[p] + a, starts[p] + b) for p, a, b in pieces))
        return self._known[pieces]

    def _memory_at(self, time: float) -> MemorySample:
        """As `RankMemory.at`, quicker."""
        place = bisect_right(self._times, time)
        return self._samples[place - 1] if place else MemorySample(time, 0)


def _under_way(flight: Flight, frame: StateFrame) -> bool:
    return flight.began <= frame.until and flight.ended > frame.time


def _frames(ranks: Sequence[RankStates], rows: Sequence[Sequence[int | None]], holdings: list[_Holdings]) -> list:
    """An end or a wait that changes nothing is left out: it would be a step of the replay in which nothing is seen.

    The end of a wait says no more than the event after it, unless it frees or makes something.
    """
    frames: list[MapFrame] = []
    now = [holding.all[0] for holding in holdings]
    for row in rows:
        on = tuple(rank for rank, number in enumerate(row) if number is not None)
        for rank in on:
            now[rank] = holdings[rank].all[row[rank] or 0]
        event = ranks[on[0]].frames[row[on[0]] or 0]
        frame = MapFrame(event.kind, event.label, event.ends, on, tuple(now))
        wait = event.kind == "waiting"
        dull = event.ends or wait
        if not (dull and frames and _alike(frames[-1], frame, flying=not (wait and event.ends))):
            frames.append(frame)
    return frames


def _alike(before: MapFrame, after: MapFrame, flying: bool) -> bool:
    pairs = list(zip(before.ranks, after.ranks, strict=True))
    return all(a.held == b.held for a, b in pairs) and (not flying or all(a.flying == b.flying for a, b in pairs))


def _owners(frames: Sequence[MapFrame], psi: int) -> tuple[tuple[int, int, int | None], ...]:
    """Who alone holds optimizer state at the end; where nobody holds any, who alone holds the weights then."""
    last = frames[-1].ranks
    optimizer = [_whole(union(r for kind in OPTIMIZER for r in rank.held.get(kind, ()))) for rank in last]
    weights = [rank.held.get("weights", ()) for rank in last]
    cuts = sorted({0, psi, *(end for ranges in (*optimizer, *weights) for each in ranges for end in each)})
    owners: list[tuple[int, int, int | None]] = []
    for start, stop in zip(cuts, cuts[1:], strict=False):
        holders = _holding(optimizer, start) or _holding(weights, start)
        owner = holders[0] if len(holders) == 1 else None
        if owners and owners[-1][2] == owner:
            owners[-1] = (owners[-1][0], stop, owner)
        else:
            owners.append((start, stop, owner))
    return tuple(owners)


def _holding(ranks: Sequence[Ranges], element: int) -> list[int]:
    return [rank for rank, ranges in enumerate(ranks) if any(start <= element < stop for start, stop in ranges)]


def _whole(ranges: Iterable[tuple[float, float]]) -> Ranges:
    return tuple((int(start), int(stop)) for start, stop in ranges)
