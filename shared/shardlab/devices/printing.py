"""What is printed in a launch of devices: the device in front, where a thread works on one."""

from __future__ import annotations

import io
import threading
from typing import Any

from .device import entered_device

_RANK = "[rank 0] "  # what `launch` puts in front of every line of the one process


class DevicePrefix(io.TextIOBase):
    """Inside the process: takes what threads print and passes whole lines on."""

    def __init__(self, target: Any) -> None:
        self._target, self._thread, self._lock = target, threading.local(), threading.Lock()

    def write(self, text: str) -> int:
        *lines, self._thread.rest = (getattr(self._thread, "rest", "") + text).split("\n")
        for line in lines:
            self._pass_on(line + "\n")
        return len(text)

    def flush(self) -> None:
        self._target.flush()

    def writable(self) -> bool:
        return True

    def finish(self) -> None:
        """Passes on a last line that has no end."""
        rest, self._thread.rest = getattr(self._thread, "rest", ""), ""
        if rest:
            self._pass_on(rest)

    def _pass_on(self, line: str) -> None:
        device = entered_device()
        with self._lock:
            self._target.write(line if device is None else f"[{_name(device)}] {line}")


class WithoutRank(io.TextIOBase):
    """In the notebook: leaves out the number of the only rank."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def write(self, text: str) -> int:
        self._target.write(text.removeprefix(_RANK))
        return len(text)

    def flush(self) -> None:
        self._target.flush()

    def writable(self) -> bool:
        return True


def _name(device: Any) -> str:
    return f"device {device.index}"
