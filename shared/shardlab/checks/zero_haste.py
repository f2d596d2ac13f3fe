"""Labs 06 to 08: wrong values that come from an operation that was not waited for, or not yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..errors import CheckFailed
from .observe import Trial, line_at, line_of, observe
from .zero_cases import ZeroCase


def hasty(trial: Trial, index: int, player: Callable, failed: CheckFailed) -> CheckFailed | None:
    """The verdict "order" instead of `failed`, when haste explains it."""
    if failed.reason != "values" or trial.world_size == 1:
        return None
    seen = trial.observations(index) or []
    calls = [call for one in seen for call in one.calls if not call.point_to_point and call.numel]
    open_calls = [call for call in calls if call.completed is None]
    if open_calls:
        first = open_calls[0]
        mine = [call for call in calls if call.rank == first.rank and call.op == first.op]
        left = sum(call.completed is None for call in mine)
        said = f"{trial.at(index, first.rank)}: nobody waits for {left} of {len(mine)} {first.op} calls"
        goal = "wait() for every handle before what it brings is read, and before what it sends is changed"
        return trial.failed(index, "order", said, goal, line_of(first))
    return _used_early(trial, index, player)


def _used_early(trial: Trial, index: int, player: Callable) -> CheckFailed | None:
    """Plays the case once more, with every completion late, and looks for tensors that are used before that."""
    case = trial.cases[index]
    if not isinstance(case, ZeroCase) or any(call.point_to_point for call in _calls(trial, index)):
        return None
    again = observe(
        trial.exercise, player, [replace(case, watched=True)], trial.world_size, slow=range(trial.world_size)
    )
    early = [one for one in again.early(0) if not one.call.point_to_point]
    observed = again.observations(0)
    unusable = observed is None or any(one.judged.unusable for one in observed)
    if not early or not unusable:
        return None
    call, where = early[0].call, early[0].where
    verb = "changed" if early[0].written else "used"
    at = trial.at(index, call.rank)
    said = f"{at}: the tensor of an asynchronous {call.op} is {verb} before its wait() has returned"
    look = line_of(call) + (f"; {verb} in {line_at(where)}" if where is not None else "")
    return trial.failed(index, "order", said, "wait() first, then read or write what is on its way", look)


def _calls(trial: Trial, index: int) -> list:
    return [call for one in trial.observations(index) or [] for call in one.calls]
