"""Checks: run a learner's solution on real ranks and say in two or three lines what is wrong, or what was measured.

    check("04.ring_all_reduce", ring_all_reduce)

A check is one function per exercise, `probe(solution) -> str`, registered with `@exercise`. It raises `CheckFailed` at
the first fault and returns the lines of the verdict otherwise. LABS says which module holds the probes of a lab; it is
imported when one of its exercises is asked for.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import UsageError

if TYPE_CHECKING:
    from .exchanges import trace_collective as trace_collective
    from .trace import trace_ring as trace_ring

__all__ = ["Exercise", "check", "exercise", "exercises", "find_exercise", "trace_collective", "trace_ring"]

LABS = {
    "00": "shardlab.checks.messages",
    "01": "shardlab.checks.states",
    "02": "shardlab.checks.data_parallel",
    "03": "shardlab.checks.ddp",
    "04": "shardlab.checks.ring",
    "05": "shardlab.checks.overlap",
    "06": "shardlab.checks.zero1",
    "07": "shardlab.checks.zero2",
    "08": "shardlab.checks.zero3",
}

Probe = Callable[[Callable], str]


@dataclass(frozen=True)
class Exercise:
    """id: "04.ring_all_reduce". title: what a person calls it."""

    id: str
    title: str
    probe: Probe


_exercises: dict[str, Exercise] = {}


def exercise(exercise_id: str, *, title: str) -> Callable[[Probe], Probe]:
    """Registers a probe. The part of the id before the dot is the lab's number, a key of LABS."""

    def register(probe: Probe) -> Probe:
        _exercises[exercise_id] = Exercise(exercise_id, title, probe)
        return probe

    return register


def exercises(lab: str | None = None) -> list[Exercise]:
    """The exercises of one lab ("04"), or of all, in the order in which they are done."""
    for number, module in LABS.items():
        if lab in (None, number):
            importlib.import_module(module)
    return [known for known in _exercises.values() if lab is None or known.id.startswith(f"{lab}.")]


def find_exercise(exercise_id: str) -> Exercise:
    """The exercise of that id. Raises UsageError that names the known ones, the closest first."""
    if not isinstance(exercise_id, str):
        raise UsageError(
            f'the first argument of check is the exercise\'s id, such as "04.ring_all_reduce", not {exercise_id!r}'
        )
    lab = exercise_id.partition(".")[0]
    if lab in LABS:
        importlib.import_module(LABS[lab])
    if exercise_id in _exercises:
        return _exercises[exercise_id]
    known = [one.id for one in exercises()]
    closest = difflib.get_close_matches(exercise_id, known, n=len(known), cutoff=0.0)
    ordered = closest + [one for one in known if one not in closest]
    raise UsageError(f"there is no exercise {exercise_id!r}. Did you mean {ordered[0]!r}? Known: {', '.join(ordered)}")


def check(exercise_id: str, solution: Callable) -> None:
    """Prints a verdict on a solution. Raises CheckFailed, an AssertionError with a `reason`, when it is not right yet.

    Runs the solution on fresh processes only; the caller's own process is left as it is. Raises UsageError for an
    unknown exercise.
    """
    found = find_exercise(exercise_id)
    print(f"{found.id}: right\n{found.probe(solution)}")


def __getattr__(name: str) -> Any:
    # Loaded on first use: they import torch.
    if name == "trace_ring":
        return importlib.import_module(".trace", __name__).trace_ring
    if name == "trace_collective":
        return importlib.import_module(".exchanges", __name__).trace_collective
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
