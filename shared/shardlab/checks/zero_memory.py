"""Labs 06 to 08, inside a rank: live bytes at certain moments, and their peak in between."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from ..meters import memory_so_far

LOOKS, PAUSE = 12, 0.004  # times, seconds


@dataclass(frozen=True)
class Held:
    """moment: what has just ended. live: bytes now; peak: the most since the moment before. Both without what there was
    before the model was made. weights, gradients: of live, what the parameters and their `.grad` stand for.
    """

    moment: str
    live: int
    peak: int
    weights: int
    gradients: int
    dangling: str = ""  # a parameter that stands for memory that is not there

    @property
    def others(self) -> int:
        return self.live - self.weights - self.gradients


class MemoryWatch:
    """on: False looks at nothing. rest: bytes that should be there at rest; more is looked at more than once."""

    def __init__(self, on: bool, rest: float = 0.0) -> None:
        self.on, self.rest = on, rest
        self.seen: list[Held] = []
        self._base, self._since = 0, 0.0

    def begin(self) -> None:
        if self.on:
            gc.collect()
            gc.freeze()  # what there is already, torch and all, is not gone through again at each look
            now = memory_so_far().at_end
            self._base, self._since = int(now.live), now.time

    def look(self, moment: str, model: nn.Module) -> None:
        if not self.on:
            return
        for _ in range(LOOKS):
            torch.ones(1).add_(1)  # any operation: whoever watches calls lets go of those that are through
            gc.collect()
            record = memory_so_far()
            if record.at_end.live - self._base <= self.rest or moment == "forward":
                break
            time.sleep(PAUSE)  # gloo's threads let go of what they sent when they get to it
        live = [int(sample.live) - self._base for sample in record.samples if sample.time >= self._since]
        self._since = record.at_end.time
        now = int(record.at_end.live) - self._base
        dangling = next((name for name, each in model.named_parameters() if not readable(each)), "")
        parameters = list(model.parameters())
        weights = _nbytes(each.data for each in parameters)
        gradients = _nbytes(each.grad for each in parameters if each.grad is not None)
        self.seen.append(Held(moment, now, max(live, default=now), weights, gradients, dangling))


def readable(tensor: torch.Tensor) -> bool:
    """Whether the memory that the tensor stands for is there: reading what is not ends the process."""
    return tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of the storages, each once."""
    storages = {one._cdata: one.nbytes() for one in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())
