"""Inside a rank: runs a solution on one case after the other and writes down, case by case, what was seen.

What is written to a file survives a rank that hangs, dies or raises in a later case, so a fault is put down to the case
in which it happened, and an earlier fault is not hidden by a later crash.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work

from ..meters import caller, on_call
from ..records import Call, Where
from .early import Early, EarlyUse
from .notes import Again, Begun, Case, Dropped, Endless, Issued, Observation, Prepared, Stranger, raised_note
from .printed import Listener

MOST_CALLS = 3_000  # of torch.distributed in one case; what cuts its messages into small pieces makes some hundred
MOST_OPERATIONS = 100_000  # on tensors; adding up the largest case element by element takes some ten thousand


class EndlessError(Exception):
    """The solution goes on and on. Since it moves, no timeout would end it."""


class HasteError(Exception):
    """A message was never waited for. What comes after that is chance, or waiting for ever: the trial ends."""


class StrangerError(IndexError):
    """A message to or from a rank that is no other rank."""


def unwaited_receives(calls: Sequence[Call]) -> list[Call]:
    return [call for call in calls if call.op == "recv" and call.completed is None and call.numel]


def run_trial(folder: str, solution: Callable, cases: Sequence[Case], copy_sends: bool, patience: float) -> None:
    """What a check launches. The notes of rank r go to folder/r, one pickle after the other.

    copy_sends: every send gets a copy of its buffer, so that a buffer which is changed too early does no harm. The
    difference to a run without it shows whether the solution depends on that. What the solution prints is kept by case
    (see printed.py). patience: seconds for which a rank may go on working on tensors without any communication.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Fresh memory holds NaN (or the largest integer) instead of chance values: the same fault gives the same result.
    torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.simplefilter("ignore")
    if copy_sends:
        _copy_what_is_sent()
    listener = Listener(folder, rank)
    with (
        (Path(folder) / str(rank)).open("wb", buffering=0) as file,
        contextlib.redirect_stdout(listener),
        contextlib.redirect_stderr(listener),
        _Recorder(file) as recorder,
    ):
        for index, case in enumerate(cases):
            listener.begin(index)
            recorder.begin(index)
            _run_case(recorder, case.prepare(rank, world_size), solution, patience)
            dist.barrier()


class _Recorder:
    """Notes what happens in one rank, as it happens."""

    def __init__(self, file: Any) -> None:
        self.file, self.case = file, 0
        self.calls: list[Call] = []
        self.dropped = False
        self.communicated: Callable[[], None] = lambda: None  # to be told of every wait
        self._latest = threading.local()  # .call: what this thread is about to issue
        self._by_work: weakref.WeakKeyDictionary[Any, Call] = weakref.WeakKeyDictionary()

    def __enter__(self) -> _Recorder:
        plain_wait = Work.wait

        def wait(work: Work, *args: Any, **kwargs: Any) -> Any:
            if self.dropped:
                raise HasteError
            call = self._by_work.get(work)
            if call is not None and call.completed is not None:
                self.note(Again(self.case, call, caller()))
            self.communicated()
            return plain_wait(work, *args, **kwargs)

        Work.wait = wait  # type: ignore[assignment, method-assign]
        for name in ("send", "recv"):
            setattr(ProcessGroup, name, self._watched(name, getattr(ProcessGroup, name)))
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
        self._latest.call = call
        if len(self.calls) > MOST_CALLS:
            self.endless(f"{MOST_CALLS:,} calls of torch.distributed")
        self.note(Issued(call.op, call.peer, call.numel, call.dtype, call.where))

    def endless(self, what: str) -> None:
        self.note(Endless(self.case, what, caller()))
        raise EndlessError

    def used_early(self, call: Call, where: Where | None, written: bool) -> None:
        self.note(Early(self.case, call, where, written))

    def _watched(self, op: str, original: Callable) -> Callable:
        def watched(group: ProcessGroup, tensors: list[torch.Tensor], peer: int, *args: Any, **kwargs: Any) -> Any:
            if not 0 <= peer < group.size() or peer == group.rank():
                self.note(Stranger(self.case, op, peer, caller(), alone=peer == group.rank()))
                raise StrangerError(f"rank {peer} is no other rank: ranks are 0 to {group.size() - 1}")
            work = original(group, tensors, peer, *args, **kwargs)
            call = getattr(self._latest, "call", None)
            if call is not None:
                self._by_work[work] = call
                weakref.finalize(work, self._gone, self.case, call)
            return work

        return watched

    def _gone(self, case: int, call: Call) -> None:
        if call.completed is None and call.numel and case == self.case:
            self.dropped = True
            self.note(Dropped(case, call))


def _run_case(recorder: _Recorder, prepared: Prepared, solution: Callable, patience: float) -> None:
    def endless(polls: bool) -> None:
        many = f"{MOST_OPERATIONS:,} operations on tensors"
        recorder.endless(f"{patience:g} s of nothing but operations on tensors" if polls else many)

    early = EarlyUse(recorder.used_early, MOST_OPERATIONS, patience, endless)
    recorder.communicated = early.communicated
    try:
        with on_call(early.issued), on_call(recorder.issued), early:
            returned = solution(*prepared.args)
    except BaseException as error:
        recorder.note(raised_note(recorder.case, error, solution))
        raise
    judged = prepared.judge(returned)
    # A send that is still going on would now send this.
    prepared.spoil()
    recorder.note(Observation(recorder.case, judged, recorder.calls))
    if recorder.dropped or unwaited_receives(recorder.calls):
        raise HasteError


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
