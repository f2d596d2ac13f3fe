"""What is in flight: which elements of the model's states a communication call is at work on, and for how long.

A call hands in tensors; what lies in their storages is known from the snapshots. Storages are told apart by the memory
meter's numbers, which are never used again, so it does not matter which was seen first, the call or the state in it.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..pieces import Piece
from ..records import Call
from ..state_records import Flight, Pieces
from .memory import Held, MemoryMeter, _storages
from .signatures import tensors_in

Bytes = tuple[int, int, int]  # the storage's number, from, to


@dataclass
class _Operation:
    """Calls that are drawn as one: a collective of the library, or the messages of one in a thread of its own."""

    op: str
    thread: int
    calls: list[Call] = field(default_factory=list)
    places: list[Bytes] = field(default_factory=list)


class Flights:
    """Notes calls as they are issued, and what lies where; puts both together in the end."""

    def __init__(self, memory: MemoryMeter) -> None:
        self._memory = memory
        self._home = threading.get_ident()
        self._lies: dict[int, dict[tuple[str, int, int, Pieces], None]] = defaultdict(dict)
        self._operations: list[_Operation] = []
        self._open: dict[tuple[int, int], tuple[_Operation, set[tuple[str, Bytes]]]] = {}
        self._given = threading.local()

    def lies(self, kind: str, tensor: torch.Tensor, pieces: Pieces) -> list[Held]:
        """Notes where a state's pieces lie. Returns the storages that have its bytes: none when they were freed."""
        alive = []
        for storage in _storages(tensor):
            size = tensor.element_size()
            offset = int(tensor.storage_offset()) * size
            if storage.nbytes() >= offset + tensor.numel() * size and tensor.numel():
                held = self._memory.seen(storage)
                self._lies[held.key][kind, offset, size, pieces] = None
                alive.append(held)
        return alive

    def handed_in(self, arguments: Iterable[Any]) -> None:
        """All that a call works on, just before `issued` tells of the call."""
        self._given.tensors = [tensor for argument in arguments for tensor in tensors_in(argument)]

    def issued(self, call: Call, tensor: torch.Tensor | None) -> None:
        tensors = getattr(self._given, "tensors", None) or ([] if tensor is None else [tensor])
        self._given.tensors = None
        places = [place for given in tensors for place in self._places(given)]
        thread = threading.get_ident()
        if thread == self._home:
            self._operations.append(_Operation(call.op, thread, [call], places))
        else:
            for place in places:
                self._message(thread, call, place)

    def _message(self, thread: int, call: Call, place: Bytes) -> None:
        """One of the messages that a ring is made of. A ring sends a chunk once: the next time, it is another ring."""
        operation, seen = self._open.get((thread, place[0]), (None, set()))
        if operation is None or (call.op, place) in seen:
            operation, seen = _Operation(call.op, thread), set()
            self._open[thread, place[0]] = operation, seen
            self._operations.append(operation)
        seen.add((call.op, place))
        operation.calls.append(call)
        operation.places.append(place)

    def _places(self, tensor: torch.Tensor) -> Iterator[Bytes]:
        for storage in _storages(tensor):
            offset = int(tensor.storage_offset()) * tensor.element_size()
            yield self._memory.seen(storage).key, offset, offset + tensor.numel() * tensor.element_size()

    def all(self) -> list[Flight]:
        """The flights of all calls on states that were seen, in the order of their issue."""
        flights = []
        for operation in self._operations:
            found: dict[str, set[Piece]] = defaultdict(set)
            for place in operation.places:
                for kind, piece in self._pieces(place):
                    found[kind].add(piece)
            ends = [float("inf") if call.completed is None else call.completed for call in operation.calls]
            for kind, pieces in found.items():
                began = operation.calls[0].issued
                flights.append(Flight(operation.op, kind, tuple(sorted(pieces)), began, max(ends)))
        return flights

    def _pieces(self, place: Bytes) -> Iterator[tuple[str, Piece]]:
        key, start, stop = place
        for kind, offset, size, pieces in list(self._lies.get(key, ())):
            at = offset
            for piece in pieces:
                end = at + (piece.stop - piece.start) * size
                low, high = max(at, start), min(end, stop)
                if low < high:
                    first, last = (low - at) // size, -(-(high - at) // size)
                    yield kind, Piece(piece.parameter, piece.start + first, piece.start + last)
                at = end
