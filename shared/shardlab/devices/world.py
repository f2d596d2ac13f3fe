"""All devices of one process: what goes from one to another, what each holds, who works where."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..meters import caller
from ..meters.instruments import Instruments, in_every_thread
from ..meters.memory import MemoryMeter
from ..meters.states import StateFinder
from ..records import Call, RankMemory
from .device import entered_device
from .places import COPIES, GpuPlaces, LogicalPlaces, Places, tensors_in, together

_ATEN = torch.ops.aten


class World:
    """Written to by every thread of the process."""

    def __init__(self, places: Places, instruments: Instruments) -> None:
        self.places = places
        self.devices = places.devices()
        self.now, self.progressed = instruments.tap.now, instruments.tap.status.progressed
        self.meters = [MemoryMeter(index, self.now) for index in range(len(self.devices))]
        self.calls: list[list[Call]] = [[] for _ in self.devices]
        self.failures: list[BaseException] = []  # what threads raised and nobody caught
        self._instruments = instruments
        self._lock = threading.Lock()

    @contextmanager
    def on(self) -> Iterator[None]:
        """While this is open every operation of every thread passes by."""
        finder = StateFinder(self, threads=True)
        resize, hook = torch.UntypedStorage.resize_, threading.excepthook

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            index = self.places.of_storage(storage)
            if index is not None:
                self.meters[index].seen(storage)
            return result

        def failed(failure: threading.ExceptHookArgs) -> None:
            if failure.exc_value is not None:
                self.failures.append(failure.exc_value)

        torch.UntypedStorage.resize_ = resized  # type: ignore[assignment, method-assign]
        threading.excepthook = failed
        self._instruments.labelled = self
        self._instruments.place = _here
        _worlds.append(self)
        finder.start()
        try:
            with in_every_thread(lambda: DevicesMode(self)), DevicesMode(self):
                yield
        finally:
            finder.stop()
            _worlds.remove(self)
            threading.excepthook = hook
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def label(self, kind: str, tensors: Iterable[torch.Tensor], override: bool = True) -> None:
        """As `MemoryMeter.label`, for tensors on any device; those on the host are nobody's."""
        for tensor in tensors:
            index = self.places.of(tensor)
            if index is not None:
                self.meters[index].label(kind, [tensor], override)

    def memory(self) -> list[RankMemory]:
        reports = [meter.report() for meter in self.meters]
        if self.places.device == "cuda":
            peaks = [torch.cuda.max_memory_allocated(index) for index in range(len(reports))]
            reports = [dataclasses.replace(one, cuda_peak=peak) for one, peak in zip(reports, peaks, strict=True)]
        return reports

    def operate(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs one operation of torch, if its tensors may meet, and writes down where its results live."""
        self.progressed()
        groups = together(func, args, kwargs)
        meeting = self.places.before(func, groups)
        result = func(*args, **kwargs)
        self.places.after(meeting, result)
        for tensor in tensors_in((result,)):
            index = self.places.of(tensor)
            if index is not None:
                self.meters[index].saw((tensor,))
        if func in COPIES:
            self._copied(groups)
        elif func is _ATEN._to_copy.default and self.places.device == "cuda":
            self._copied([[result, *group] for group in groups])
        elif _accumulating_gradient():  # into a leaf's `.grad`: what comes of it is a gradient
            self.label("gradients", tensors_in((result,)), override=False)
        return result

    def _copied(self, groups: list[list[torch.Tensor]]) -> None:
        """Counts what a plain copy took to another device."""
        for target, source, *_ in groups:
            here, there = self.places.of(source), self.places.of(target)
            if here is not None and here != there:
                self.count(source, here, there)

    def count(self, tensor: torch.Tensor, source: int, target: int | None, what: str = "") -> None:
        """Writes down a transfer of a tensor's elements between devices. target None: to the host."""
        nbytes = tensor.numel() * tensor.element_size()
        what = what or self.meters[source].kind_of(tensor) or "other"
        where, moment = caller(), self.now()
        with self._lock:
            for rank, op, peer, sent in ((source, "send", target, nbytes), (target, "recv", source, 0)):
                if rank is None:
                    continue
                calls = self.calls[rank]
                dtype = str(tensor.dtype).removeprefix("torch.")
                call = Call(rank, len(calls), op, peer, tensor.numel(), dtype, sent, nbytes - sent, moment, moment)
                call.where, call.what = where, what
                calls.append(call)


class DevicesMode(TorchDispatchMode):
    """One per thread. Backward runs under the mode of the thread that called it."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a tensor that wraps others: it comes again as operations on these
        return self.world.operate(func, args, kwargs or {})


def make_places(count: int, device: str) -> Places:
    return GpuPlaces(count) if device == "cuda" else LogicalPlaces(count)


_worlds: list[World] = []  # of this process: none outside launch_devices, else one


def current_world() -> World | None:
    return _worlds[0] if _worlds else None


def _here() -> int:
    device = entered_device()
    return 0 if device is None or device.index is None else device.index


def _accumulating_gradient() -> bool:
    node = torch._C._current_autograd_node()
    return node is not None and node.name().endswith("AccumulateGrad")
