"""Lab 05: the small models on which a DistributedDataParallel is tried, each with one trait that breaks naive ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 6  # elements of an input


class Layers(nn.Module):
    """Layers one after the other, all of different sizes. backwards: they run in the reverse of their order."""

    def __init__(self, count: int, backwards: bool = False) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH + place, WIDTH + place + 1) for place in range(count)]
        self.layers = nn.ModuleList(reversed(layers) if backwards else layers)
        self.backwards = backwards

    def forward(self, x: torch.Tensor, choice: str = "") -> torch.Tensor:
        for layer in reversed(self.layers) if self.backwards else self.layers:
            x = torch.tanh(layer(x))
        return x


class Stuck(nn.Module):
    """The layer that is defined last runs second: its gradient is the last but one, and the others wait behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=place > 0) for place in range(6))

    def forward(self, x: torch.Tensor, choice: str = "") -> torch.Tensor:
        first, *middle, last = self.layers
        for layer in (first, last, *middle):
            x = torch.tanh(layer(x))
        return x


class Tied(nn.Module):
    """One matrix in two places, and a whole layer that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH, bias=False)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor, choice: str = "") -> torch.Tensor:
        x = torch.tanh(self.middle(self.embedding(x)))
        return self.head(torch.tanh(self.middle(x)))


class Frozen(nn.Module):
    """A frozen layer between two others, and a layer of which only the bias is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 7)
        self.frozen = nn.Linear(7, 8).requires_grad_(False)
        self.last = nn.Linear(8, 9)
        self.last.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor, choice: str = "") -> torch.Tensor:
        return self.last(torch.tanh(self.frozen(torch.tanh(self.first(x)))))


class Dtypes(nn.Module):
    """float32, float64, float16 and bfloat16, by turns."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (torch.float32, torch.float64, torch.float16, torch.float64, torch.bfloat16, torch.float32)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for dtype in kinds)

    def forward(self, x: torch.Tensor, choice: str = "") -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(next(layer.parameters()).dtype)))
        return x


class Branches(nn.Module):
    """Which of two layers run is chosen with each input. All matrices have one size: a mix-up does not crash."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, choice: str = "both") -> torch.Tensor:
        x = torch.tanh(self.stem(x))
        if choice in ("left", "both"):
            x = torch.tanh(self.left(x))
        if choice in ("right", "both"):
            x = torch.tanh(self.right(x))
        return self.head(x)


class Large(nn.Module):
    """Two matrices of 1,600 bytes among small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 100), nn.Tanh(), nn.Linear(100, 4), nn.Tanh(), nn.Linear(4, 2)
        )

    def forward(self, x: torch.Tensor, choice: str = "") -> torch.Tensor:
        return self.layers(x)


class Shapes(nn.Module):
    """A number, nothing at all, a cube, and a matrix that is stored by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.zeros(0))
        self.cube = nn.Parameter(torch.randn(2, 3, WIDTH))
        self.columns = nn.Parameter(torch.randn(WIDTH, 5).t())

    def forward(self, x: torch.Tensor, choice: str = "") -> torch.Tensor:
        x = torch.tanh(self.scale * x) @ self.columns.t()
        return x.sum() * self.cube.tanh() + self.empty.sum()


class Drift(nn.Module):
    """Moves its input by a buffer that follows the data: whoever has another buffer gets other gradients."""

    centre: torch.Tensor
    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.randn(WIDTH))
        self.register_buffer("steps", torch.tensor(int(torch.randint(100, ()))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moved = torch.tanh(x - self.centre.clone())
        if self.training:
            with torch.no_grad():
                self.centre += 0.2 * (x.mean(0) - self.centre)
                self.steps += 1
        return moved


class Buffers(nn.Module):
    """Batch norm, and a buffer that gradients depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.drift = Drift()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, choice: str = "") -> torch.Tensor:
        return self.last(self.norm(self.drift(self.first(x))))


class Checkpointed(nn.Module):
    """Layers that run again in backward. shared: each in two checkpoints, so its gradient comes in two parts; but in
    one with the choice "once", and in none with "neither"."""

    def __init__(self, reentrant: bool, shared: bool = False) -> None:
        super().__init__()
        self.reentrant, self.shared = reentrant, shared
        self.stem, self.first, self.second, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, choice: str = "") -> torch.Tensor:
        x = torch.tanh(self.stem(x))
        times = 2 if self.shared and choice == "both" else choice != "neither"
        for layer in (self.first, self.second) * times:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=self.reentrant))  # type: ignore[arg-type]
        return self.head(x)


class Nothing(nn.Module):
    """A model without parameters that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor, choice: str = "") -> torch.Tensor:
        return self.fixed(x.requires_grad_())


KINDS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: Layers(6),
    "backwards": lambda: Layers(4, backwards=True),
    "stuck": Stuck,
    "tied": Tied,
    "frozen": Frozen,
    "dtypes": Dtypes,
    "branches": Branches,
    "large": Large,
    "shapes": Shapes,
    "buffers": Buffers,
    "checkpoint": lambda: Checkpointed(reentrant=False),
    "re-entrant": lambda: Checkpointed(reentrant=True),
    "shared": lambda: Checkpointed(reentrant=True, shared=True),
    "nothing": Nothing,
}


def build(kind: str, rank: int, twin: int = 0) -> nn.Module:
    """The model of a kind with this rank's weights. The global random state is left as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 * twin + 17 * rank + sum(map(ord, kind)))
        return KINDS[kind]()


def inputs(rank: int, step: int, micro: int, twin: int = 0) -> torch.Tensor:
    """A rank's part of the batch: (5, WIDTH), float32."""
    generator = torch.Generator().manual_seed(10_007 * twin + 1009 * step + 101 * micro + rank)
    return torch.randn(5, WIDTH, generator=generator)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """A mean over the rank's samples; large enough that gradients are far from rounding."""
    return 20 * (output.float() - 0.3).square().mean()
