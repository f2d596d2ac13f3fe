"""The tap: sees every communication call of this process, whoever makes it, and tells its listeners.

It replaces the methods of `ProcessGroup` and `Work.wait`, below `torch.distributed`'s Python functions, so it also sees
calls made through `from torch.distributed import send`, through a learner's thread, or by FSDP2. Calls that C++ code
makes (DDP's reducer) arrive through `mode.py`.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import ProcessGroup, Work

from ..records import Call, Where
from ..theory import collective_cost
from .held import HeldSends
from .signatures import METHODS, Signature, ranks_of, root_of, tensors_in

Callback = Callable[[Call, "torch.Tensor | None"], None]

_LIBRARY_FOLDERS = (
    torch.__path__[0],
    __file__.rsplit("/meters/", 1)[0],
)


class Status(Protocol):
    """Where the tap publishes what this rank is doing, so that another process can read it (see runtime/board.py)."""

    def issued(self, call: Call, group_call: int) -> None: ...
    def waiting(self, call: Call, group_call: int) -> None: ...
    def running(self) -> None: ...
    def progressed(self) -> None: ...


def caller() -> Where | None:
    """The innermost frame that is neither torch nor ShardLab: the learner's line."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith(_LIBRARY_FOLDERS) and not filename.startswith("<frozen"):
            return Where(filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return None


class Tap:
    """Records this rank's calls. Costs a few microseconds a call, and nothing for other operations.

    rank: global rank. began: the launch's start on the machine's monotonic clock, in seconds. keep: whether to keep
    the calls, or only to publish what the rank is waiting for. slow: hold sends back (see held.py).
    """

    def __init__(self, rank: int, began: float, status: Status, keep: bool = True, slow: bool = False) -> None:
        self.rank, self.began, self.status, self.keep = rank, began, status, keep
        self._wait = Work.wait
        self.held = HeldSends(self.waited, self._wait) if slow else None
        self.calls: list[Call] = []
        self.callbacks: list[Callback] = []
        self._count = 0
        self._group_calls: dict[tuple, int] = {}
        self._by_work: weakref.WeakKeyDictionary[Any, tuple[Call, int]] = weakref.WeakKeyDictionary()
        self._inside = threading.local()

    def now(self) -> float:
        return time.monotonic() - self.began

    def install(self) -> None:
        for name in METHODS:
            if hasattr(ProcessGroup, name):
                setattr(ProcessGroup, name, self._tapped(name, getattr(ProcessGroup, name)))
        tap = self

        def wait(work: Work, *args: Any, **kwargs: Any) -> Any:
            return tap.waited(work, lambda: tap._wait(work, *args, **kwargs))

        Work.wait = wait  # type: ignore[assignment, method-assign]

    @property
    def inside_call(self) -> bool:
        """Whether this thread is in a call that the tap already knows of."""
        return getattr(self._inside, "depth", 0) > 0

    def _tapped(self, method: str, original: Callable) -> Callable:
        signature = METHODS[method]

        def tapped(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if self.inside_call:
                return original(group, *args, **kwargs)
            tensors = _tensor_argument(signature, args, kwargs)
            call, group_call = self.note(signature, tensors, group, root_of(method, args, kwargs))
            self._inside.depth = 1
            try:
                if self.held is not None and method in ("send", "recv"):
                    work = self.held.issue(method, original, group, args)
                else:
                    work = original(group, *args, **kwargs)
            finally:
                self._inside.depth = 0
            if work is None:  # monitored_barrier blocks in C++ and hands out no Work
                call.completed = self.now()
            else:
                self._by_work[work] = (call, group_call)
            return work

        return tapped

    def note(
        self, signature: Signature, tensors: list[torch.Tensor], group: ProcessGroup, root: int | None
    ) -> tuple[Call, int]:
        """Counts a call that is about to be issued. `root` is a group rank. Returns it and its number on its path."""
        ranks = ranks_of(group)
        peer = None if root is None or root < 0 else ranks[root]
        numel = 0 if signature.op == "barrier" else sum(tensor.numel() for tensor in tensors)
        nbytes = 0 if signature.op == "barrier" else sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        sent, received = collective_cost(
            signature.op,
            nbytes if signature.whole else nbytes * len(ranks),
            len(ranks),
            rank=ranks.index(self.rank),
            root=0 if root is None or root < 0 else root,
        )
        call = Call(
            rank=self.rank,
            index=self._count,
            op=signature.op,
            peer=peer,
            numel=numel,
            dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
            sent=sent,
            received=received,
            issued=self.now(),
            where=caller(),
            group=ranks,
        )
        for callback in self.callbacks:
            callback(call, tensors[0] if tensors else None)
        self._count += 1
        path = (call.op, call.peer) if call.point_to_point else ranks
        group_call = self._group_calls[path] = self._group_calls.get(path, 0) + 1
        if self.keep:
            self.calls.append(call)
        self.status.issued(call, group_call)
        return call, group_call

    def waited(self, work: Work, wait: Callable[[], Any]) -> Any:
        """Runs `wait`, which blocks until `work` is done, and publishes meanwhile what this rank waits for."""
        known = self._by_work.get(work)
        if known is None or self.inside_call:
            return wait()
        call, group_call = known
        self.status.waiting(call, group_call)
        self._inside.depth = 1
        try:
            result = self.held.while_waiting(work, wait) if self.held is not None else wait()
        finally:
            self._inside.depth = 0
        self.status.running()
        if call.completed is None:
            call.completed = self.now()
        return result

    def adopt(self, work: Work, call: Call, group_call: int) -> None:
        """Takes over a call that C++ code issued: its completion is noted when the work is done."""
        self._by_work[work] = (call, group_call)

        def done(_: Any) -> None:
            if call.completed is None:
                call.completed = self.now()

        try:
            work.get_future().add_done_callback(done)
        except RuntimeError:
            return  # not every backend offers a future; the call then stays without a completion

    def finish(self) -> None:
        """Lets go what is still held back, when the learner's function has returned."""
        if self.held is not None:
            self.held.release()


def _tensor_argument(signature: Signature, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    if signature.op == "barrier":
        return []
    if len(args) > signature.tensors:
        return tensors_in(args[signature.tensors])
    return [tensor for value in kwargs.values() for tensor in tensors_in(value)]
