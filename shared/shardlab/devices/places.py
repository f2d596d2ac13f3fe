"""Where tensors live. On logical devices this is written down per storage; on GPUs torch knows it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .device import Device, LogicalDevice, entered_device

_ATEN = torch.ops.aten
_MADE_ELSEWHERE = {_ATEN.lift_fresh.default, _ATEN.lift.default}  # `torch.tensor(...)` ends with it
_BY_INDEX = {
    _ATEN.index.Tensor,
    _ATEN.index_put.default,
    _ATEN.index_put_.default,
    _ATEN._index_put_impl_.default,
}  # these take indices from the host
COPIES = {_ATEN.copy_.default, _ATEN._foreach_copy_.default}  # these alone go from device to device


@dataclass(frozen=True, slots=True)
class Meeting:
    """The tensors of an operation, seen before it runs. homes: where its results live, by position for `_foreach_`.

    known: the addresses of storages that were there before and stay where they are.
    """

    homes: list[int | None]
    known: frozenset[int]


class Places(Protocol):
    """The number of the device that holds a tensor's or a storage's memory; None is the host."""

    device: str  # "cpu" or "cuda"

    def devices(self) -> list[Device]: ...
    def of(self, tensor: torch.Tensor) -> int | None: ...
    def of_storage(self, storage: torch.UntypedStorage) -> int | None: ...
    def put(self, tensor: torch.Tensor, index: int) -> None: ...
    def before(self, func: Any, together: Sequence[Sequence[torch.Tensor]]) -> Meeting | None: ...
    def after(self, meeting: Meeting | None, result: Any) -> None: ...


class GpuPlaces:
    """GPUs 0 to count-1. Torch itself keeps tensors apart."""

    device = "cuda"

    def __init__(self, count: int) -> None:
        self.count = count

    def devices(self) -> list[Device]:
        return [torch.device("cuda", index) for index in range(self.count)]

    def of(self, tensor: torch.Tensor) -> int | None:
        return tensor.device.index if tensor.is_cuda else None

    def of_storage(self, storage: torch.UntypedStorage) -> int | None:
        return storage.device.index if storage.device.type == "cuda" else None

    def put(self, tensor: torch.Tensor, index: int) -> None:
        """Nothing to write down."""

    def before(self, func: Any, together: Sequence[Sequence[torch.Tensor]]) -> None:
        return None

    def after(self, meeting: Meeting | None, result: Any) -> None:
        """Nothing to write down."""


class LogicalPlaces:
    """Logical devices 0 to count-1 of this process."""

    device = "cpu"

    def __init__(self, count: int) -> None:
        self.count = count
        self._where: dict[int, tuple[int, Any]] = {}  # by the storage's address: device, and what tells of its end
        self._thread = threading.local()  # .latest: the device of this thread's last operation

    def devices(self) -> list[Device]:
        return [LogicalDevice(index) for index in range(self.count)]

    def of(self, tensor: torch.Tensor) -> int | None:
        return self.of_storage(tensor.untyped_storage()) if tensor.layout is torch.strided else None

    def of_storage(self, storage: torch.UntypedStorage) -> int | None:
        known = self._where.get(storage._cdata)
        return known[0] if known is not None else None

    def put(self, tensor: torch.Tensor, index: int) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        self._where[address] = (index, weakref.ref(storage, lambda _: self._where.pop(address, None)))

    def before(self, func: Any, together: Sequence[Sequence[torch.Tensor]]) -> Meeting | None:
        """Where each group of tensors meets. RuntimeError, in torch's words, when they are on several devices."""
        homes = [self._home(func, tensors) for tensors in together]
        if not any(home is not None for home in homes):
            return None
        given = () if func in _MADE_ELSEWHERE else (tensor for group in together for tensor in group)
        return Meeting(homes, frozenset(tensor.untyped_storage()._cdata for tensor in given))

    def _home(self, func: Any, tensors: Sequence[torch.Tensor]) -> int | None:
        if not tensors or (func in _MADE_ELSEWHERE and self.of(tensors[0]) is None):
            return self._new()
        homes = [self.of(tensor) for tensor in tensors]
        first = homes[0]
        if len(homes) > 1 and any(home != first for home in homes):
            if func in COPIES:
                return first
            homes = [
                home
                for home, tensor in zip(homes, tensors, strict=True)
                if home is not None or not (tensor.dim() == 0 or func in _BY_INDEX)
            ]
            first = homes[0]
            other = next((home for home in homes if home != first), first)
            if other != first:
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, "
                    f"{_name(first)} and {_name(other)}! (in {func._schema.name.replace('aten::', 'torch.')})"
                )
        self._thread.latest = first
        return first

    def _new(self) -> int | None:
        """Where a tensor that is made from nothing lands."""
        device = entered_device()
        if device is not None:
            return device.index
        if torch._C._current_autograd_node() is not None:  # zeros that backward needs: as the gradients around it
            return getattr(self._thread, "latest", None)
        return None

    def after(self, meeting: Meeting | None, result: Any) -> None:
        """Writes down where the results live that have a storage of their own."""
        if meeting is None:
            return
        homes = meeting.homes
        for number, tensor in enumerate(tensors_in((result,))):
            home = homes[number] if len(homes) > 1 and number < len(homes) else homes[0]
            address = tensor.untyped_storage()._cdata
            if home is not None and address not in self._where and address not in meeting.known:
                self.put(tensor, home)


def _name(index: int | None) -> str:
    return "cpu" if index is None else f"device {index}"


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among some values, and in lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided:
                yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def together(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[list[torch.Tensor]]:
    """The tensors that an operation brings together: all of them, or for a `_foreach_` one those of each position."""
    loose = list(tensors_in(kwargs.values())) if kwargs else []
    if not func._schema.name.startswith(("aten::_foreach_", "aten::_fused_")):
        return [[*tensors_in(args), *loose]]
    lists = [value for value in args if isinstance(value, (list, tuple)) and value]
    lists = [value for value in lists if isinstance(value[0], torch.Tensor)]
    loose += [value for value in args if isinstance(value, torch.Tensor)]
    return [
        [*(one[place] for one in lists if place < len(one)), *loose] for place in range(max(map(len, lists), default=0))
    ]
