"""A slow link, made on purpose: messages of this rank complete as late as they may.

`isend` promises to read its buffer before `wait()` returns, not when it is called; `irecv` promises to have filled its
buffer after `wait()`, not before. On a fast machine both usually happen at once, and code that reuses a buffer too
early passes by luck. Here a send is issued only when somebody waits for it, or when this rank has been blocked in
another wait for a while; a received message becomes visible only at `wait()`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C._distributed_c10d import Work

BLOCKED_SECONDS = 0.2  # a rank blocked for longer gets its held sends issued, or a right ring would deadlock


class HeldSend(Work):
    """A send that has not been handed to the backend yet."""

    def __init__(self, queue: HeldSends, issue: Callable[[], Work]) -> None:
        super().__init__()
        self._queue, self._issue = queue, issue
        self._real: Work | None = None

    def issue(self) -> None:
        if self._real is None:
            self._real = self._issue()

    @property
    def real(self) -> Work:
        self._queue.release()
        assert self._real is not None
        return self._real

    def wait(self, timeout: Any = None) -> bool:
        return self._queue.waited(self, lambda: self._queue.plain_wait(self.real))

    def is_completed(self) -> bool:
        return self.real.is_completed()

    def get_future(self) -> Any:
        return self.real.get_future()


class HeldReceive(Work):
    """A receive into a staging buffer; the learner's buffer is filled by wait(), and is unusable before."""

    def __init__(self, queue: HeldSends, real: Work, staging: torch.Tensor, target: torch.Tensor) -> None:
        super().__init__()
        self._queue, self.real, self._staging, self._target = queue, real, staging, target
        self._delivered = False

    def wait(self, timeout: Any = None) -> bool:
        return self._queue.waited(self, self._deliver)

    def _deliver(self) -> bool:
        if not self._delivered:
            self._queue.plain_wait(self.real)  # a second wait for one message would never return
            self._delivered = True
            with unseen():
                self._target.copy_(self._staging)
        return True

    def is_completed(self) -> bool:
        return self.real.is_completed() and self._deliver()

    def get_future(self) -> Any:
        return self.real.get_future()

    def _source_rank(self) -> int:
        return self.real._source_rank()


class HeldSends:
    """The sends of one rank that are held back, oldest first.

    waited(work, wait) runs `wait()` and tells the tap of it; plain_wait(work) is torch's own `Work.wait`.
    """

    def __init__(self, waited: Callable[[Work, Callable], Any], plain_wait: Callable[[Work], Any]) -> None:
        self.waited, self.plain_wait = waited, plain_wait
        self._lock = threading.RLock()
        self._pending: list[HeldSend] = []
        self._issued: list[HeldSend] = []

    def issue(self, method: str, original: Callable, group: Any, args: tuple) -> Work:
        (tensor,) = args[0]
        if not tensor.is_contiguous():
            return original(group, *args)  # the backend refuses it: let it say so
        if method == "send":
            work = HeldSend(self, lambda: original(group, *args))
            with self._lock:
                self._pending.append(work)
            return work
        with unseen():
            staging = torch.empty_like(tensor)
        real = original(group, [staging], *args[1:])
        with unseen():
            tensor.fill_(poison(tensor.dtype))
        return HeldReceive(self, real, staging, tensor)

    def release(self) -> None:
        """Issues every held send, in the order they were made."""
        with self._lock:
            for work in self._pending:
                work.issue()
            # Kept until the next time: gloo drops a message whose handle is gone before it has left.
            self._issued, self._pending = self._pending, []

    def while_waiting(self, wait: Callable[[], Any]) -> Any:
        if not self._pending:
            return wait()
        timer = threading.Timer(BLOCKED_SECONDS, self.release)
        timer.daemon = True
        timer.start()
        try:
            return wait()
        finally:
            timer.cancel()


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """What happens here is neither the learner's memory nor part of an autograd graph."""
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        yield


def poison(dtype: torch.dtype) -> float | int | bool:
    """What a tensor holds before anything has arrived: NaN, or the largest integer."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max
