"""What a rank did from when to when. Spans are kept in the order in which they end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..records import GradientReady, Span


class Spans:
    """The spans of one rank. now: seconds since the launch began. keep=False keeps nothing."""

    def __init__(self, rank: int, now: Callable[[], float], keep: bool = True) -> None:
        self.rank, self.now, self.keep = rank, now, keep
        self.all: list[Span] = []
        self.observers: list[Callable[[Span, bool], None]] = []  # told of each begin, and of each end (True)
        self.watched: set[int] = set()  # the models whose layers are watched already, by id
        self.gradients: list[GradientReady] = []

    def begin(self, kind: str, label: str, call: int | None = None) -> Span:
        """A span of this thread that begins now. It is kept when it ends."""
        span = Span(self.rank, kind, label, self.now(), None, threading.get_ident(), call)
        for observer in self.observers:
            observer(span, False)
        return span

    def end(self, span: Span, time: float | None = None) -> None:
        """Ends it now, or at `time`, unless it has ended already."""
        if span.ended is None:
            span.ended = self.now() if time is None else time
            if self.keep:
                self.all.append(span)
            if time is None:  # else the next span's begin has told all there is to see
                for observer in self.observers:
                    observer(span, True)

    @contextmanager
    def during(self, kind: str, label: str, call: int | None = None) -> Iterator[None]:
        """A span as long as the block, also when that raises."""
        span = self.begin(kind, label, call)
        try:
            yield
        finally:
            self.end(span)
