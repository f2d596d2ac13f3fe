"""Which collectives of the library a solution may call: those that carry a flag, not the data."""

from __future__ import annotations

from collections.abc import Sequence

from ..theory import format_bytes
from .notes import Observation
from .observe import Trial, line_of

HARMLESS_BYTES = 64  # a collective up to this size carries a flag, not the tensor
HARMLESS_TOTAL = 1024  # all flags of a case together


def judge_calls(trial: Trial, index: int, seen: Sequence[Observation]) -> None:
    """Raises CheckFailed("calls") when a collective of the library carries the data."""
    for rank, one in enumerate(seen):
        total = 0.0
        for call in one.calls:
            moves = 0.0 if call.point_to_point else max(call.sent, call.received)
            total += moves
            if moves > HARMLESS_BYTES or total > HARMLESS_TOTAL:
                moved = format_bytes(moves if moves > HARMLESS_BYTES else total)
                moved += "" if moves > HARMLESS_BYTES else ", by and by"
                raise trial.failed(
                    index,
                    "calls",
                    f"{trial.at(index, rank)}: the library's {call.op} moves {moved}",
                    "send and recv (isend, irecv) only; barriers and flags are fine",
                    line_of(call),
                )
