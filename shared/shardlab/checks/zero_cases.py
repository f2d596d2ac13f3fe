"""Labs 06 to 08: what an engine is put through, as plain data; `zero_play.py` does it inside each rank."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from .notes import Prepared

DEFAULTS = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "max_norm": None,
    "scale": 2.0**16,
    "growth_interval": 2000,
}
INF, NAN = math.inf, math.nan


@dataclass(frozen=True)
class Bad:
    """A gradient element (of the model "terms") that is no number. ranks: those that get it; None: all."""

    element: int
    value: float
    ranks: tuple[int, ...] | None = None

    def __str__(self) -> str:
        on = "" if self.ranks is None else f" on rank {' and '.join(map(str, self.ranks))} only"
        return f"a gradient element is {self.value:g}{on}"


@dataclass(frozen=True)
class Micro:
    """One backward. choices: rank r's is choices[r % len]. forwards: so many losses are added up first.

    peeks: the model is evaluated under no_grad between forward and backward.
    """

    choices: tuple[str, ...] = ("both",)
    forwards: int = 1
    bad: tuple[Bad, ...] = ()
    peeks: bool = False

    def choice(self, rank: int) -> str:
        return self.choices[rank % len(self.choices)]


@dataclass(frozen=True)
class Step:
    """Backwards, then step(). rates: group i's "lr" is set to rates[i] before. clear: zero_grad() is called first."""

    micros: tuple[Micro, ...] = (Micro(),)
    rates: tuple[float, ...] = ()
    clear: bool = True

    @property
    def bad(self) -> tuple[Bad, ...]:
        return tuple(bad for micro in self.micros for bad in micro.bad)


@dataclass(frozen=True)
class ZeroCase:
    """options: what the constructor gets. groups: of the i-th parameter, groups[i % len]; empty: no groups are given.

    measured: live bytes are looked at. plugged: the order of events is looked at. With either it gets a communicator of
    the check's own. watched: it is looked for tensors that are used too early. steady: the same batch in every step.
    peeked: the model is evaluated after each step. accepts: names of variations (zero_mirror.py) that are right here,
    too. rest: (a, b) where a + b / N bytes should be held at rest.
    """

    about: str
    kind: str = "layers"
    dtype: str = "float32"
    steps: tuple[Step, ...] = (Step(), Step())
    options: dict[str, Any] = field(default_factory=dict)
    groups: tuple[dict[str, Any], ...] = ()
    bucket_bytes: int | None = 4 * 130
    measured: bool = False
    plugged: bool = False
    watched: bool = False
    steady: bool = False
    peeked: bool = False
    accepts: tuple[str, ...] = ()
    rest: tuple[float, float] = (0.0, 0.0)

    @property
    def name(self) -> str:
        return self.about

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def option(self, name: str, group: int | None = None) -> Any:
        options = {**DEFAULTS, **self.options, **(self.groups[group] if group is not None and self.groups else {})}
        return options[name]

    def prepare(self, rank: int, world_size: int) -> Prepared:
        return Prepared((self, rank, world_size), lambda played: played, lambda: None)


# A large eps and a rate of about 1: a wrong factor in a gradient shows in every weight.
PLAIN: dict[str, Any] = {"lr": 0.5, "betas": (0.75, 0.875), "eps": 1.0, "scale": 2.0**10}
DECAYING: dict[str, Any] = {**PLAIN, "weight_decay": 0.25}
