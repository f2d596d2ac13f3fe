"""Lab 07: the check of a ZeRO-2 engine."""

from __future__ import annotations

from collections.abc import Callable

from . import exercise
from .zero_engine import judge_engine
from .zero_stage import ZERO2


@exercise(ZERO2.exercise, title="ZeRO-2: gradients are split, too")
def zero2(solution: Callable) -> str:
    return judge_engine(ZERO2, solution)
