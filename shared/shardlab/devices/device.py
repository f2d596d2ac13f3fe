"""A device, and the one that this thread works on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch


@dataclass(frozen=True, repr=False)
class LogicalDevice:
    """A part of this process that stands for a GPU where there are none. Its tensors are CPU tensors for torch."""

    index: int

    def __repr__(self) -> str:
        return f"device {self.index}"


Device: TypeAlias = LogicalDevice | torch.device  # the latter: a GPU

_thread = threading.local()  # .devices: those that this thread has entered, the innermost last


@contextmanager
def on(device: Device) -> Iterator[None]:
    """Within it this thread works on `device`: tensors that are made from nothing (`torch.zeros(3)`) land there.

    Each thread has its own; a thread that has entered none makes tensors on the host, which torch calls the CPU.
    """
    entered = _thread.__dict__.setdefault("devices", [])
    entered.append(device)
    try:
        if isinstance(device, LogicalDevice):
            yield
        else:
            with torch.cuda.device(device), device:
                yield
    finally:
        entered.pop()


def entered_device() -> Device | None:
    """The device that this thread works on, None outside `on`."""
    entered = _thread.__dict__.get("devices")
    return entered[-1] if entered else None
