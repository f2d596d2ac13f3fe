"""A bank of solutions that checks must reject, and of unusual ones that they must accept.

One module (or a few) per lab registers small functions or classes, each written as a learner might write it:

    @wrong("04.ring_all_reduce", reason="bytes", says="steps")
    def one_step_too_many(tensor):
        \"\"\"N steps in the first phase instead of N-1.\"\"\"

    @right("04.ring_all_reduce")
    def counter_clockwise(tensor):
        \"\"\"Sends to the left neighbour.\"\"\"

`specimens("04")` loads the modules of one lab and returns what they registered. To add a lab, name its modules in
MODULES.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

MODULES = {
    "00": (
        "messages_right",
        "messages_right_broadcast",
        "messages_wrong_token",
        "messages_wrong_token_more",
        "messages_wrong_token_memory",
        "messages_wrong_broadcast",
        "messages_wrong_broadcast_more",
        "messages_wrong_broadcast_memory",
    ),
    "01": (
        "states_right",
        "states_right_engines",
        "states_wrong",
        "states_wrong_scaling",
        "states_wrong_overflow",
        "states_wrong_update",
        "states_wrong_use",
        "states_wrong_state",
        "states_wrong_ranks",
    ),
    "02": (
        "data_parallel_scatter",
        "data_parallel_gather",
        "data_parallel_right",
        "data_parallel_wrong_gradients",
        "data_parallel_wrong_replicas",
        "data_parallel_wrong_threads",
        "data_parallel_wrong_outputs",
        "data_parallel_right_more",
    ),
    "03": (
        "ddp_right",
        "ddp_right_more",
        "ddp_wrong_broadcast",
        "ddp_wrong_average",
        "ddp_wrong_average_more",
        "ddp_wrong_flat",
        "ddp_wrong_indices",
    ),
    "04": (
        "ring_right",
        "ring_right_more",
        "ring_right_all_reduce",
        "ring_wrong_reduce_scatter",
        "ring_wrong_all_gather",
        "ring_wrong_all_reduce",
        "ring_wrong_handles",
        "ring_wrong_memory",
        "ring_right_ways",
    ),
    "05": ("overlap_plans", "overlap_right", "overlap_right_more", "overlap_wrong", "overlap_wrong_accumulation"),
    "06": ("zero1_partition", "zero1_wrong", "zero1_wrong_more", "zero1_wrong_held", "zero1_right"),
    "07": ("zero2_wrong", "zero2_wrong_more", "zero2_wrong_state", "zero2_wrong_held", "zero2_right"),
    "08": ("zero3_wrong", "zero3_wrong_weights", "zero3_wrong_more", "zero3_wrong_held", "zero3_right"),
}

# Further forms of faults that other modules of the lab, or of the lab before with the same judge, show already. They
# are tried by `make thorough`.
THOROUGH = {
    "messages_wrong_token_more",
    "messages_wrong_broadcast_more",
    "states_wrong_use",
    "zero2_wrong_state",
    "zero3_wrong_more",
}


@dataclass(frozen=True)
class Specimen:
    """One solution. For a wrong one: the reason a check must give, and a regular expression its message must match.

    patience: seconds without progress after which a check gives up, where the specimen makes it wait for that.
    thorough: whether it is of a module in THOROUGH.
    """

    exercise: str
    name: str
    solution: Callable
    about: str
    reason: str = ""
    says: str = ""
    patience: float | None = None
    thorough: bool = False

    @property
    def wrong(self) -> bool:
        return bool(self.reason)


_registered: list[Specimen] = []


def _register(solution: Callable, exercise: str, reason: str, says: str, patience: float | None = None) -> None:
    about = " ".join((solution.__doc__ or "").split())
    if not about:
        raise ValueError(f"{solution.__name__} has no docstring: say in one line what it does")
    thorough = solution.__module__.rpartition(".")[2] in THOROUGH
    _registered.append(Specimen(exercise, solution.__name__, solution, about, reason, says, patience, thorough))


def wrong(exercise: str, *, reason: str, says: str, patience: float | None = None) -> Callable:
    """Registers a solution that the check of `exercise` must reject with `reason`, in words that match `says`."""

    def decorate(solution: Callable) -> Callable:
        _register(solution, exercise, reason, says, patience)
        return solution

    return decorate


def right(*exercises: str) -> Callable:
    """Registers a solution that the checks of `exercises` must accept."""

    def decorate(solution: Callable) -> Callable:
        for exercise in exercises:
            _register(solution, exercise, "", "")
        return solution

    return decorate


def specimens(lab: str) -> list[Specimen]:
    """All specimens of a lab, in the order of their modules."""
    for module in MODULES[lab]:
        importlib.import_module(f"{__name__}.{module}")
    return [specimen for specimen in _registered if specimen.exercise.startswith(f"{lab}.")]
