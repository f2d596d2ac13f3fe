"""Lab 06: the checks of a partition of parameters over ranks, and of a ZeRO-1 engine."""

from __future__ import annotations

from collections.abc import Callable

from . import exercise
from .haste import ended_well
from .observe import check_signature, observe
from .zero_engine import judge_engine, lines
from .zero_partition import partition_cases
from .zero_stage import ZERO1

PARTITION = "06.partition"


@exercise(PARTITION, title="Who owns what")
def partition(solution: Callable) -> str:
    check_signature(PARTITION, solution, ["sizes", "world_size"], look="")
    cases = partition_cases()
    trial = observe(PARTITION, solution, cases, 2, meter=False)
    for index, case in enumerate(cases):
        seen = trial.observations(index) or []
        for one in seen:
            finding = one.judged.finding
            if finding:
                raise trial.failed(index, "values", f"{case.name}: {finding.seen}", finding.expected, finding.look)
        if len({one.judged.digest for one in seen}) > 1:
            said = (
                f"{case.name}: two processes that were asked the same got {' and '.join(o.judged.digest for o in seen)}"
            )
            goal = "the same on every rank: it follows from sizes and world_size alone"
            raise trial.failed(
                index, "values", said, goal, "nothing random, no rank, no process id, no global variable"
            )
    ended_well(trial)
    most = max(case.world_size for case in cases)
    return lines(
        [trial], [f"every element once, at most ceil(sum / N) per rank, in {len(cases)} cases, N = 1 to {most}"]
    )


@exercise(ZERO1.exercise, title="ZeRO-1: the optimizer's state is split")
def zero1(solution: Callable) -> str:
    return judge_engine(ZERO1, solution)
