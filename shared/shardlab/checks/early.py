"""Inside a rank: sees a message's buffer used before the message is through, and in which line.

This explains values that depend on luck; it does not judge. A debugging print of a buffer harms nobody, and a rank
may know from a later message that an earlier send is through.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..meters import caller
from ..records import Call, Where

_SHAPE_ONLY = ("_like", "new_empty", "new_zeros", "new_ones", "new_full", "is_same_size", "sym_")

POLLS = 100  # operations in a row; who waits in a loop for a tensor to change makes as many in a second or two

Tell = Callable[[Call, "Where | None", bool], None]


@dataclass(frozen=True)
class Early:
    """call: a send whose buffer was written, or another call whose buffer was read (or `written`), before wait()."""

    case: int
    call: Call
    where: Where | None
    written: bool = False


class EarlyUse(TorchDispatchMode):
    """Calls `tell(call, where, written)` once for every message whose buffer is used too early.

    Calls `endless(False)` when there have been more than `most` operations. Calls `endless(True)` when there have been
    more than POLLS of them, and for more than `patience` seconds, with neither a call nor a wait in between.
    """

    def __init__(self, tell: Tell, most: int, patience: float, endless: Callable[[bool], None]) -> None:
        super().__init__()
        self._tell, self._left, self._patience, self._endless = tell, most, patience, endless
        self.communicated()
        self._open: list[tuple[Call, torch.Tensor]] = []

    def communicated(self) -> None:
        """The rank was in a call, or waited. How long that took is no fault of its own: the clock starts afterwards."""
        self._since: float | None = None
        self._count = 0

    def issued(self, call: Call, tensor: torch.Tensor | None) -> None:
        """To be told of every call, before it is issued."""
        self.communicated()
        if tensor is None or not tensor.numel():
            return
        if call.point_to_point:
            self._used(tensor, written=call.op == "recv")
        self._open.append((call, tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self._left -= 1
        if self._left < 0:
            self._endless(False)
        now = time.monotonic()
        self._since, self._count = self._since or now, self._count + 1
        if self._count > POLLS and now - self._since > self._patience:
            self._endless(True)
        if self._open and func.namespace == "aten" and not any(part in func.__name__ for part in _SHAPE_ONLY):
            for tensor, written in _uses(func, args, kwargs or {}):
                self._used(tensor, written)
        return func(*args, **(kwargs or {}))

    def _used(self, tensor: torch.Tensor, written: bool) -> None:
        self._open = [(call, buffer) for call, buffer in self._open if call.completed is None]
        for call, buffer in list(self._open):
            if (call.op != "send" or written) and _overlap(tensor, buffer):
                self._open = [one for one in self._open if one[0] is not call]
                self._tell(call, caller(), written)


def _uses(func: Any, args: tuple, kwargs: dict) -> Iterator[tuple[torch.Tensor, bool]]:
    """The tensors that an operation reads (False) or writes (True); a view of one does neither."""
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        alias = argument.alias_info
        if alias is not None and not alias.is_write:
            continue
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(one, torch.Tensor):
                yield one, alias is not None


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    (first, last), (begin, end) = _extent(one), _extent(other)
    return first < end and begin < last


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses from its first byte to behind its last."""
    if not tensor.numel():
        return (0, 0)
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()
