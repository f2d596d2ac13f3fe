"""Lab 03: the small models on which averaging and broadcasting are tried, different on every rank and known to all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

STEP = 60  # divisible by every N up to 5: means of its multiples are whole numbers
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@dataclass(frozen=True)
class Spec:
    """One parameter. tied: registered a second time under the name `again`. layout: "" or "transposed"."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = F32
    frozen: bool = False
    tied: bool = False
    layout: str = ""


def _many() -> tuple[Spec, ...]:
    """All sizes are multiples of 60, larger than any count of parameters here, and no two are equal."""
    plain = [Spec(f"layers.{k}.weight", (12 + 3 * k, 20)) for k in range(8)]
    return (*plain[:4], Spec("frozen", (1200,), frozen=True), *plain[4:], Spec("embedding", (60, 20), tied=True))


KINDS: dict[str, tuple[Spec, ...]] = {
    "two": (Spec("weight", (3, 2)), Spec("bias", (5,))),
    "equal": (Spec("first", (6,)), Spec("second", (6,)), Spec("third", (6,))),
    "sizes": (Spec("first", (4,)), Spec("second", (7,)), Spec("inner.third", (2, 3))),
    "many": _many(),
    "shapes": (
        Spec("scalar", ()),
        Spec("empty", (0,)),
        Spec("inner.cube", (2, 3, 2)),
        Spec("inner.deep.one", (1,)),
        Spec("transposed", (4, 3), layout="transposed"),
    ),
    "dtypes": (
        Spec("of_single", (64,)),
        Spec("of_half", (72,), F16),
        Spec("of_double", (80,), F64),
        Spec("of_brain", (88,), BF16),
        Spec("more_double", (96,), F64),
        Spec("more_single", (100,)),
    ),
    "frozen": (Spec("first", (4,)), Spec("frozen", (6,), frozen=True), Spec("last", (3,))),
    "half": (Spec("first", (5,), F16), Spec("second", (3,), F16)),
    "none": (),
}


class Inner(nn.Module):
    """Holds what its names say."""


def build(kind: str, rank: int) -> nn.Module:
    """The model of a kind with this rank's values. Objects are made in an order of the rank's own.

    So whatever depends on where objects lie in memory, such as the order of a set, differs between ranks.
    """
    specs = KINDS[kind]
    turn = rank % max(1, len(specs))
    made: dict[str, nn.Parameter] = {}
    for spec in (*specs[turn:], *specs[:turn])[:: -1 if rank % 2 else 1]:
        made[spec.name] = nn.Parameter(value(spec, rank), requires_grad=not spec.frozen)
    module = Inner()
    for spec in specs:
        _register(module, spec.name, made[spec.name])
        if spec.tied:
            _register(module, f"head.{spec.name}", made[spec.name])
    return module


def _register(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    *path, last = name.split(".")
    for part in path:
        if not hasattr(module, part):
            module.add_module(part, Inner())
        module = getattr(module, part)
    module.register_parameter(last, parameter)


def _laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    return values.t().contiguous().t() if layout == "transposed" else values


def value(spec: Spec, rank: int) -> torch.Tensor:
    """The parameter's value on a rank, in its dtype."""
    whole = integers(spec, rank, salt=5) / 8
    fine = whole * 2**-36 if spec.dtype is F64 else 0.0  # digits that float32 lacks
    return _laid_out((whole + fine).to(spec.dtype), spec.layout)


@cache  # nobody writes to it
def integers(spec: Spec, rank: int, salt: int) -> torch.Tensor:
    """Whole numbers from -8 to 8 without zero, float64: the same for the same arguments in every process."""
    seed = 7919 * rank + 101 * salt + sum(map(ord, spec.name))
    generator = torch.Generator().manual_seed(seed)
    size = torch.randint(1, 9, spec.shape, generator=generator)
    sign = 2 * torch.randint(0, 2, spec.shape, generator=generator) - 1
    return (size * sign).double()


# Gradients. Each gives rank r's gradient in float64; casting it to the parameter's dtype is exact.
def exact(spec: Spec, rank: int, salt: int) -> torch.Tensor:
    """Multiples of 60: whatever is divided when, the mean is exact. float64 ones have digits that float32 lacks."""
    whole = integers(spec, rank, salt) * STEP
    return whole + whole * 2**-36 if spec.dtype is F64 else whole


def normal(spec: Spec, rank: int, salt: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(31 * rank + 7 * salt + sum(map(ord, spec.name)))
    return torch.randn(spec.shape, generator=generator, dtype=F64).to(spec.dtype).double()


def large(spec: Spec, rank: int, salt: int) -> torch.Tensor:
    """About 40,000: two of them are more than float16 can hold (65,504)."""
    return 40_000 + 32 * integers(spec, rank, salt)


GRADIENTS: dict[str, Callable[[Spec, int, int], torch.Tensor]] = {"exact": exact, "normal": normal, "large": large}


def gradient(spec: Spec, values: torch.Tensor) -> torch.Tensor:
    return _laid_out(values.to(spec.dtype), spec.layout).clone()
