"""Labs 06 to 08: the models on which engines are tried: those of lab 05, and two of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn

from . import overlap_models
from .overlap_models import WIDTH
from .zero_cases import ZeroCase

# Of sums of terms: 51 elements, which neither 2 nor 4 nor 5 divides; and fewer elements than there are ranks.
SHAPES = {"terms": ((5, 3), (7,), (1,), (4, 4), (2, 3, 2)), "two": ((3,), (5,)), "few": ((1,), (2,))}
LAYERS, SIDE = 16, 64  # of chains


class Term(nn.Module):
    """Adds the product of its weights with coefficients, which thereby are its gradient."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, total: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
        return total + (self.weight.reshape(-1).float() * coefficients).sum()


class Terms(nn.Module):
    """A sum of terms: the gradient of every element is chosen by the input, inf and NaN included."""

    def __init__(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        self.terms = nn.ModuleList(Term(shape) for shape in shapes)
        self.sizes = [torch.Size(shape).numel() for shape in shapes]

    def forward(self, x: torch.Tensor, choice: str = "") -> torch.Tensor:
        total = x.new_zeros(())
        for term, part in zip(self.terms, x.split(self.sizes), strict=True):
            total = term(total, part)
        return total


class Chain(nn.Module):
    """Layers whose weights dwarf what passes through them. All are alike. frozen: every second one is not trained."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(SIDE, SIDE).requires_grad_(not (frozen and place % 2)) for place in range(LAYERS)
        )

    def forward(self, x: torch.Tensor, choice: str = "") -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


KINDS: dict[str, Callable[[], nn.Module]] = {
    **overlap_models.KINDS,
    **{kind: lambda shapes=shapes: Terms(shapes) for kind, shapes in SHAPES.items()},  # type: ignore[misc]
    "layers": lambda: overlap_models.Layers(3),
    "all frozen": lambda: overlap_models.Layers(2).requires_grad_(False),
    "chain": Chain,
    "frozen chain": lambda: Chain(frozen=True),
}
CHAINS = ("chain", "frozen chain")


def build(kind: str, dtype: torch.dtype, rank: int) -> nn.Module:
    """The model of a kind with this rank's weights. The global random state is left as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(17 * rank + sum(map(ord, kind)))
        return KINDS[kind]().to(dtype)


@lru_cache(maxsize=256)
def initial(kind: str, dtype: torch.dtype, rank: int) -> dict[str, torch.Tensor]:
    """Parameters and buffers of `build`, by name, the tied ones under each name. Not to be changed."""
    return build(kind, dtype, rank).state_dict()


@lru_cache(maxsize=64)
def parameters_of(kind: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Rank 0's parameters at the beginning, by name, each once. Not to be changed."""
    return dict(build(kind, dtype, 0).named_parameters())


@dataclass(frozen=True)
class Sizes:
    """Of a chain. psi: elements that are trained; frozen: those that are not. largest: of one parameter; unit: of one
    layer. count: parameters. activations: bytes, at most.
    """

    psi: int
    frozen: int
    largest: int
    unit: int
    count: int
    activations: int

    @classmethod
    def of(cls, case: ZeroCase) -> Sizes:
        parameters = list(parameters_of(case.kind, case.torch_dtype).values())
        sizes = [each.numel() for each in parameters]
        psi = sum(each.numel() for each in parameters if each.requires_grad)
        # Every layer's input and output, forward and backward, in 2 bytes; and float32 of the loss.
        activations = 4 * 2 * LAYERS * SIDE + 64 * SIDE
        return cls(psi, sum(sizes) - psi, max(sizes), sum(sizes) // LAYERS, len(sizes), activations)

    @property
    def all(self) -> int:
        return self.psi + self.frozen


def inputs(kind: str, dtype: torch.dtype, rank: int, step: int, place: int) -> torch.Tensor:
    """A rank's part of the batch; of terms, one float32 coefficient per element, a multiple of 1/8 up to 2."""
    generator = torch.Generator().manual_seed(1009 * step + 101 * place + rank)
    if kind in SHAPES:
        count = sum(torch.Size(shape).numel() for shape in SHAPES[kind])
        return torch.randint(-16, 17, (count,), generator=generator) / 8
    samples, width = (1, SIDE) if kind in CHAINS else (5, WIDTH)
    return torch.randn(samples, width, generator=generator).to(dtype)


def loss_of(kind: str, output: torch.Tensor) -> torch.Tensor:
    """float32. Such that gradients are of size 1, roughly."""
    if kind in SHAPES:
        return output
    return 8 * (output.float() - 0.3).square().mean()
