"""In the caller's process: launches trials of a solution and turns what went wrong into a `CheckFailed`.

Checks run on the CPU with gloo, also where there are GPUs, so that they say the same everywhere.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import CheckFailed, LaunchError
from ..runtime import launch
from ..runtime.places import place, source
from ..records import Call, Where
from .trial import Begun, Case, Issued, Observation, Raised, read_notes, run_trial

TIMEOUT = 20.0  # seconds without any progress; deadlocks are found sooner
MOST_CHARACTERS = 240  # of an exception's message


@dataclass(frozen=True)
class Trial:
    """What one launch of a solution showed. notes[r] is what rank r wrote; error is how it ended, None if well."""

    exercise: str
    world_size: int
    cases: Sequence[Case]
    notes: list[list[Any]]
    error: LaunchError | None

    def observations(self, case: int) -> list[Observation] | None:
        """One per rank; None when some rank did not come to the end of this case."""
        seen = [note for notes in self.notes for note in notes if isinstance(note, Observation) and note.case == case]
        return seen if len(seen) == self.world_size else None

    def at(self, rank: int, case: int) -> str:
        """ "rank 1, N = 3, 9 elements" """
        return f"rank {rank}, N = {self.world_size}, {self.cases[case].name}"


def check_signature(exercise: str, solution: Any, parameters: Sequence[str]) -> None:
    """Raises CheckFailed("signature") unless `solution` can be called with these positional arguments."""
    expected = f"a function of {len(parameters)} argument{'s' * (len(parameters) > 1)}: ({', '.join(parameters)})"
    name = getattr(solution, "__name__", type(solution).__name__)
    if not callable(solution):
        shown = repr(solution)
        shown = shown if len(shown) < 60 else f"a {type(solution).__name__}"
        raise CheckFailed(exercise, "signature", f"{shown}, which is not a function", expected, "pass it without ()")
    if inspect.iscoroutinefunction(solution) or inspect.isgeneratorfunction(solution):
        look = "its body runs only when it is awaited or iterated over"
        raise CheckFailed(exercise, "signature", f"{name} is a coroutine or a generator", expected, look)
    try:
        signature = inspect.signature(solution)
    except (TypeError, ValueError):
        return  # a built-in; calling it will show
    try:
        signature.bind(*parameters)
    except TypeError:
        raise CheckFailed(
            exercise, "signature", f"{name}{signature}", expected, "rank and world size come from torch.distributed"
        ) from None


def observe(
    exercise: str,
    solution: Callable,
    cases: Sequence[Case],
    world_size: int,
    slow: Sequence[int] = (),
    copy_sends: bool = False,
) -> Trial:
    """Runs all cases in one launch. slow: ranks whose messages complete as late as they may. See `run_trial`."""
    error = None
    with tempfile.TemporaryDirectory(prefix="shardlab-check-") as folder:
        try:
            launch(
                run_trial,
                world_size,
                (folder, solution, list(cases), copy_sends),
                device="cpu",
                timeout=TIMEOUT,
                slow_sends=tuple(slow),
            )
        except LaunchError as caught:
            if caught.kind == "interrupted":
                raise
            error = caught
        notes = [read_notes(folder, rank) for rank in range(world_size)]
    return Trial(exercise, world_size, cases, notes, error)


def breakdown(trial: Trial) -> CheckFailed:
    """Why a trial did not come to its end, for one whose `error` is set."""
    error = trial.error
    assert error is not None
    case, rank = _stopped(trial, error.rank or 0)
    raised = [note for note in trial.notes[rank] if isinstance(note, Raised)]
    if raised and raised[0].type == "NotImplementedError" and raised[0].own:
        return CheckFailed(trial.exercise, "not written", f"{_where(raised[0].where)} raises NotImplementedError")
    if raised:
        return _raised(trial, rank, raised[0])
    if error.kind in ("deadlock", "timeout", "disagree"):
        return _hang(trial, case, error)
    lines = error.report.splitlines()
    return CheckFailed(
        trial.exercise,
        "crash",
        f"{trial.at(rank, case)}: {lines[0]}",
        look=next((line.strip() for line in lines[1:] if " line " in line), "") or _last_call(trial, rank),
    )


def _stopped(trial: Trial, blamed: int) -> tuple[int, int]:
    """The earliest case that some rank did not finish, and the rank to name."""
    begun = [max((note.case for note in notes if isinstance(note, Begun)), default=0) for notes in trial.notes]
    raised = [rank for rank, notes in enumerate(trial.notes) if any(isinstance(note, Raised) for note in notes)]
    rank = blamed if blamed in raised or not raised or trial.error.kind == "died" else raised[0]  # type: ignore[union-attr]
    return min(begun), rank


_HINTS = {
    "contiguous": "a message is one block of memory: send and recv take contiguous tensors only",
    "does not require grad": "the collective works on the numbers: use detach() or torch.no_grad()",
    "zero-dimensional": "a 0-d tensor has no dimension to cut: flatten it first",
    "0 dimension": "a 0-d tensor has no dimension to cut: flatten it first",
    "view size is not compatible": "view(-1) needs a contiguous tensor; reshape(-1) makes a copy if it must",
    "Invalid destination rank": "ranks run from 0 to N-1; the right neighbour of rank r is (r + 1) % N",
    "rank should not be the same": "a rank cannot send to itself: with N = 1 there is nothing to do",
    "must match the size": "chunks need not have the same size: make each buffer as large as what comes in",
}


def _raised(trial: Trial, rank: int, raised: Raised) -> CheckFailed:
    text = (raised.message.strip().splitlines() or [""])[0][:MOST_CHARACTERS]
    hint = next((hint for words, hint in _HINTS.items() if words in raised.message), "")
    return CheckFailed(
        trial.exercise,
        "crash",
        f"{trial.at(rank, raised.case)}: {raised.type}: {text}",
        hint,
        _where(raised.where) or _last_call(trial, rank),
    )


def _hang(trial: Trial, case: int, error: LaunchError) -> CheckFailed:
    """The launch's report, condensed: who waits for whom, the usual cause, the line of the first rank that waits."""
    lines = error.report.splitlines()
    ranks = [line.strip() for line in lines if line.startswith("  rank ")]
    waits = [line.replace(" was waiting", " waits") for line in ranks if "barrier" not in line]
    waits += [line.split(" was ")[0] + " had returned" for line in ranks if "barrier" in line]
    more = f"; and {len(waits) - 3} more" if len(waits) > 3 else ""
    place_lines = [line.strip() for line in lines if line.startswith("      ")]
    cause = next((line.partition(": ")[2] for line in lines if line.startswith("Usual cause")), "")
    return CheckFailed(
        trial.exercise,
        "hang",
        f"N = {trial.world_size}, {trial.cases[case].name}: {'; '.join(waits[:3])}{more}",
        cause or lines[0],
        place_lines[0] if place_lines else "",
    )


def _where(where: Where | None) -> str:
    if where is None:
        return ""
    text = source(where.filename, where.line)
    return f"{place(where.filename, where.line)}: {text}" if text else place(where.filename, where.line)


def _last_call(trial: Trial, rank: int) -> str:
    calls = [note for note in trial.notes[rank] if isinstance(note, Issued)]
    return _where(calls[-1].where) if calls else ""


def unfinished(calls: Sequence[Call]) -> list[Call]:
    """Messages that nobody waited for."""
    return [call for call in calls if call.point_to_point and call.completed is None]


def line_of(call: Call) -> str:
    """The learner's line that made a call."""
    return _where(call.where)
