"""Lab 08: the check of a ZeRO-3 engine."""

from __future__ import annotations

from collections.abc import Callable

from . import exercise
from .zero_engine import judge_engine
from .zero_stage import ZERO3


@exercise(ZERO3.exercise, title="ZeRO-3: weights are split, too")
def zero3(solution: Callable) -> str:
    return judge_engine(ZERO3, solution)
