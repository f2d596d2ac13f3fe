"""Labs 06 to 08: the models on which engines are tried: those of lab 05, and two of their own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from . import overlap_models
from .overlap_models import WIDTH

SHAPES = ((5, 3), (7,), (1,), (4, 4), (2, 3, 2))  # of "terms": 51 elements, which neither 2 nor 4 nor 5 divides
LAYERS, SIDE = 16, 64  # of "chain"


class Term(nn.Module):
    """Adds the product of its weights with coefficients, which thereby are its gradient."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, total: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
        return total + (self.weight.reshape(-1).float() * coefficients).sum()


class Terms(nn.Module):
    """A sum of terms: the gradient of every element is chosen by the input, inf and NaN included."""

    def __init__(self, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> None:
        super().__init__()
        self.terms = nn.ModuleList(Term(shape) for shape in shapes)

    def forward(self, x: torch.Tensor, choice: str = "") -> torch.Tensor:
        total = x.new_zeros(())
        sizes = [torch.Size(shape).numel() for shape in SHAPES]
        for term, part in zip(self.terms, x.split(sizes), strict=True):
            total = term(total, part)
        return total


class Chain(nn.Module):
    """Layers whose weights dwarf what passes through them. All are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIDE, SIDE) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, choice: str = "") -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


KINDS: dict[str, Callable[[], nn.Module]] = {**overlap_models.KINDS, "terms": Terms, "chain": Chain}


def build(kind: str, dtype: torch.dtype, rank: int) -> nn.Module:
    """The model of a kind with this rank's weights. The global random state is left as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(17 * rank + sum(map(ord, kind)))
        return KINDS[kind]().to(dtype)


def inputs(kind: str, dtype: torch.dtype, rank: int, step: int, place: int) -> torch.Tensor:
    """A rank's part of the batch; of "terms", one float32 coefficient per element, a multiple of 1/8 up to 2."""
    generator = torch.Generator().manual_seed(1009 * step + 101 * place + rank)
    if kind == "terms":
        count = sum(torch.Size(shape).numel() for shape in SHAPES)
        return torch.randint(-16, 17, (count,), generator=generator) / 8
    samples, width = (1, SIDE) if kind == "chain" else (5, WIDTH)
    return torch.randn(samples, width, generator=generator).to(dtype)


def loss_of(kind: str, output: torch.Tensor) -> torch.Tensor:
    """float32. Such that gradients are of size 1, roughly."""
    if kind == "terms":
        return output
    return 8 * (output.float() - 0.3).square().mean()
