"""All instruments of one rank, switched on around the learner's function."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from ..records import Event, RankMemory
from .memory import MemoryMeter
from .mode import MeterMode
from .tap import Callback, Status, Tap


class Instruments:
    """The tap is always on, since it tells whom a rank waits for. meter=False leaves out records and the mode."""

    def __init__(self, rank: int, began: float, status: Status, meter: bool, slow: bool) -> None:
        self.tap = Tap(rank, began, status, keep=meter, slow=slow)
        self.memory = MemoryMeter(rank, self.tap.now) if meter else None
        self.marks: list[Event] = []

    @contextmanager
    def on(self) -> Iterator[None]:
        """While this is open the instruments see what happens, and `on_call`, `label` and `mark` reach them."""
        self.tap.install()
        _current.append(self)
        try:
            if self.memory is None:
                yield
                self.tap.finish()
                return
            self.memory.start()
            with MeterMode(self.tap, self.memory):
                yield
                self.tap.finish()
            self.memory.stop()
        finally:
            _current.remove(self)

    def memory_report(self) -> RankMemory | None:
        return None if self.memory is None else self.memory.report()


_current: list[Instruments] = []  # of this process: none outside a rank, else one


def inside_rank() -> bool:
    """Whether this process is a rank of a launch."""
    return bool(_current)


@contextmanager
def on_call(callback: Callback) -> Iterator[None]:
    """Inside a rank: calls `callback(call, tensor)` just before each communication call is issued.

    Raises RuntimeError outside a rank.
    """
    if not _current:
        raise RuntimeError("on_call works inside a rank, that is in a function given to launch")
    callbacks = _current[0].tap.callbacks
    callbacks.append(callback)
    try:
        yield
    finally:
        callbacks.remove(callback)


def label(kind: str, tensors: Iterable[torch.Tensor]) -> None:
    """Says what tensors are for ("parameters", "gradients", "optimizer"), so that run.memory can tell them apart.

    Outside a metered launch it does nothing, so the same code runs under torchrun.
    """
    for instruments in _current:
        if instruments.memory is not None:
            instruments.memory.label(kind, tensors)


def mark(text: str) -> None:
    """Leaves a mark on this rank's time line (run.events). Outside a launch it does nothing."""
    for instruments in _current:
        instruments.marks.append(Event(instruments.tap.now(), instruments.tap.rank, "mark", text))
