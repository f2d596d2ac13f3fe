"""Labs 06 to 08, inside a rank: live bytes at certain moments, and their peak in between."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from ..meters import memory_so_far


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

    @property
    def others(self) -> int:
        return self.live - self.weights - self.gradients


class MemoryWatch:
    """on: False looks at nothing."""

    def __init__(self, on: bool) -> None:
        self.on = on
        self.seen: list[Held] = []
        self._base, self._since = 0, 0.0

    def begin(self) -> None:
        if self.on:
            gc.collect()
            now = memory_so_far().at_end
            self._base, self._since = int(now.live), now.time

    def look(self, moment: str, model: nn.Module) -> None:
        if not self.on:
            return
        torch.zeros(1).add_(
            1
        )  # any operation: who watches calls that are on their way lets go of those that are through
        gc.collect()
        record = memory_so_far()
        live = [int(sample.live) - self._base for sample in record.samples if sample.time >= self._since]
        self._since = record.at_end.time
        now = int(record.at_end.live) - self._base
        parameters = list(model.parameters())
        weights = _nbytes(each.data for each in parameters)
        gradients = _nbytes(each.grad for each in parameters if each.grad is not None)
        self.seen.append(Held(moment, now, max(live, default=now), weights, gradients))


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of the storages, each once."""
    storages = {one._cdata: one.nbytes() for one in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())
