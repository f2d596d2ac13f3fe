"""All instruments of one rank, switched on around the learner's function."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..records import Event, Link, RankMemory
from ..state_records import RankStates
from .memory import Labels, MemoryMeter
from .mode import MeterMode
from .states import StateFinder
from .tap import Callback, Status, Tap


class Instruments:
    """The tap is always on, since it tells whom a rank waits for. meter=False leaves out records and the mode."""

    def __init__(
        self, rank: int, began: float, status: Status, meter: bool, slow: bool = False, link: Link | None = None
    ) -> None:
        self.tap = Tap(rank, began, status, keep=meter, slow=slow, link=link)
        self.memory = MemoryMeter(rank, self.tap.now) if meter else None
        self.marks: list[Event] = []
        self.mark_observers: list[Callable[[str], None]] = []
        self.states: list[RankStates] = []  # one of each `watch_states`
        self.labelled: Labels | None = self.memory  # what `label` reaches
        self.place: Callable[[], int] = lambda: rank  # whose mark one is that is left now

    @contextmanager
    def on(self) -> Iterator[None]:
        """While this is open the instruments see what happens, and `on_call`, `label` and `mark` reach them."""
        self.tap.install()
        _current.append(self)
        try:
            with ExitStack() as stack:
                if self.memory is not None:
                    stack.enter_context(self._memory_on(self.memory))
                yield
                self.tap.finish()
        finally:
            _current.remove(self)
            self.tap.remove()

    @contextmanager
    def _memory_on(self, memory: MemoryMeter) -> Iterator[None]:
        finder = StateFinder(memory)
        home = threading.get_ident()
        memory.start()
        finder.start()

        def before_call(arguments: Sequence[Any]) -> None:
            memory.saw(arguments)
            # Autograd writes `.grad` without the interpreter's lock: a thread beside it must not read it.
            if threading.get_ident() == home:
                finder.look()

        self.tap.before_call = before_call
        with in_every_thread(lambda: MeterMode(self.tap, memory)), MeterMode(self.tap, memory):
            yield
            finder.look()
        finder.stop()
        memory.stop()

    def memory_report(self) -> RankMemory | None:
        return None if self.memory is None else self.memory.report()


@contextmanager
def in_every_thread(make_mode: Callable[[], TorchDispatchMode]) -> Iterator[None]:
    """Threads that are started in the meantime run under a mode of their own: a dispatch mode belongs to one thread."""
    start = threading.Thread.start

    def start_metered(thread: threading.Thread) -> None:
        run = thread.run

        def metered() -> None:
            with make_mode():
                run()

        thread.run = metered  # type: ignore[method-assign]
        start(thread)

    threading.Thread.start = start_metered  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]


_current: list[Instruments] = []  # of this process: none outside a rank, else one


def current() -> Instruments | None:
    """The instruments of this process: None outside a rank."""
    return _current[0] if _current else None


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
        if instruments.labelled is not None:
            instruments.labelled.label(kind, tensors)


def memory_so_far() -> RankMemory:
    """Inside a metered rank: the record of its live bytes up to now. RuntimeError elsewhere."""
    if not _current or _current[0].memory is None:
        raise RuntimeError("memory_so_far works inside a rank of a launch with meter=True")
    return _current[0].memory.report()


def mark(text: str) -> None:
    """Leaves a mark on this rank's time line (run.events). Outside a launch it does nothing."""
    for instruments in _current:
        instruments.marks.append(Event(instruments.tap.now(), instruments.place(), "mark", text))
        for observer in instruments.mark_observers:
            observer(text)
