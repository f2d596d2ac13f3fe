"""The tap: sees every communication call of this process, whoever makes it, and tells its listeners.

It replaces the methods of `ProcessGroup` and `Work.wait`, below `torch.distributed`'s Python functions, so it also sees
calls made through `from torch.distributed import send`, through a learner's thread, or by FSDP2. Calls that C++ code
makes (DDP's reducer) arrive through `mode.py`.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import ProcessGroup, Work

from ..records import POINT_TO_POINT, Call, Link
from ..theory import collective_cost
from .held import HeldSends
from .late import LateCollectives
from .link import LinkQueue
from .signatures import METHODS, Signature, ranks_of, root_of, tag_of, tensors_in
from .spans import Spans
from .where import caller

Callback = Callable[[Call, "torch.Tensor | None"], None]


@dataclass(frozen=True, slots=True)
class Turn:
    """Which call of other ranks this one meets: the one with the same number in the same group (and with this tag)."""

    group: str  # the process group's name, which all its members share
    number: int  # 1 for the first collective of the group, or the first message between the two ranks
    tag: int = 0  # of a send or recv
    uneven: bool = False  # whether ranks may rightly hand in different sizes


class Status(Protocol):
    """Where the tap publishes what this rank is doing, so that another process can read it (see runtime/board.py)."""

    def issued(self, call: Call, turn: Turn) -> None: ...
    def withdrawn(self, call: Call, turn: Turn) -> None: ...
    def waiting(self, call: Call, turn: Turn) -> None: ...
    def running(self) -> None: ...
    def progressed(self) -> None: ...


class Tap:
    """Records this rank's calls. Costs some ten microseconds a call, and nothing for other operations.

    rank: global rank. began: the launch's start on the machine's monotonic clock, in seconds. keep: whether to keep
    the calls, or only to publish what the rank is waiting for. slow: messages and collectives complete as late as
    they may (see held.py, late.py). link: what operations go over (see link.py); not together with slow.
    """

    def __init__(
        self,
        rank: int,
        began: float,
        status: Status,
        keep: bool = True,
        slow: bool = False,
        link: Link | None = None,
    ) -> None:
        self.rank, self.began, self.status, self.keep = rank, began, status, keep
        self._wait, self._get_future, self._is_completed = Work.wait, Work.get_future, Work.is_completed
        self.held = HeldSends(self.waited, self._wait) if slow else None
        self.late = LateCollectives(self.waited, self._wait, self._completed) if slow else None
        self.link = (
            LinkQueue(link, self.waited, self._completed, self._wait, self._get_future, self.now) if link else None
        )
        self.calls: list[Call] = []
        self.spans = Spans(rank, self.now, keep)
        self.callbacks: list[Callback] = []
        self.before_call: Callable[[tuple], None] | None = None  # gets the arguments of each call
        self._count = 0
        self._numbering = threading.Lock()  # the learner's function may communicate from several threads
        self._numbers: dict[tuple, int] = {}
        self._by_work: weakref.WeakKeyDictionary[Any, tuple[Call, Turn]] = weakref.WeakKeyDictionary()
        self._adopted: dict[int, tuple[Call, Any]] = {}  # calls of C++ code that are not done, and their futures
        self._replaced: list[tuple[type, str, Any]] = []
        self._inside = threading.local()

    def now(self) -> float:
        return time.monotonic() - self.began

    def install(self) -> None:
        for name in METHODS:
            if hasattr(ProcessGroup, name):
                self._replace(ProcessGroup, name, self._tapped(name, getattr(ProcessGroup, name)))
        tap = self

        def wait(work: Work, *args: Any, **kwargs: Any) -> Any:
            return tap.waited(work, lambda: tap._wait(work, *args, **kwargs))

        def polled(work: Work) -> bool:
            done = tap._is_completed(work)
            if done:
                tap._completed(work)
            return done

        def future_of(work: Work) -> Any:
            future = tap._get_future(work)
            known = tap._by_work.get(work)
            if known is not None:
                future.add_done_callback(lambda _: tap._complete(known[0]))
            return future

        self._replace(Work, "wait", wait)
        self._replace(Work, "is_completed", polled)
        self._replace(Work, "get_future", future_of)

    def remove(self) -> None:
        """Puts torch's own methods back."""
        for owner, name, original in self._replaced:
            setattr(owner, name, original)
        self._replaced.clear()

    def _replace(self, owner: type, name: str, new: Callable) -> None:
        self._replaced.append((owner, name, owner.__dict__[name]))  # getattr would give it unbound
        setattr(owner, name, new)

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
            if self.before_call is not None:
                self.before_call(args)
            root, tag = root_of(method, args, kwargs), tag_of(method, args, kwargs)
            call, turn = self.note(signature, tensors, group, root, tag)
            self._inside.depth = 1
            try:
                issue = _below_the_modes(original, tensors) if self.keep else original
                if self.held is not None and method in ("send", "recv"):
                    work = self.held.issue(method, issue, group, args)
                elif self.late is not None and tensors and signature.op not in POINT_TO_POINT:
                    work = self.late.issue(signature, issue, group, args, call.peer == self.rank)
                else:
                    work = issue(group, *args, **kwargs)
                if self.link is not None and work is not None:
                    work = self.link.issued(work, call)
            except Exception:
                self.withdraw(call, turn)
                raise
            finally:
                self._inside.depth = 0
            if work is None:  # monitored_barrier blocks in C++ and hands out no Work
                self._complete(call)
            else:
                self._by_work[work] = (call, turn)
            return work

        return tapped

    def note(
        self, signature: Signature, tensors: list[torch.Tensor], group: ProcessGroup, root: int | None, tag: int = 0
    ) -> tuple[Call, Turn]:
        """Counts a call that is about to be issued. `root` is a group rank. Returns it and its turn."""
        ranks = ranks_of(group)
        peer = None if root is None or root < 0 else ranks[root]
        numel = sum(tensor.numel() for tensor in tensors)
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        full = nbytes if signature.whole else nbytes * len(ranks)
        if signature.op in POINT_TO_POINT:
            sent, received = (float(full), 0.0) if signature.op == "send" else (0.0, float(full))
        else:
            sent, received = collective_cost(signature.op, full, len(ranks), ranks.index(self.rank), root or 0)
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
            size=float(full),
        )
        for callback in self.callbacks:
            callback(call, tensors[0] if tensors else None)
        path = _path(call, group.group_name, tag)
        with self._numbering:
            call.index = self._count
            self._count += 1
            number = self._numbers[path] = self._numbers.get(path, 0) + 1
            turn = Turn(group.group_name, number, tag, signature.uneven)
            if self.keep:
                self.calls.append(call)
            self.status.issued(call, turn)
        return call, turn

    def withdraw(self, call: Call, turn: Turn) -> None:
        """Forgets a call that the backend refused: nothing was sent, and no other rank has to match it."""
        with self._numbering:
            self._numbers[_path(call, turn.group, turn.tag)] -= 1
            if self.keep:
                self.calls.remove(call)
            self.status.withdrawn(call, turn)

    def waited(self, work: Work, wait: Callable[[], Any]) -> Any:
        """Runs `wait`, which blocks until `work` is done, and publishes meanwhile what this rank waits for."""
        known = self._by_work.get(work)
        if known is None or self.inside_call:
            return wait()
        result = self.blocked(*known, wait)
        call = known[0]
        if call.op == "recv" and call.peer is None:  # from any rank: the library tells afterwards from which
            call.peer = call.group[work._source_rank()]
        return result

    def blocked(self, call: Call, turn: Turn, wait: Callable[[], Any]) -> Any:
        """Runs `wait`, which returns when the call is done."""
        self.status.waiting(call, turn)
        self._inside.depth = 1
        try:
            with self.spans.during("waiting", call.op, call.index):
                result = self.held.while_waiting(wait) if self.held is not None else wait()
        finally:
            self._inside.depth = 0
        self.status.running()
        self._complete(call)
        return result

    def adopt(self, work: Work, call: Call, turn: Turn) -> Work:
        """Takes over a call that C++ code issued: its completion is noted when the work is done.

        Returns the handle that this code shall wait for.
        """
        if self.link is not None:
            work = self.link.issued(work, call)
        self._by_work[work] = (call, turn)
        with contextlib.suppress(RuntimeError):  # not every backend offers a future; it then stays without completion
            future = self._get_future(work) if self.link is None else work.get_future()
            self._adopted[call.index] = (call, future)
            future.add_done_callback(lambda _: self._notified(call))
        return work

    def _notified(self, call: Call) -> None:
        self._adopted.pop(call.index, None)
        self._complete(call)

    def _completed(self, work: Work) -> None:
        known = self._by_work.get(work)
        if known is not None:
            self._complete(known[0])

    def _complete(self, call: Call) -> None:
        if call.completed is None:
            call.completed = self.now()

    def finish(self) -> None:
        """When the learner's function has returned: lets go what is still held back, and takes late notices."""
        for call, future in list(self._adopted.values()):
            if future.done():  # its notice is on the way, in another thread
                self._notified(call)
        if self.held is not None:
            self.held.release()


def _below_the_modes(original: Callable, tensors: list[torch.Tensor]) -> Callable:
    """A call that the tap has seen need not pass the dispatch mode, unless special tensors (FakeTensor) need it."""
    if any(type(tensor) not in (torch.Tensor, torch.nn.Parameter) for tensor in tensors):
        return original

    def issue(*args: Any, **kwargs: Any) -> Any:
        with torch._C._DisableTorchDispatch():
            return original(*args, **kwargs)

    return issue


def _path(call: Call, group: str, tag: int) -> tuple:
    """What numbers calls: messages by direction, peer and tag, collectives by group."""
    return (group, tag, call.op, call.peer) if call.point_to_point else (group,)


def _tensor_argument(signature: Signature, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    if signature.op == "barrier":
        return []
    if len(args) > signature.tensors:
        return tensors_in(args[signature.tensors])
    return [tensor for value in kwargs.values() for tensor in tensors_in(value)]
