"""Live bytes by storage.

A tensor is a view; memory belongs to its storage. The meter notes each storage once, when an operation first returns or
uses it, and forgets it when the storage is freed or resized. So a weight that `numel()` calls sharded, but which the
autograd graph keeps alive, is still counted.

Not seen: memory that is no torch storage (C++ buffers of a library, such as gloo's or DDP's buckets before an operation
touches them), and a tensor over foreign memory (`torch.from_numpy`) until an operation uses it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..records import RankMemory
from .timeline import Timeline

_PLAIN = (torch.Tensor, torch.nn.Parameter)
KINDS = ("parameters", "gradients", "optimizer")


class Labels(Protocol):
    """What can be told what tensors are for, as a MemoryMeter can."""

    def label(self, kind: str, tensors: Iterable[torch.Tensor], override: bool = True) -> None: ...


@dataclass(slots=True)
class Held:
    """A live storage. key: its number, never used again. reference: tells when it is freed."""

    key: int
    size: int
    reference: Any


class MemoryMeter:
    """Follows the storages of one rank. `now()` gives the time in seconds since the launch began."""

    def __init__(self, rank: int, now: Callable[[], float]) -> None:
        self.rank, self._now = rank, now
        self._held: dict[int, Held] = {}  # by the storage's address
        self._kinds: dict[int, str] = {}  # by key
        self._timeline = Timeline()
        self._live = 0
        self._peak = 0
        self._next = 0
        self._lock = threading.RLock()  # any thread may free a storage
        self._resize = torch.UntypedStorage.resize_

    def start(self) -> None:
        meter = self

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = meter._resize(storage, size)
            meter.seen(storage)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[assignment, method-assign]

    def stop(self) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def saw(self, values: Iterable[Any]) -> None:
        """Notes the storages of the tensors among an operation's arguments or results, and in lists of them."""
        for value in values:
            if type(value) in _PLAIN and value.layout is torch.strided:  # nearly always: worth a short cut
                storage = value.untyped_storage()
                held = self._held.get(storage._cdata)
                if held is not None and held.size == storage.nbytes():
                    continue
            if isinstance(value, torch.Tensor):
                for storage in _storages(value):
                    self.seen(storage)
            elif isinstance(value, (list, tuple)):
                self.saw(value)

    def label(self, kind: str, tensors: Iterable[torch.Tensor], override: bool = True) -> None:
        """Says what tensors are for: "parameters", "gradients" or "optimizer".

        The last label counts, for all the time that the storage lives. override=False labels only what has none yet.
        """
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is no kind of state; the kinds are {', '.join(KINDS)}")
        for tensor in tensors:
            for storage in _storages(tensor):
                key = self.seen(storage).key
                if override or key not in self._kinds:
                    self._kinds[key] = kind

    def report(self) -> RankMemory:
        """The record of this rank, with a last sample of what is live now."""
        at_end = self._settle()
        cuda = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None
        return RankMemory(self.rank, list(self._timeline.samples), self._peak, at_end, cuda)

    def kind_of(self, tensor: torch.Tensor) -> str:
        """What the tensor's storage is labelled as, or ""."""
        keys = [held.key for storage in _storages(tensor) if (held := self._held.get(storage._cdata)) is not None]
        return next((self._kinds[key] for key in keys if key in self._kinds), "")

    def seen(self, storage: torch.UntypedStorage) -> Held:
        """Notes a storage, or its new size."""
        address = storage._cdata
        held = self._held.get(address)
        size = storage.nbytes()
        if held is None:
            with self._lock:
                held = self._held.get(address)  # another thread may have been faster
                if held is None:
                    held = Held(self._next, 0, weakref.ref(storage, lambda _: self._freed(address)))
                    self._next += 1
                    self._held[address] = held
        if size != held.size:
            self._resized(held, size)
        return held

    def _freed(self, address: int) -> None:
        self._resized(self._held.pop(address), 0)

    def _resized(self, held: Held, size: int) -> None:
        with self._lock:
            change, held.size = size - held.size, size
            if not change:
                return
            self._live += change
            self._peak = max(self._peak, self._live)
            self._timeline.changed(self._now(), held.key, change)
            if self._timeline.full:
                self._settle()

    def _settle(self) -> Any:
        with self._lock:
            sample = self._timeline.settle(self._kinds, self._now())
            alive = {held.key for held in list(self._held.values())}  # a library's thread may free one meanwhile
            self._kinds = {key: kind for key, kind in self._kinds.items() if key in alive}
            return sample


def _storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages that hold a tensor's elements: its own, or those of the tensors that it wraps (as DTensor does)."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, torch.Tensor):
                yield from _storages(inner)
    elif tensor.layout == torch.strided:
        storage = tensor.untyped_storage()
        if storage.device.type != "meta":  # which a FakeTensor's storage is, whatever device the tensor names
            yield storage
