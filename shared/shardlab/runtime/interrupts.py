"""Ctrl-C (in a notebook: the stop button) while ranks run.

It is noted, not raised, so that it never breaks off the cleaning up. However often it is pressed, the launch ends once
and in order.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """A context. `pressed` says whether an interrupt has come since it was entered."""

    def __init__(self) -> None:
        self.pressed = False
        self.told = False  # whether somebody has acted on it
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        # Only the main thread receives signals. Who ignores them, goes on ignoring them.
        if threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGINT)):
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        if self.pressed and not self.told and error is None:
            raise KeyboardInterrupt  # it came when the ranks had finished already

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True
