"""What an engine of lab 01 is put through: which gradients come in which step, and what is done with them.

Plain data that crosses processes. Weights and gradients are small multiples of powers of two, so that scaling them is
exact in every dtype, and they are drawn anew from the numbers of script, step, parameter and rank wherever needed.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

SHAPES = ((3, 4), (5,), (), (2, 3))
DEFAULTS = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "scale": 2.0**16,
    "growth_interval": 2000,
}


@dataclass(frozen=True)
class Bad:
    """A gradient element that is no number, or too large for fp16. ranks: those that get it; None: all."""

    parameter: int
    element: int
    value: float
    ranks: tuple[int, ...] | None = None

    def __str__(self) -> str:
        value = "too large for fp16" if abs(self.value) < float("inf") else f"{self.value:g}"
        on = "" if self.ranks is None else f" on rank {' and '.join(map(str, self.ranks))} only"
        return f"a gradient {value} in parameter {self.parameter}, element {self.element}{on}"


@dataclass(frozen=True)
class Step:
    """One backward and one step. power: gradients are multiplied by 2**power.

    none: parameters without a gradient, on the ranks none_on (None: all). backwards: how often backward is called
    before the step. between: what is done to `.grad` after backward, "halved in place" or "replaced by half of it".
    """

    bad: tuple[Bad, ...] = ()
    none: tuple[int, ...] = ()
    none_on: tuple[int, ...] | None = None
    power: int = 0
    backwards: int = 1
    between: str = ""
    data: int | None = None  # the number its gradients are drawn from; None: its place in the script


GOOD = Step()


@dataclass(frozen=True)
class Script:
    """An engine's life. options: what the constructor gets. weight, gradient: every element's, instead of drawn ones.

    every: the weights are looked at after each `every`-th step, and after the last. accepts: names of variations (see
    states_reference.py) that are right here too.
    """

    steps: tuple[Step, ...]
    dtypes: tuple[str, ...] = ("float32",)  # of the parameters in turn
    options: dict[str, Any] = field(default_factory=dict)
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    weight: float | None = None
    gradient: float | None = None
    every: int = 1
    generator: bool = False  # the parameters are handed over as a generator
    accepts: tuple[str, ...] = ()

    def option(self, name: str) -> Any:
        return self.options.get(name, DEFAULTS[name])

    def dtype(self, parameter: int) -> torch.dtype:
        return getattr(torch, self.dtypes[parameter % len(self.dtypes)])

    def weights(self, rank: int) -> list[torch.Tensor]:
        """The parameters' first values, float64: multiples of 1/64 between -2 and 2."""
        return [
            torch.full(shape, self.weight, dtype=torch.float64)
            if self.weight is not None
            else _drawn(shape, 64, 128, ("weight", parameter, rank))
            for parameter, shape in enumerate(self.shapes)
        ]

    def gradients(self, number: int, rank: int) -> list[torch.Tensor | None]:
        """The true gradients of one step, float64, before any scaling: multiples of 1/8, up to 2 in size."""
        step = self.steps[number]
        data = number if step.data is None else step.data
        drawn: list[torch.Tensor | None] = []
        for parameter, shape in enumerate(self.shapes):
            if parameter in step.none and (step.none_on is None or rank in step.none_on):
                drawn.append(None)
                continue
            if self.gradient is not None:
                one = torch.full(shape, self.gradient, dtype=torch.float64)
            else:
                one = _drawn(shape, 8, 16, ("gradient", data, parameter, rank)) * 2.0**step.power
            for bad in step.bad:
                if bad.parameter == parameter and (bad.ranks is None or rank in bad.ranks):
                    one.view(-1)[bad.element] = bad.value
            drawn.append(one)
        return drawn


@cache
def _drawn(shape: tuple[int, ...], parts: int, most: int, key: tuple) -> torch.Tensor:
    """Multiples of 1/parts, none of them 0, up to most/parts in size. The same tensor each time: not to be changed."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    size = torch.randint(1, most + 1, shape, generator=generator)
    sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return (size * sign).double() / parts


@dataclass(frozen=True)
class EngineCase:
    """One or more engines, step by step in turn. name: what a learner reads.

    same_end: both engines' last weights must agree bit for bit. group: False hides torch.distributed's process group.
    memory: also measure live bytes.
    """

    name: str
    scripts: tuple[Script, ...]
    same_end: bool = False
    group: bool = True
    memory: bool = False

    def prepare(self, rank: int, world_size: int) -> Any:
        from .states_play import prepared

        return prepared(self, rank)
