"""Live bytes by storage.

A tensor is a view; memory belongs to its storage. The meter notes each storage once, when an operation first returns or
uses it, and forgets it when the storage is freed or resized. So a weight that `numel()` calls sharded, but which the
autograd graph keeps alive, is still counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..records import MemorySample, RankMemory

MOST_SAMPLES = 20_000
KINDS = ("parameters", "gradients", "optimizer")


class MemoryMeter:
    """Follows the storages of one rank. `now()` gives the time in seconds since the launch began.

    What a storage is for is known from torch itself (a module's parameters and their `.grad`, the state of a
    `torch.optim` optimizer) or from `label`, for tensors that hand-written code keeps.
    """

    def __init__(self, rank: int, now: Callable[[], float]) -> None:
        self.rank, self._now = rank, now
        self._bytes: dict[int, int] = {}
        self._kinds: dict[int, str] = {}
        self._known: Any = WeakIdKeyDictionary()  # storage -> its key in _bytes
        self._totals = dict.fromkeys(KINDS, 0)
        self._live = 0
        self._peak = 0
        self._next = 0
        self._parameters: weakref.WeakSet[torch.nn.Parameter] = weakref.WeakSet()
        self._samples: list[MemorySample] = []
        self._every = 1
        self._skipped = 0
        self._handles: list[Any] = []
        self._resize = torch.UntypedStorage.resize_

    def start(self) -> None:
        meter = self

        def parameter_registered(module: torch.nn.Module, name: str, parameter: Any) -> None:
            if isinstance(parameter, torch.nn.Parameter):
                meter._parameters.add(parameter)
                meter.label("parameters", [parameter])

        def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            states = [tensor for state in optimizer.state.values() for tensor in state.values()]
            meter.label("optimizer", [tensor for tensor in states if isinstance(tensor, torch.Tensor)])

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = meter._resize(storage, size)
            meter._seen(storage)
            return result

        registered = torch.nn.modules.module.register_module_parameter_registration_hook(parameter_registered)
        self._handles = [registered, register_optimizer_step_post_hook(stepped)]
        torch.UntypedStorage.resize_ = resize  # type: ignore[assignment, method-assign]

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def saw(self, tensors: Iterable[torch.Tensor]) -> None:
        """Notes the storages of tensors that an operation returned or used."""
        for tensor in tensors:
            if tensor.device.type != "meta" and tensor.layout == torch.strided:
                self._seen(tensor.untyped_storage())

    def label(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        """Says what tensors are for: "parameters", "gradients" or "optimizer". The last label counts."""
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is no kind of state; the kinds are {', '.join(KINDS)}")
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._seen(storage)
            key = self._known[storage]
            self._count(key, -self._bytes[key])
            self._kinds[key] = kind
            self._count(key, self._bytes[key])
        self._sample()

    def refresh_gradients(self) -> None:
        """Labels the gradients that the known parameters have now."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        self.label("gradients", [gradient for gradient in gradients if gradient.layout == torch.strided])

    def report(self) -> RankMemory:
        """The record of this rank, with a last sample of what is live now."""
        self.refresh_gradients()
        cuda = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None
        return RankMemory(self.rank, self._samples, self._peak, self._now_sample(), cuda)

    def _seen(self, storage: torch.UntypedStorage) -> None:
        key = self._known.get(storage)
        size = storage.nbytes()
        if key is None:
            key = self._next
            self._next += 1
            self._known[storage] = key
            self._bytes[key] = 0
            weakref.finalize(storage, self._forget, key).atexit = False
        change = size - self._bytes[key]
        if change:
            self._bytes[key] = size
            self._change(key, change)

    def _forget(self, key: int) -> None:
        self._change(key, -self._bytes.pop(key))
        self._kinds.pop(key, None)

    def _change(self, key: int, change: int) -> None:
        self._live += change
        self._count(key, change)
        self._peak = max(self._peak, self._live)
        self._sample()

    def _count(self, key: int, change: int) -> None:
        kind = self._kinds.get(key)
        if kind is not None:
            self._totals[kind] += change

    def _now_sample(self) -> MemorySample:
        return MemorySample(self._now(), self._live, **self._totals)

    def _sample(self) -> None:
        """Keeps the time line, thinned to every second sample each time it grows too long."""
        self._skipped += 1
        if self._skipped < self._every:
            return
        self._skipped = 0
        self._samples.append(self._now_sample())
        if len(self._samples) >= MOST_SAMPLES:
            self._samples = self._samples[::2]
            self._every *= 2
