"""The shard map of a run: which elements of which model state every rank held, event by event, and who owns them.

Plain data, made from a `Run`; pictures, checks and text read it alike. Inside a rank, `watch_states(engine)` leaves the
snapshots that it is made of. The elements of all parameters are numbered one after the other, in the order of
`model.parameters()`; what is held is a set of ranges of these numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from .intervals import difference
from .records import MemorySample, Run
from .state_records import KINDS
from .theory import MIXED_PRECISION_ADAM, SHARDED_STATES, StateBytes

Range = tuple[int, int]
Ranges = tuple[Range, ...]

# What `theory.SHARDED_STATES` calls the kinds.
STATE_OF = {"weights": "parameters", "gradients": "gradients"} | dict.fromkeys(KINDS[2:], "optimizer")


def size_of(ranges: Ranges) -> int:
    """Elements in them."""
    return sum(stop - start for start, stop in ranges)


@dataclass(frozen=True)
class Column:
    """A parameter: elements start to stop - 1 of the map."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Holding:
    """One rank at one event: what is held and what of it is in flight, by kind; and its live bytes."""

    held: Mapping[str, Ranges]
    flying: Mapping[str, Ranges]
    memory: MemorySample

    @property
    def state_bytes(self) -> int:
        """Live bytes of parameters, gradients and optimizer state."""
        return self.memory.live - self.memory.other


@dataclass(frozen=True)
class MapFrame:
    """One event. kind, label, ends: see `StateFrame`. on: the ranks that had it; the others are as they were before."""

    kind: str
    label: str
    ends: bool
    on: tuple[int, ...]
    ranks: tuple[Holding, ...]


@dataclass(frozen=True)
class ShardMap:
    """All ranks through one step.

    owners: (start, stop, rank): who alone holds the optimizer state of these elements; None where nobody does, or
    several do. formula: bytes of model state per rank that `theory` gives for the strategy.
    """

    columns: tuple[Column, ...]
    frames: tuple[MapFrame, ...]
    owners: tuple[tuple[int, int, int | None], ...]
    strategy: str
    formula: float
    title: str = field(default="shard map", compare=False)

    @property
    def world_size(self) -> int:
        return len(self.frames[0].ranks)

    @property
    def last(self) -> tuple[Holding, ...]:
        """What the ranks hold after the step."""
        return self.frames[-1].ranks

    @property
    def psi(self) -> int:
        """Elements of all parameters."""
        return self.columns[-1].stop if self.columns else 0

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that somebody held at some time. In fp32 there is no master copy."""
        held = {kind for frame in self.frames for rank in frame.ranks for kind in rank.held}
        return tuple(kind for kind in KINDS if kind in held)

    def share(self, frame: int, rank: int, kind: str) -> float:
        """0..1: how much of a state this rank holds."""
        return size_of(self.frames[frame].ranks[rank].held.get(kind, ())) / self.psi if self.psi else 0.0

    def own(self, rank: int) -> Ranges:
        return tuple((start, stop) for start, stop, owner in self.owners if owner == rank)

    def shards(self, kind: str) -> bool:
        """Whether the strategy splits this kind over the ranks."""
        return STATE_OF[kind] in SHARDED_STATES[self.strategy]

    def foreign(self, frame: int, rank: int, kind: str) -> Ranges:
        """What the rank holds of this kind and another rank owns, or what nobody owns and others hold as well."""
        holdings = self.frames[frame].ranks
        others = [r for number, other in enumerate(holdings) if number != rank for r in other.held.get(kind, ())]
        unowned = [(start, stop) for start, stop, owner in self.owners if owner is None]
        alone = difference(unowned, others)
        held = holdings[rank].held.get(kind, ())
        return tuple((int(start), int(stop)) for start, stop in difference(held, [*self.own(rank), *alone]))

    def left_over(self, rank: int) -> dict[str, Ranges]:
        """After the step: of each sharded kind what is foreign. There should be nothing."""
        last = len(self.frames) - 1
        ranges = {kind: self.foreign(last, rank, kind) for kind in self.kinds if self.shards(kind)}
        return {kind: found for kind, found in ranges.items() if found}

    def most(self, rank: int) -> int:
        """The most bytes of model state that this rank held at one of the events."""
        return max(frame.ranks[rank].state_bytes for frame in self.frames)


def watch_states(*parts: Any) -> AbstractContextManager[None]:
    """Inside a rank, around one step: while it is open, every event leaves a snapshot of what is held.

    parts: an engine with its model in the attribute `module`; or a model and its optimizer. Seen are the parameters'
    data and `.grad`, the state of torch's optimizers (also in the engine's attributes), and what the engine's
    `states()` yields: (kind, tensor, pieces). Alive is what has its bytes, not what has a shape. Events are calls,
    the begin and end of each layer's forward and backward, gradients that are ready, and marks. It watches the layers
    as `watch_layers` does. Outside a metered launch it does nothing. UsageError when there is no model in `parts`.
    """
    from .meters.holding import watch_states

    return watch_states(*parts)


def shard_map(
    run: Run,
    strategy: str = "zero1",
    title: str = "",
    state: StateBytes = MIXED_PRECISION_ADAM,
    *,
    watch: int = -1,
) -> ShardMap:
    """The map of a run in which `watch_states` was open.

    strategy: "ddp", "zero1", "zero2" or "zero3": what the live bytes are compared with. watch: which of several
    watched steps (0 the first, -1 the last). UsageError when there is none, or no such strategy.
    """
    from .shard_map_build import build

    return build(run, strategy, title, state, watch)
