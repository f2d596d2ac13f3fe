"""Labs 06 to 08: wrong values that come from an operation that was not waited for, or not yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..errors import CheckFailed
from ..records import Call
from .notes import Observation
from .observe import Trial, line_at, line_of, observe
from .zero_cases import ZeroCase


def hasty(trial: Trial, index: int, player: Callable, failed: CheckFailed, late: bool) -> CheckFailed | None:
    """The verdict "order" instead of `failed`, when haste explains it. late: whether completions were late already."""
    broke = failed.reason == "crash" and "SIG" in failed.seen  # memory that was freed while it was written to
    if trial.world_size == 1 or not (failed.reason == "values" or broke):
        return None
    calls = _collectives(trial.observations(index) or [])
    return _never_waited(trial, index, calls) or _used_early(trial, index, player, late or broke)


def _never_waited(trial: Trial, index: int, calls: list[Call]) -> CheckFailed | None:
    open_calls = [call for call in calls if call.completed is None]
    if not open_calls:
        return None
    first = open_calls[0]
    mine = [call for call in calls if call.rank == first.rank and call.op == first.op]
    left = sum(call.completed is None for call in mine)
    said = f"{trial.at(index, first.rank)}: nobody waits for {left} of {len(mine)} {first.op} calls"
    goal = "wait() for every handle before what it brings is read, and before what it sends is changed"
    return trial.failed(index, "order", said, goal, line_of(first))


def _used_early(trial: Trial, index: int, player: Callable, late: bool) -> CheckFailed | None:
    """Plays the case once more, with every completion late, and looks for tensors that are used before that."""
    case, n = trial.cases[index], trial.world_size
    seen = trial.observations(index) or []
    if not isinstance(case, ZeroCase) or any(call.point_to_point for one in seen for call in one.calls):
        return None
    again = observe(trial.exercise, player, [replace(case, watched=True)], n, slow=range(n))
    observed = again.observations(0) or []
    left = _never_waited(trial, index, _collectives(observed))
    early = [one for one in again.early(0) if not one.call.point_to_point]
    if left is not None or not early:
        return left
    # A look at a tensor that is on its way does no harm if nothing depends on it.
    if not late and observed and [one.judged.digest for one in observed] == [one.judged.digest for one in seen]:
        return None
    call, where = early[0].call, early[0].where
    verb = "changed" if early[0].written else "used"
    at = trial.at(index, call.rank)
    said = f"{at}: the tensor of an asynchronous {call.op} is {verb} before its wait() has returned"
    look = line_of(call) + (f"; {verb} in {line_at(where)}" if where is not None else "")
    return trial.failed(index, "order", said, "wait() first, then read or write what is on its way", look)


def _collectives(seen: Sequence[Observation]) -> list[Call]:
    return [call for one in seen for call in one.calls if not call.point_to_point and call.numel]
