"""The thread that ties a rank to its launcher: it answers questions, lets the rank go, and ends it with the launcher.

The rank's parent process is the forkserver, so nobody else would notice that the launcher is gone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Collection
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any

from ..meters import caller
from .job import Position


class Leash:
    """control: the connection to the launcher. waits: the threads that wait in a call, by identity (see writer.py)."""

    def __init__(self, rank: int, control: Connection, launcher: int, waits: Collection[int]) -> None:
        self._rank, self._control, self._waits = rank, control, waits
        self._sending = threading.Lock()
        self._let_go = threading.Event()
        self._ends = _ends_with(launcher)
        self._thread = threading.Thread(target=self._watch, daemon=True, name="shardlab-leash")
        self._thread.start()

    def send(self, message: Any) -> None:
        with self._sending, contextlib.suppress(OSError):
            self._control.send(message)

    def wait_until_let_go(self) -> None:
        self._let_go.wait()

    def _watch(self) -> None:
        while True:
            ready = wait([self._control, *self._ends])
            if self._control not in ready:
                end_session()
            try:
                question = self._control.recv()
            except (EOFError, OSError):
                end_session()
            if question == "where":
                self.send(self.position())
            else:
                self._let_go.set()

    def position(self) -> Position:
        """What the learner's threads are doing, besides waiting in a call."""
        frames = sys._current_frames()
        main = threading.main_thread().ident
        busy = max(0, len(self._waits) - 1)
        working = None  # a thread of the learner's that goes on
        for thread, frame in frames.items():
            if thread == self._thread.ident or thread in self._waits or _waits_for_a_thread(frame):
                continue
            if thread == main or caller(frame) is not None:
                busy += 1
                working = frame if thread != main else working
        where = caller(frames[main]) if main in frames else None
        if working is not None and main in frames and _waits_for_a_thread(frames[main]):
            where = caller(working)
        if where is not None and (where.filename, where.function) == ("<string>", "<module>"):
            where = None  # the line by which Python starts a child process
        return Position(self._rank, busy, where)


def end_session() -> None:
    """Ends this process and all that it started."""
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _waits_for_a_thread(frame: FrameType) -> bool:
    """Whether a thread can go on only when another thread of this process does."""
    if frame.f_code.co_name == "_engine_run_backward":
        return True  # autograd's threads run the hooks
    in_threading = frame.f_code.co_filename == threading.__file__
    return in_threading and frame.f_locals.get("timeout", 0) in (None, -1)


def _ends_with(launcher: int) -> list[Any]:
    """What becomes readable when the launcher is gone. A process forked from it may hold its pipe but not its pidfd."""
    parent = multiprocessing.parent_process()
    ends: list[Any] = [parent.sentinel] if parent is not None else []
    if hasattr(os, "pidfd_open"):
        try:
            ends.append(os.pidfd_open(launcher))
        except ProcessLookupError:
            end_session()
        except OSError:
            pass  # an old kernel
    return ends
