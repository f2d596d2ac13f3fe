"""Lab 05: ranks that do not make the same collective calls, in words."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import CheckFailed
from .notes import Begun, Issued, Observation, Raised
from .observe import Trial, line_at

ALIKE = "whatever branch it has taken, each rank must send all buckets, in plan order, then the flags"


def apart(trial: Trial, alike: str = ALIKE) -> CheckFailed | None:
    """When a trial ended badly because ranks' calls differ: the first that does. alike: what is expected, in words.

    With different sizes the library may end a process, or raise on the other rank, or wait: that is chance, so the
    calls are compared whatever the end was. Only an exception of the solution's own explains missing calls better.
    """
    if trial.error is None:
        return None
    case = min(max((note.case for note in notes if isinstance(note, Begun)), default=0) for notes in trial.notes)
    calls = [_calls_of(notes, case) for notes in trial.notes]
    raised = any(isinstance(note, Raised) for notes in trial.notes for note in notes)
    waited = trial.error.kind in ("disagree", "deadlock", "timeout")
    for number in range(max(map(len, calls))):
        at = [own[number] if number < len(own) else None for own in calls]
        made = [one for one in at if one is not None]
        told = [_told(one) for one in made]
        if len(set(told)) > 1:
            first, other = made[0], next(one for one, text in zip(made, told, strict=True) if text != told[0])
            ranks = at.index(first), at.index(other)
            said = f"call {number + 1} is {told[0]} on rank {ranks[0]}, and {_told(other)} on rank {ranks[1]}"
            return trial.failed(case, "calls", f"{trial.at(case)}: {said}", alike, line_at(other.where))
        if None in at and waited and not raised:
            rank = at.index(None)
            said = f"call {number + 1}, {told[0]}, is made by rank {at.index(made[0])} and not by rank {rank}"
            said += ": who makes it waits for ever"
            return trial.failed(case, "hang", f"{trial.at(case)}: {said}", alike, line_at(made[0].where))
    return None


def _told(call: Issued) -> str:
    return f"{call.op} of {call.numel:,} {call.dtype}" if call.dtype else call.op


def _calls_of(notes: Sequence[object], case: int) -> list[Issued]:
    """The collective calls of one case; the barrier that follows each case is the check's own."""
    calls: list[Issued] = []
    inside = False
    for note in notes:
        if isinstance(note, Begun):
            inside = note.case == case
        elif isinstance(note, Observation):
            inside = False
        elif isinstance(note, Issued) and inside and note.op not in ("send", "recv"):
            calls.append(note)
    return calls
