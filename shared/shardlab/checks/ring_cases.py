"""Lab 04: the data on which a ring is tried, and how the values on one rank are judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .handed import Handed, dtype_name
from .marked import Marks
from .notes import Case, Judged, Prepared
from .ring_values import Chunks, judge_all_gather, judge_all_reduce, judge_reduce_scatter

MARGIN = 3  # elements of a larger storage before and after what is handed in
CANARY = 77


@dataclass(frozen=True)
class Data:
    """kind: "marked" (see marked.py), "small" (integers from -8 to 8, exact in every dtype) or "normal"."""

    kind: str
    dtype: torch.dtype

    def parts(self, count: int, world_size: int) -> list[torch.Tensor]:
        """Every rank's part of `count` elements, alike on all ranks: they are made, not sent."""
        if self.kind == "marked":
            marks = Marks(world_size, self.dtype)
            return [marks.part(rank, count) for rank in range(world_size)]
        generator = torch.Generator().manual_seed(1000 * count + world_size)
        if self.kind == "small":
            whole = torch.randint(-8, 9, (world_size, count), generator=generator)
        else:
            whole = torch.randn(world_size, count, generator=generator, dtype=torch.float64)
        return [row.to(self.dtype) for row in whole]

    @property
    def marks(self) -> Callable[[int], Marks] | None:
        return (lambda world_size: Marks(world_size, self.dtype)) if self.kind == "marked" else None


FLOAT32 = Data("marked", torch.float32)


# Views of a larger storage, by the name that a message uses.
VIEWS: dict[str, tuple[Callable[[int], tuple[int, ...]], Callable[[torch.Tensor], torch.Tensor]]] = {
    "1-D": (lambda n: (n,), lambda base: base),
    "2-D": (lambda n: (3, n // 3), lambda base: base),
    "transposed": (lambda n: (n // 3, 3), lambda base: base.t()),
    "every second element of a larger tensor": (lambda n: (2 * n,), lambda base: base[::2]),
    "a slice of a larger tensor": (lambda n: (n + 2 * MARGIN,), lambda base: base[MARGIN:-MARGIN]),
    "a block of a larger matrix": (lambda n: (5, n // 3 + 2), lambda base: base[1:4, 1:-1]),
    "0-d": (lambda n: (1,), lambda base: base[0]),
    "0-d, one of a larger tensor": (lambda n: (5,), lambda base: base[2]),
}


@dataclass(frozen=True)
class TensorCase:
    """A tensor of `count` elements, seen through one of VIEWS, for the all-reduce."""

    count: int
    data: Data = FLOAT32
    view: str = "1-D"
    remark: str = ""

    @property
    def name(self) -> str:
        said = f"{self.count} element{'s' * (self.count != 1)} ({dtype_name(self.data.dtype)}"
        said += "" if self.view == "1-D" else f", {self.view}"
        return said + (f", {self.remark})" if self.remark else ")")

    def prepare(self, rank: int, world_size: int) -> Prepared:
        shape, view = VIEWS[self.view]
        base = torch.full(shape(self.count), CANARY, dtype=self.data.dtype)
        tensor = view(base)
        base = base.detach()  # the tensor's shape and storage are in the solution's hands
        parts = self.data.parts(self.count, world_size)
        tensor.copy_(parts[rank].view(tensor.shape))
        outside = torch.ones(base.shape, dtype=torch.bool)
        view(outside).fill_(False)
        handed = Handed.of(tensor)

        def judge(returned: Any) -> Judged:
            touched = bool((base[outside] != CANARY).any())
            return judge_all_reduce(handed, parts, rank, self.data.marks, returned, touched)

        return Prepared((tensor,), judge, lambda: _spoil([base, tensor]))


@dataclass(frozen=True)
class ChunksCase:
    """N chunks. phase: "reduce-scatter" or "all-gather". storage: "separate", "views" of one tensor, or "inner" views
    of a larger one. garbage: what unfinished chunks hold before an all-gather, "marked" or "nan".
    """

    phase: str
    sizes: tuple[int, ...]
    data: Data = FLOAT32
    storage: str = "views"
    garbage: str = "marked"
    remark: str = ""

    @property
    def name(self) -> str:
        equal = len(set(self.sizes)) == 1
        sizes = f"of {self.sizes[0]}" if equal else f"of {', '.join(map(str, self.sizes))}"
        said = f"chunks {sizes} ({dtype_name(self.data.dtype)}"
        said += {"separate": ", separate tensors", "inner": ", views into a larger tensor"}.get(self.storage, "")
        return said + (f", {self.remark})" if self.remark else ")")

    def prepare(self, rank: int, world_size: int) -> Prepared:
        parts = self.data.parts(sum(self.sizes), world_size)
        bases, chunks = self._lay_out(parts[rank])
        if self.phase == "all-gather":
            for owner, chunk in enumerate(chunks):
                if owner != rank and self.garbage == "nan":
                    chunk.fill_(float("nan"))
        given = list(chunks)
        handed = [Handed.of(chunk) for chunk in chunks]
        before = [chunk.clone() for chunk in chunks]
        margins = [base[:MARGIN] for base in bases] + [base[-MARGIN:] for base in bases]
        split = [part.split(list(self.sizes)) for part in parts]

        def judge(returned: Any) -> Judged:
            touched = self.storage == "inner" and any(bool((margin != CANARY).any()) for margin in margins)
            judge_phase = judge_reduce_scatter if self.phase == "reduce-scatter" else judge_all_gather
            return judge_phase(Chunks(handed, given, before, split, rank, self.data.marks, touched))

        return Prepared((given,), judge, lambda: _spoil([*bases, *chunks]))

    def _lay_out(self, values: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        if self.storage == "separate":
            return [], [piece.clone() for piece in values.split(list(self.sizes))]
        margin = MARGIN if self.storage == "inner" else 0
        base = torch.full((len(values) + 2 * margin,), CANARY, dtype=values.dtype)
        inner = base[margin : margin + len(values)]
        inner.copy_(values)
        return [base], list(inner.split(list(self.sizes)))


def clearer(case: Case) -> Case | None:
    """The same case with data from which whose part is where can always be read, if it has not got such data."""
    if not isinstance(case, (TensorCase, ChunksCase)) or case.data != FLOAT32:
        return None
    return replace(case, data=Data("marked", torch.float64))


def _spoil(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.detach().fill_(float("nan") if tensor.is_floating_point() else 99)
