"""Lab 05: checks of a plan of buckets, and of a DistributedDataParallel that overlaps communication with backward.

The engine is put through many small models on ranks that are seeded differently, and `.grad` after each backward is
compared with replicas that are played side by side in one process. All asynchronous operations complete as late as they
may (see meters/late.py), so a missing wait shows every time. Overlap is read from the order of events: which reductions
were issued, and not waited for, before the next gradients were computed. No clock is looked at.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ..errors import CheckFailed
from . import exercise
from .breakdown import breakdown
from .haste import ended_well
from .observe import Trial, check_signature, observe
from .overlap_calls import apart
from .overlap_cases import ORDER, PLAIN, cases_at
from .overlap_judge import Judge, overlapping_reductions, sent
from .overlap_models import build
from .overlap_plan import plan_cases
from .overlap_play import Played, Player

PLAN = "05.plan_buckets"
ENGINE = "05.DistributedDataParallel"
WORLD_SIZES = (2, 3, 5, 1)


@exercise(PLAN, title="A plan of buckets")
def plan_buckets(solution: Callable) -> str:
    check_signature(PLAN, solution, ["parameters", "bucket_bytes"], look="")
    cases = plan_cases()
    trial = observe(PLAN, solution, cases, 1)
    for index in range(len(cases)):
        for one in trial.observations(index) or []:
            finding = one.judged.finding
            if finding:
                said = f"{cases[index].name}: {finding.seen}"
                raise trial.failed(index, "values", said, finding.expected, finding.look)
    if trial.error:
        raise breakdown(trial)
    kinds = "sizes that differ, exact fits, three dtypes, oversize and empty parameters"
    return _lines([trial], [f"right in {len(cases)} cases: {kinds}"])


@exercise(ENGINE, title="DistributedDataParallel with buckets that overlap")
def distributed_data_parallel(solution: Callable) -> str:
    _check_class(solution)
    trials = [_trial(solution, n) for n in WORLD_SIZES]
    cases = sum(len(trial.cases) for trial in trials)
    three = next(trial for trial in trials if trial.world_size == 3)
    ordered = _played(three, ORDER)
    nbytes = 4 * sum(parameter.numel() for parameter in build("layers", 0).parameters())
    share = max(sent(calls) for played in _played(three, PLAIN) for calls in played.calls) / nbytes
    told = ", ".join(map(str, sorted(WORLD_SIZES)))
    overlapping = min(overlapping_reductions(played.happened) for played in ordered)
    return _lines(
        trials,
        [
            f"values: the mean of what was accumulated, on every rank, in {cases} cases, N = {told},"
            " every completion late",
            f"order: {len(ordered[0].reductions)} calls of all_reduce in a step of 12 parameters,"
            f" {overlapping} of them on their way while backward computes",
            f"bytes sent per rank and step at N = 3: {share:.3f} n (2(N-1)/N n = 1.333 n); nothing in no_sync()",
        ],
    )


def _check_class(solution: Any) -> None:
    expected = "the class itself, made with (model, bucket_bytes=..., all_reduce=...)"
    if not callable(solution):
        raise CheckFailed(ENGINE, "signature", f"an object of type {type(solution).__name__}", expected, "without ()")
    try:
        signature = inspect.signature(solution)
    except (TypeError, ValueError):
        return  # using it will show
    try:
        signature.bind(None, bucket_bytes=1, all_reduce=None)
        signature.bind(None)
    except TypeError as error:
        name = getattr(solution, "__name__", "it")
        raise CheckFailed(ENGINE, "signature", f"{name}{signature}: {error}", expected) from None


def _trial(solution: Callable, n: int) -> Trial:
    """Runs the cases of a world size and raises CheckFailed at the first fault."""
    trial = observe(ENGINE, Player(solution), cases_at(n), n, slow=range(n))
    for index in range(len(trial.cases)):
        seen = trial.observations(index)
        if seen is None:
            break
        Judge(trial, index, seen).all()
    unlike = apart(trial)
    if unlike is not None:
        raise unlike
    ended_well(trial)
    return trial


def _played(trial: Trial, about: str) -> list[Played]:
    index = next(index for index, case in enumerate(trial.cases) if case.name == about)
    return [one.judged for one in trial.observations(index) or [] if isinstance(one.judged, Played)]


def _lines(trials: list[Trial], lines: list[str]) -> str:
    printed = sum(trial.lines_printed for trial in trials)
    if printed:
        lines.append(f"your code printed {printed:,} line{'s' * (printed > 1)}; they are not shown here")
    return "\n".join(f"  {line}" for line in lines)
