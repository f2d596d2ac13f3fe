"""Finds out whether values depend on how fast messages are, and says which message was not waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import CheckFailed
from ..records import Call
from .breakdown import breakdown
from .early import Early
from .notes import Case, Dropped, Observation
from .observe import Trial, line_at, line_of, observe, unfinished
from .trial import unwaited_receives


def ended_well(trial: Trial) -> None:
    """Raises what a trial ended with, if it did not end well."""
    hasty = never_waited_for(trial)
    if hasty:
        raise hasty
    if trial.error:
        raise breakdown(trial)


def by_luck(
    solution: Callable,
    trial: Trial,
    index: int,
    seen: Sequence[Observation],
    more: Sequence[Case] = (),
    slow: Sequence[int] = (0,),
) -> Trial:
    """Raises CheckFailed("order") when the wrong values of this case come from a buffer that is used too early.

    The same cases run once more, with late messages of the ranks in `slow` and copied sends: if anything changes, that
    is why. Otherwise returns that second trial; `more` are cases that it runs in addition, at the end.
    """
    hasty = [call for one in seen for call in unwaited_receives(one.calls)]
    if hasty:
        raise never_waits(trial, index, hasty[0])
    _cut_short(trial, index, seen)
    cases = [*trial.cases[: index + 1], *more]
    again = observe(trial.exercise, solution, cases, trial.world_size, slow=slow, copy_sends=True)
    for earlier in range(index + 1):
        then, now = trial.observations(earlier), again.observations(earlier)
        if now is None or [one.judged.digest for one in now] != [one.judged.digest for one in then or ()]:
            raise order(trial, index, seen, again)
    unusable = any(one.judged.unusable for one in seen)
    receives = [one for one in trial.early(index) if one.call.op == "recv" and (unusable or one.written)]
    if receives:
        raise used_early(trial, index, receives[0])
    return again


def _cut_short(trial: Trial, index: int, seen: Sequence[Observation]) -> None:
    """Raises CheckFailed("calls") for a message that fills only a part of the buffer that it is received into."""
    for receiver, one in enumerate(seen):
        for sender, other in enumerate(seen):
            sends = [call for call in other.calls if call.op == "send" and call.peer == receiver]
            receives = [call for call in one.calls if call.op == "recv" and call.peer == sender]
            for sent, received in zip(sends, receives, strict=False):
                if sent.sent < received.received:
                    said = f"rank {sender} sends {sent.numel} {sent.dtype} to rank {receiver}"
                    said = f"{trial.at(index)}: {said}, which receives {received.numel} {received.dtype}"
                    expected = "both sides of a message mean the same data: as many elements, of the same dtype"
                    raise trial.failed(index, "calls", said, expected, line_of(sent))


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
    unusable = any(one.judged.unusable for one in observed)
    # Reading a buffer too early can be a harmless print; what is written into it will be overwritten.
    receives = [one for one in early if one.call.op == "recv" and (unusable or one.written)]
    if receives:
        return used_early(trial, case, receives[0])
    at = trial.at(case)
    changed = next((one for one in early if one.call.op == "send"), None)
    if changed is None and unusable:
        return trial.failed(
            case,
            "order",
            f"{at}: with late messages, data is used (or sent on) before it has arrived",
            "wait() for a receive before its buffer is read, added or sent on",
            next((line_of(call) for call in seen[0].calls if call.op == "recv"), ""),
        )
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
