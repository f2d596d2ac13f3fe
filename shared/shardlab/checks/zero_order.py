"""Labs 06 to 08, inside a rank: a communicator of the check's own, and the order in which events come."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..communicator import Library
from ..records import Call

PAUSE = 0.003  # seconds after each layer's event, in which a thread that does the reductions gets its turn
REDUCING = ("reduce_scatter", "reduce", "all_reduce")


@dataclass(frozen=True)
class Happened:
    """kind: "ready" (the gradient of a layer's output has been computed), "issued" or "waits" (of operation `number`).

    here: in the thread that runs backward.
    """

    kind: str
    number: int
    op: str = ""
    numel: int = 0
    here: bool = True


class Log(Library):
    """Library, and notes of what goes through it."""

    def __init__(self) -> None:
        self.happened: list[Happened] = []
        self.around: list[Call] = []  # calls that others made, in a step
        self.own = threading.local()  # .calls: whether this thread is about to make one of these
        self.waiting: dict[int, str] = {}  # operations that nobody has waited for, by number
        self.freed: list[str] = []  # those whose tensor's memory was gone when it came to that
        self.elements = 0
        self.open = True  # until step() begins: reductions are looked for before
        self.count = 0
        self.thread = threading.get_ident()

    def clear(self) -> None:
        self.happened, self.around, self.elements, self.open = [], [], 0, True

    def called(self, call: Call) -> None:
        if not getattr(self.own, "calls", False):
            self.around.append(call)

    def note(self, kind: str, number: int, op: str = "", numel: int = 0) -> None:
        if self.open:
            here = threading.get_ident() == self.thread
            self.happened.append(Happened(kind, number, op, numel, here))

    def watch(self, model: nn.Module) -> None:
        """Before the engine sees the model, so that a layer is noted before anything is done about it."""
        layers = [each for each in model.modules() if not list(each.children())]
        for number, layer in enumerate(layers):
            layer.register_forward_hook(lambda module, args, output, number=number: self._watch(number, output))  # type: ignore[misc]

    def _watch(self, number: int, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: self._ready(number))

    def _ready(self, number: int) -> None:
        self.note("ready", number)
        time.sleep(PAUSE)

    def reduce_scatter(self, flat: torch.Tensor) -> Any:
        return self._issued("reduce_scatter", flat, super().reduce_scatter, flat)

    def all_gather(self, flat: torch.Tensor) -> Any:
        return self._issued("all_gather", flat, super().all_gather, flat)

    def all_reduce(self, flat: torch.Tensor) -> Any:
        return self._issued("all_reduce", flat, super().all_reduce, flat)

    def reduce(self, flat: torch.Tensor, owner: int) -> Any:
        return self._issued("reduce", flat, super().reduce, flat, owner)

    def broadcast(self, flat: torch.Tensor, owner: int) -> Any:
        return self._issued("broadcast", flat, super().broadcast, flat, owner)

    def _issued(self, op: str, flat: torch.Tensor, start: Any, *arguments: Any) -> _Handle:
        number = self.count
        self.count += 1
        self.elements += flat.numel()
        self.note("issued", number, op, flat.numel())
        self.waiting[number] = op
        self.own.calls = True
        try:
            return _Handle(self, number, flat, start(*arguments))
        finally:
            self.own.calls = False


class _Handle:
    """All that the contract says of a handle: it has wait(). While it is kept it keeps the tensor, as others do."""

    def __init__(self, log: Log, number: int, flat: torch.Tensor, work: Any) -> None:
        self._log, self._number, self._flat, self._work = log, number, flat, work

    def wait(self) -> None:
        self._log.note("waits", self._number)
        op = self._log.waiting.pop(self._number, "")
        if op and self._flat.untyped_storage().nbytes() < self._flat.nbytes:
            self._log.freed.append(op)
        if self._work is not None:
            self._work.wait()
        self._work = None  # gloo's handle keeps a copy of the data, which is no affair of the engine's


def overlapping(happened: list[Happened]) -> int:
    """Reductions after whose issue another layer's backward began before the backward's thread waited for them."""
    count = 0
    for place, one in enumerate(happened):
        if one.kind != "issued" or one.op not in REDUCING or one.numel < 2:
            continue
        for later in happened[place + 1 :]:
            if later.kind == "ready":
                count += 1
                break
            if later.kind == "waits" and later.number == one.number and later.here:
                break
    return count
