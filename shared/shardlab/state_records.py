"""What one rank held of the model's states, event by event: plain data that `watch_states` leaves and a `ShardMap` is
made from. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .pieces import Piece

# The kinds of model state, in the order in which pictures show them.
KINDS = ("weights", "gradients", "master", "first_moment", "second_moment")

Pieces = tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class StateFrame:
    """What was alive just after an event. Storages that were freed are not in `held`, whatever views of them remain.

    kind: "start", "forward", "backward", "recompute", "other" (a span of the learner's own), "gradient", "call",
    "waiting", "mark" or "end". ends: a span ended, rather than began. until: how long a wait lasted; else the time.
    """

    time: float
    kind: str
    label: str
    held: Mapping[str, Pieces]
    ends: bool = False
    until: float = 0.0


@dataclass(frozen=True, slots=True)
class Flight:
    """Pieces that a communication call was at work on, from its issue until it was known to be complete."""

    op: str
    kind: str
    pieces: Pieces
    began: float
    ended: float


@dataclass(frozen=True)
class RankStates:
    """One rank: the model's parameters, as far as this rank knows their sizes, and what it held of them."""

    rank: int
    names: tuple[str, ...]
    sizes: tuple[int, ...]  # elements; a parameter that was never whole here may be larger elsewhere
    frames: list[StateFrame] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)
