"""A link made on purpose: every rank sends over one link of a given latency and bandwidth, one operation at a time.

On one machine communication is over before a picture could show it, and how long it takes is chance. With a link, an
operation begins when the link is free and all ranks have issued it, takes as long as the alpha-beta model says, and is
complete only then. So what overlaps with what can be seen, and is the same on any machine.

Collectives that C++ code issues (DDP's reducer) are delayed too: they come through `mode.py`. Receives are not
delayed: the sender's link already is what they wait for.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from ..records import Call, Link
from ..theory import collective_time


class LinkedCollective(Work):
    """The handle of a collective. wait() returns when the link has carried it."""

    def __init__(self, queue: LinkQueue, real: Work, call: Call, seconds: float) -> None:
        super().__init__()
        self.queue, self.real, self.call, self.seconds = queue, real, call, seconds
        self._carried = threading.Event()
        self._error: Exception | None = None
        self._future: Any = None
        self._lock = threading.Lock()

    def wait(self, timeout: Any = None) -> bool:
        return self.queue.waited(self, self._wait)

    def _wait(self) -> bool:
        self._carried.wait()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        done = self._carried.is_set()
        if done:
            self.queue.completed(self)
        return done

    def get_future(self) -> Any:
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if self._carried.is_set():
                    self._complete_future()
            return self._future

    def carried(self, error: Exception | None = None) -> None:
        """Says that the link is done with it, or that the backend failed."""
        with self._lock:
            self._error = error
            self._carried.set()
            if self._future is not None:
                self._complete_future()

    def _complete_future(self) -> None:
        self.queue.completed(self)
        if self._error is not None:
            self._future.set_exception(self._error)
        else:
            self._future.set_result(self.queue.value_of(self.real))


class LinkedSend(Work):
    """The handle of a message. wait() returns when the link has carried it and the receiver has it."""

    def __init__(self, queue: LinkQueue, real: Work, end: float) -> None:
        super().__init__()
        self.queue, self.real, self.end = queue, real, end

    def wait(self, timeout: Any = None) -> bool:
        return self.queue.waited(self, self._wait)

    def _wait(self) -> bool:
        self.queue.plain_wait(self.real)
        time.sleep(max(0.0, self.end - self.queue.now()))
        return True

    def is_completed(self) -> bool:
        return False  # as with gloo's own


class LinkQueue:
    """One rank's link.

    waited(work, wait) runs `wait()` and tells the tap of it, completed(work) tells that it was found done. plain_wait
    and plain_future are torch's own methods of Work. now: seconds since the launch began.
    """

    def __init__(
        self,
        link: Link,
        waited: Callable[[Work, Callable], Any],
        completed: Callable[[Work], None],
        plain_wait: Callable[[Work], Any],
        plain_future: Callable[[Work], Any],
        now: Callable[[], float],
    ) -> None:
        self.link, self.waited, self.completed, self.now = link, waited, completed, now
        self.plain_wait, self._plain_future = plain_wait, plain_future
        self._collectives: queue.SimpleQueue[LinkedCollective] = queue.SimpleQueue()
        self._free = 0.0  # when the link will have carried all messages so far
        threading.Thread(target=self._carry, daemon=True, name="link").start()

    def value_of(self, real: Work) -> Any:
        return self._plain_future(real).value()

    def issued(self, real: Work, call: Call) -> Work:
        """The handle to give out for an operation that the backend has begun."""
        if call.op == "recv":
            return real
        seconds = collective_time(call.op, call.size, len(call.group), self.link.latency, 1 / self.link.bandwidth)
        if call.op == "send":
            # Messages queue by the clock, not behind each other: a later one may have to be received first.
            call.link_began = max(self.now(), self._free)
            self._free = call.link_ended = call.link_began + seconds
            return LinkedSend(self, real, self._free)
        work = LinkedCollective(self, real, call, seconds)
        self._collectives.put(work)
        return work

    def _carry(self) -> None:
        """Collectives come in the same order on all ranks, so waiting for one before the next cannot deadlock."""
        while True:
            work = self._collectives.get()
            try:
                self.plain_wait(work.real)
            except Exception as error:
                work.carried(error)
                continue
            work.call.link_began = self.now()
            time.sleep(work.seconds)
            work.call.link_ended = self.now()
            work.carried()
