"""Inside a rank: runs a solution on one case after the other and writes down, case by case, what was seen.

What is written to a file survives a rank that hangs, dies or raises in a later case, so a fault is put down to the case
in which it happened, and an earlier fault is not hidden by a later crash.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import pickle
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

from ..meters import is_library, on_call
from ..records import Call, Where


@dataclass(frozen=True)
class Finding:
    """What is wrong with the values on one rank, in a learner's words: what was seen, expected, and where to look."""

    seen: str
    expected: str = ""
    look: str = ""


@dataclass(frozen=True)
class Judged:
    """digest: a hash of all values that count. Equal digests mean that two runs gave the same, bit for bit.

    unusable: NaN, or an integer type's largest value, stands where a number should be: what memory holds in a trial
    before anything has arrived.
    """

    finding: Finding | None
    digest: str
    unusable: bool = False


@dataclass(frozen=True)
class Prepared:
    """One rank's part of a case. judge(returned value) looks at the values; spoil() overwrites what was handed in."""

    args: tuple
    judge: Callable[[Any], Judged]
    spoil: Callable[[], None]


class Case(Protocol):
    """A case is sent to every rank, so it must pickle; `prepare` runs there. name: "9 elements, float64"."""

    @property
    def name(self) -> str: ...

    def prepare(self, rank: int, world_size: int) -> Prepared: ...


@dataclass(frozen=True)
class Begun:
    case: int


@dataclass(frozen=True)
class Issued:
    """A call of the case that is running, noted before it was issued."""

    op: str
    peer: int | None
    numel: int
    dtype: str
    where: Where | None


@dataclass(frozen=True)
class Raised:
    """own: the exception was raised in the learner's code itself, not in something it called."""

    case: int
    type: str
    message: str
    where: Where | None
    own: bool


@dataclass(frozen=True)
class Dropped:
    """A message whose handle was thrown away before anybody had waited for it: it may never be sent or arrive."""

    case: int
    call: Call


@dataclass(frozen=True)
class Observation:
    """One rank's view of one case that came to its end. calls: in order, with `completed` None if nobody waited."""

    case: int
    judged: Judged
    calls: list[Call] = field(default_factory=list)


class HasteError(Exception):
    """A message was never waited for. What comes after that is chance, or waiting for ever: the trial ends."""


def unwaited_receives(calls: Sequence[Call]) -> list[Call]:
    return [call for call in calls if call.op == "recv" and call.completed is None and call.numel]


def run_trial(folder: str, solution: Callable, cases: Sequence[Case], copy_sends: bool) -> None:
    """What a check launches. The notes of rank r go to folder/r, one pickle after the other.

    copy_sends: every send gets a copy of its buffer, so that a buffer which is changed too early does no harm. The
    difference to a run without it shows whether the solution depends on that. What the solution prints is not shown:
    it would be printed once per case and rank.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Fresh memory holds NaN (or the largest integer) instead of chance values: the same fault gives the same result.
    torch.use_deterministic_algorithms(True, warn_only=True)
    if copy_sends:
        _copy_what_is_sent()
    quiet = io.StringIO()
    with (
        (Path(folder) / str(rank)).open("wb", buffering=0) as file,
        contextlib.redirect_stdout(quiet),
        contextlib.redirect_stderr(quiet),
        _Recorder(file) as recorder,
    ):
        for index, case in enumerate(cases):
            recorder.begin(index)
            _run_case(recorder, case.prepare(rank, world_size), solution)
            dist.barrier()


class _Recorder:
    """Notes what happens in one rank, as it happens."""

    def __init__(self, file: Any) -> None:
        self.file, self.case = file, 0
        self.calls: list[Call] = []
        self.dropped = False

    def __enter__(self) -> _Recorder:
        for name in ("send", "recv"):
            setattr(ProcessGroup, name, self._watched(getattr(ProcessGroup, name)))
        return self

    def __exit__(self, *exception: object) -> None:
        self.case = -1  # handles that go from now on say nothing about the solution

    def note(self, note: Any) -> None:
        self.file.write(pickle.dumps(note))

    def begin(self, case: int) -> None:
        self.case, self.calls = case, []
        self.note(Begun(case))

    def issued(self, call: Call, tensor: torch.Tensor | None) -> None:
        if self.dropped:
            raise HasteError
        self.calls.append(call)
        self.note(Issued(call.op, call.peer, call.numel, call.dtype, call.where))

    def _watched(self, original: Callable) -> Callable:
        def watched(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            work = original(group, *args, **kwargs)
            if self.calls:
                weakref.finalize(work, self._gone, self.case, self.calls[-1])
            return work

        return watched

    def _gone(self, case: int, call: Call) -> None:
        if call.completed is None and call.numel and case == self.case:
            self.dropped = True
            self.note(Dropped(case, call))


def _run_case(recorder: _Recorder, prepared: Prepared, solution: Callable) -> None:
    try:
        with on_call(recorder.issued):
            returned = solution(*prepared.args)
    except BaseException as error:
        recorder.note(_raised(recorder.case, error))
        raise
    judged = prepared.judge(returned)
    # A send that is still going on would now send this.
    prepared.spoil()
    recorder.note(Observation(recorder.case, judged, recorder.calls))
    if recorder.dropped or unwaited_receives(recorder.calls):
        raise HasteError


def _raised(index: int, error: BaseException) -> Raised:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_library(frame.filename)]
    where = Where(own[-1].filename, own[-1].lineno or 0, own[-1].name) if own else None
    return Raised(index, type(error).__name__, str(error), where, bool(own) and own[-1] is frames[-1])


def read_notes(folder: str, rank: int) -> list[Any]:
    """What a rank has written, up to where it stopped."""
    notes: list[Any] = []
    path = Path(folder) / str(rank)
    if path.exists():
        with path.open("rb") as file:
            while True:
                try:
                    notes.append(pickle.load(file))
                except (EOFError, pickle.UnpicklingError):
                    break
    return notes


def _copy_what_is_sent() -> None:
    send = ProcessGroup.send
    copies = []

    def send_copy(group: ProcessGroup, tensors: list[torch.Tensor], *args: Any) -> Any:
        copies.append([tensor.clone() for tensor in tensors])
        return send(group, copies[-1], *args)

    ProcessGroup.send = send_copy  # type: ignore[method-assign, assignment]


def digest_of(tensors: Iterable[torch.Tensor]) -> str:
    """A hash of the tensors' values, bit for bit."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def unusable(tensor: torch.Tensor) -> bool:
    """Whether the tensor holds what memory holds before anything has arrived: NaN, or the largest integer."""
    if tensor.dtype.is_floating_point:
        return bool(tensor.isnan().any())
    return bool((tensor == torch.iinfo(tensor.dtype).max).any())
