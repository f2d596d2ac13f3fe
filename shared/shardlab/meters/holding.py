"""Snapshots of what a rank holds: after every event, the storages that are alive and the elements that lie in them.

A storage that once held a state counts until it is freed, whoever keeps it: a closure, a list, the autograd graph.

Only the thread that trains takes snapshots: autograd writes `.grad` without the interpreter's lock, and reading it
beside that can crash. Calls of other threads (a ring in a thread of its own) are noted as being in flight; which
elements they move is looked up when the watch ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..pieces import Piece
from ..records import Call, Span
from ..state_records import KINDS, Pieces, RankStates, StateFrame
from ..theory import format_bytes
from .flights import Flights
from .holders import Holders
from .instruments import Instruments, current
from .layers import watch_layers
from .memory import Held
from .spans import Spans

# What the memory meter calls the kinds.
LABELS = {"weights": "parameters", "gradients": "gradients"} | dict.fromkeys(KINDS[2:], "optimizer")


@contextmanager
def watch_states(*parts: Any) -> Iterator[None]:
    """See `shardlab.shard_map.watch_states`."""
    instruments = current()
    if instruments is None or instruments.memory is None:
        yield
        return
    holders = Holders(parts)
    watch = _Watch(instruments, holders)
    with ExitStack() as stack:
        stack.enter_context(watch_layers(holders.model))
        stack.enter_context(watch.on())
        yield


@dataclass
class _Kept:
    """A storage with states in it, of at least `size` bytes."""

    storage: Held
    size: int
    states: list[tuple[str, Pieces]] = field(default_factory=list)


class _Watch:
    """One `watch_states` while it is open."""

    def __init__(self, instruments: Instruments, holders: Holders) -> None:
        assert instruments.memory is not None
        self._instruments, self._holders, self._memory = instruments, holders, instruments.memory
        self._spans: Spans = instruments.tap.spans
        self._home = threading.get_ident()
        self._flights = Flights(instruments.memory)
        self._busy = False
        self._handles: list[Any] = []
        self._waits: dict[int, int] = {}  # the frame of each wait that is open
        self._kept: dict[int, _Kept] = {}  # by the storage's number: what lay there when it was last told of
        self._same: dict[Pieces, Pieces] = {}  # equal tuples become one, which keeps the record small
        self._sizes = [parameter.numel() for parameter in holders.parameters.values()]
        self.frames: list[StateFrame] = []

    @contextmanager
    def on(self) -> Iterator[None]:
        """While it is open, events leave frames. What was seen is kept also when the block raises."""
        tap = self._instruments.tap
        before = tap.before_call

        def before_call(arguments: tuple) -> None:
            if before is not None:
                before(arguments)
            self._flights.handed_in(arguments)

        for name, parameter in self._holders.parameters.items():
            if parameter.requires_grad and parameter.is_leaf:
                # The engine's own hooks were registered earlier, so they have run by then.
                hook = self._when_ready(name)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        tap.before_call = before_call
        tap.callbacks.append(self._called)
        self._spans.observers.append(self._span)
        self._instruments.mark_observers.append(self._marked)
        self._snapshot("start", "")
        try:
            yield
            self._snapshot("end", "")
        finally:
            self._instruments.mark_observers.remove(self._marked)
            self._spans.observers.remove(self._span)
            tap.callbacks.remove(self._called)
            tap.before_call = before
            for handle in self._handles:
                handle.remove()
            self._instruments.states.append(self._record())

    def _record(self) -> RankStates:
        names = tuple(self._holders.parameters)
        return RankStates(self._instruments.tap.rank, names, tuple(self._sizes), self.frames, self._flights.all())

    def _when_ready(self, name: str) -> Callable[[torch.Tensor], None]:
        def ready(_: torch.Tensor) -> None:
            self._snapshot("gradient", name)

        return ready

    def _called(self, call: Call, tensor: torch.Tensor | None) -> None:
        self._flights.issued(call, tensor)
        what = f"{call.op.replace('_', '-')} of {format_bytes(call.size)}"
        if call.op in ("send", "recv"):
            what = f"{call.op} of {format_bytes(call.size)} {'to' if call.op == 'send' else 'from'} rank {call.peer}"
        self._snapshot("call", what)

    def _marked(self, text: str) -> None:
        self._snapshot("mark", text)

    def _span(self, span: Span, ends: bool) -> None:
        if ends and (number := self._waits.pop(id(span), None)) is not None:
            self.frames[number] = replace(self.frames[number], until=self._spans.now())
        if self._snapshot(span.kind, span.label, ends) and span.kind == "waiting" and not ends:
            self._waits[id(span)] = len(self.frames) - 1

    def _here(self) -> bool:
        """Whether this is the thread that trains; on a GPU, backward runs in a thread of autograd's."""
        return threading.get_ident() == self._home or torch._C._current_graph_task_id() != -1

    def _snapshot(self, kind: str, label: str, ends: bool = False) -> bool:
        if self._busy or not self._here():
            return False
        self._busy = True  # `states()` is the learner's code: what it calls is no event
        try:
            with torch.no_grad():
                held = self._held()
        finally:
            self._busy = False
        now = self._spans.now()
        self.frames.append(StateFrame(now, kind, label, held, ends, now))
        return True

    def _held(self) -> dict[str, Pieces]:
        """What the engine tells of, and what it tells of no more while somebody still keeps its storage alive."""
        now: dict[int, _Kept] = {}
        for kind, tensor, pieces in self._holders.all():
            self._memory.label(LABELS[kind], [tensor], override=False)
            for storage in self._flights.lies(kind, tensor, pieces):
                now.setdefault(storage.key, _Kept(storage, storage.size)).states.append((kind, pieces))
        kept = {key: kept for key, kept in self._kept.items() if kept.storage.size >= kept.size}
        self._kept = kept | now
        found: dict[str, set[Piece]] = {}
        for kind, pieces in (state for kept in self._kept.values() for state in kept.states):
            found.setdefault(kind, set()).update(pieces)
            for piece in pieces:
                if piece.parameter < len(self._sizes):
                    self._sizes[piece.parameter] = max(self._sizes[piece.parameter], piece.stop)
        held = {}
        for kind in KINDS:
            if kind in found:
                sorted_pieces = tuple(sorted(found[kind]))
                held[kind] = self._same.setdefault(sorted_pieces, sorted_pieces)
        return held
