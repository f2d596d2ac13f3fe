"""How close is close enough, and the words for places and numbers: helpers of the judge of lab 01's engines."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..records import Call, Where
from ..runtime.places import source
from .observe import line_at

TOLERANCE = 4e-6  # of a weight of size 1: float32 arithmetic of a dozen steps


def definition(where: Where | None) -> str:
    """ "cell In[5], line 3: def step(self):", without the decorators above it."""
    while where is not None and source(where.filename, where.line).startswith("@"):
        where = Where(where.filename, where.line + 1, where.function)
    return line_at(where)


def excess(weight: torch.Tensor, right: torch.Tensor) -> float:
    """By how much the worst element is off beyond what rounding explains; 0 or less is right, NaN is infinite."""
    room = TOLERANCE * (1 + right.abs())
    if weight.dtype != torch.float32:
        spacing = torch.finfo(weight.dtype).eps * 2.0 ** right.abs().clamp_min(2.0**-14).log2().floor()
        room = room + 0.5 * spacing
    off = (weight.double() - right).abs() - room
    return math.inf if off.isnan().any() else float(off.max()) if off.numel() else 0.0


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one.double(), other.double(), rtol=2e-3, atol=0, equal_nan=True)


def worst(one: torch.Tensor, other: torch.Tensor) -> int:
    off = (one.double() - other.double()).abs().nan_to_num(math.inf, math.inf)
    return int(off.view(-1).argmax())


def shown(tensor: torch.Tensor, place: int) -> str:
    return f"{float(tensor.reshape(-1)[place]):.6g}"


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def ops(calls: Sequence[Call]) -> str:
    return " and ".join(sorted({call.op for call in calls})[:3])
