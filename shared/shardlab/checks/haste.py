"""Says which message was not waited for, when values depend on how fast messages are."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import CheckFailed
from ..records import Call
from .early import Early
from .notes import Dropped, Observation
from .observe import Trial, line_at, line_of, unfinished
from .trial import unwaited_receives


def never_waited_for(trial: Trial) -> CheckFailed | None:
    """The verdict on a message without a wait(), if a trial has one: such a trial ends there."""
    for notes in trial.notes:
        for note in notes:
            if isinstance(note, Dropped):
                return never_waits(trial, note.case, note.call)
            if isinstance(note, Observation) and unwaited_receives(note.calls):
                return never_waits(trial, note.case, unwaited_receives(note.calls)[0])
    return None


def never_waits(trial: Trial, case: int, call: Call) -> CheckFailed:
    at = trial.at(case)
    if call.op == "recv":
        said = f"{at}: rank {call.rank} never waits for a receive, so it may use the buffer before the data is there"
        return trial.failed(case, "order", said, "wait() before the buffer is read", line_of(call))
    said = f"{at}: rank {call.rank} never waits for a send and drops its handle: the message may never leave"
    return trial.failed(case, "order", said, "keep what isend returns, and wait() for it", line_of(call))


def order(trial: Trial, case: int, seen: Sequence[Observation], late: Trial) -> CheckFailed:
    """Values that depend on when messages complete: which kind of haste was it, and in which line.

    late: a trial with late messages, of the same cases.
    """
    observed = late.observations(case) or seen
    early = trial.early(case) + late.early(case)
    receives = [one for one in early if one.call.op == "recv"]
    if any(one.judged.unusable for one in observed) and receives:
        return used_early(trial, case, receives[0])
    at = trial.at(case)
    if any(one.judged.unusable for one in observed):
        return trial.failed(
            case,
            "order",
            f"{at}: with late messages, data is used (or sent on) before it has arrived",
            "wait() for a receive before its buffer is read, added or sent on",
            next((line_of(call) for call in seen[0].calls if call.op == "recv"), ""),
        )
    changed = next((one for one in early if one.call.op == "send"), None)
    said = f"{at}: with late messages the values are wrong: a buffer is changed before its send is complete"
    expected = "wait() for a send before its buffer is used again, and for all sends before the function returns"
    open_calls = [call for one in seen for call in unfinished(one.calls)]
    if changed is not None and not open_calls:
        return trial.failed(case, "order", said, expected, _both_lines(changed, "changed"))
    look = open_calls or [call for call in seen[0].calls if call.op == "send"]
    return trial.failed(case, "order", said, expected, line_of(look[0]) if look else "")


def used_early(trial: Trial, case: int, early: Early) -> CheckFailed:
    said = f"{trial.at(case)}: rank {early.call.rank} uses the buffer of a receive before wait() has returned"
    expected = "wait() for a receive before its buffer is read, added or sent on; until then it holds nan or old data"
    return trial.failed(case, "order", said, expected, _both_lines(early, "used"))


def _both_lines(early: Early, verb: str) -> str:
    line = line_of(early.call)
    return f"{line}; {verb} in {line_at(early.where)}" if early.where is not None else line
