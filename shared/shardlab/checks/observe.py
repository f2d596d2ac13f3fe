"""In the caller's process: launches trials of a solution and turns what went wrong into a `CheckFailed`.

Checks run on the CPU with gloo, also where there are GPUs, so that they say the same everywhere.
"""

from __future__ import annotations

import inspect
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import CheckFailed, LaunchError
from ..records import Call, Where
from ..runtime import launch
from ..runtime.places import place, source
from .trial import Begun, Case, Issued, Observation, Raised, read_notes, run_trial

TIMEOUT = 10.0  # seconds without any progress; deadlocks are found sooner
MOST_RANKS = 3  # named in one message
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
    """Why a trial did not come to its end, for one whose `error` is set.

    Raises that error when no rank had got as far as the solution: then the solution is not to blame.
    """
    error = trial.error
    assert error is not None
    if not any(trial.notes):
        raise error
    case, rank = _stopped(trial, error.rank or 0)
    raised = [note for note in trial.notes[rank] if isinstance(note, Raised)]
    if raised and raised[0].type == "NotImplementedError" and raised[0].own:
        return CheckFailed(trial.exercise, "not written", _where(raised[0].where))
    different = _different_sizes(trial)
    if different:
        said, call = different
        hint = "both sides of a message have the same number of elements and the same dtype (torch.empty_like)"
        return CheckFailed(trial.exercise, "crash", f"N = {trial.world_size}, {said}", hint, _where(call.where))
    if raised:
        return _raised(trial, rank, raised[0])
    if error.kind in ("deadlock", "timeout"):
        return _hang(trial, case, error)
    lines = error.report.splitlines()
    if error.kind == "disagree":
        return CheckFailed(trial.exercise, "calls", f"N = {trial.world_size}: {lines[0]}", lines[-1], lines[1].strip())
    places = [f"{one.place}: {one.source}" for one in error.ranks if one.rank == rank and one.source]
    look = places[0] if places else _last_call(trial, rank)
    return CheckFailed(trial.exercise, "crash", f"{trial.at(rank, case)}: {lines[0]}", look=look)


def _different_sizes(trial: Trial) -> tuple[str, Issued] | None:
    """The first message of the last case whose two ends disagree: gloo ends the process that receives it."""
    ends: dict[tuple[int, int, str], list[Issued]] = {}
    for rank, notes in enumerate(trial.notes):
        begun = [place for place, note in enumerate(notes) if isinstance(note, Begun)]
        for note in notes[begun[-1] :] if begun else []:
            if isinstance(note, Issued) and note.peer is not None and note.op in ("send", "recv"):
                path = (rank, note.peer) if note.op == "send" else (note.peer, rank)
                ends.setdefault((*path, note.op), []).append(note)
    for (sender, receiver, op), sends in ends.items():
        receives = ends.get((sender, receiver, "recv"), []) if op == "send" else []
        for sent, received in zip(sends, receives, strict=False):
            if (sent.numel, sent.dtype) != (received.numel, received.dtype):
                said = f"rank {sender} sends {sent.numel} {sent.dtype} to rank {receiver}, which receives"
                return f"{said} {received.numel} {received.dtype}", received
    return None


def _stopped(trial: Trial, blamed: int) -> tuple[int, int]:
    """The earliest case that some rank did not finish, and the rank to name."""
    begun = [max((note.case for note in notes if isinstance(note, Begun)), default=0) for notes in trial.notes]
    raised = [rank for rank, notes in enumerate(trial.notes) if any(isinstance(note, Raised) for note in notes)]
    rank = blamed if blamed in raised or not raised or trial.error.kind == "died" else raised[0]  # type: ignore[union-attr]
    return min(begun), rank


_HINTS = {
    "view size is not compatible": "view(-1) needs a contiguous tensor; reshape(-1) makes a copy if it must",
    "contiguous": "a message is one block of memory: send and recv take contiguous tensors only",
    "does not require grad": "the collective works on the numbers: use detach() or torch.no_grad()",
    "zero-dimensional": "a 0-d tensor has no dimension to cut: flatten it first",
    "0 dimension": "a 0-d tensor has no dimension to cut: flatten it first",
    "Invalid destination rank": "ranks run from 0 to N-1; the right neighbour of rank r is (r + 1) % N",
    "Pair is not connected": "a rank cannot send to itself: with N = 1 there is nothing to do",
    "rank should not be the same": "a rank cannot send to itself: with N = 1 there is nothing to do",
    "must match the size": "chunks need not have the same size: make each buffer as large as what comes in",
}


def _raised(trial: Trial, rank: int, raised: Raised) -> CheckFailed:
    text = re.sub(r"\[enforce fail at [^\]]*\] ", "", (raised.message.strip().splitlines() or [""])[0])
    hint = next((hint for words, hint in _HINTS.items() if words in raised.message), "")
    return CheckFailed(
        trial.exercise,
        "crash",
        f"{trial.at(rank, raised.case)}: {raised.type}: {text[:MOST_CHARACTERS]}",
        hint,
        _where(raised.where) or _last_call(trial, rank),
    )


def _hang(trial: Trial, case: int, error: LaunchError) -> CheckFailed:
    """The launch's report, condensed: who waits for whom, the usual cause, the line of the first rank that waits."""
    returned = [rank for rank, notes in enumerate(trial.notes) if _has_returned(notes)]
    stuck = [standing for standing in error.ranks if standing.rank not in returned]
    said = [f"rank {one.rank} {f'waits in {one.call}' if one.call else f'was {one.doing}'}" for one in stuck]
    said += [f"rank {rank} had returned" for rank in returned]
    more = f"; and {len(said) - MOST_RANKS} more" if len(said) > MOST_RANKS else ""
    lines = error.report.splitlines()
    cause = next((line.partition(": ")[2] for line in lines if line.startswith("Usual cause")), lines[0])
    if returned:
        # They stand in the check's own barrier, which the report cannot know.
        cause = "a recv for every send, and a send for every recv: count both, per step and rank"
    place = next((f"{one.place}: {one.source}" for one in stuck if one.source), "")
    at = f"N = {trial.world_size}, {trial.cases[case].name}"
    return CheckFailed(trial.exercise, "hang", f"{at}: {'; '.join(said[:MOST_RANKS])}{more}", cause, place)


def _has_returned(notes: list[Any]) -> bool:
    return bool(notes) and isinstance(notes[-1], Observation)


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
