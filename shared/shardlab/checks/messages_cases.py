"""Lab 00: the data on which a token and a broadcast are tried, and how the values on one rank are judged.

What is said is what the numbers prove: whose part is in a token how often, whose tensor has arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import takewhile
from math import prod
from typing import Any

import torch

from .handed import IN_PLACE, Handed, changed_outside, dtype_name
from .marked import Marks
from .notes import Finding, Judged, Prepared
from .trial import digest_of

MARGIN = 3  # elements of a larger storage before and after what is handed in
CANARY = 77
MOST_MARKED = 15  # elements that marks can tell apart
MINE_CHANGED = "`token += mine` changes the token; `mine += token` changes `mine`, which is not what travels"


def inside(values: torch.Tensor, larger: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The values in fresh memory, and all of that memory: `larger` puts them in the middle of a larger tensor."""
    margin = MARGIN if larger else 0
    base = torch.full((values.numel() + 2 * margin,), CANARY, dtype=values.dtype)
    tensor = base[margin : margin + values.numel()].view(values.shape)
    tensor.copy_(values)
    return tensor, base.detach()


def margins_changed(base: torch.Tensor, larger: bool) -> bool:
    margins = torch.cat([base[:MARGIN], base[-MARGIN:]]) if larger else base[:0]
    return bool((margins != torch.full_like(margins, CANARY)).any())


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, so that NaN is equal to itself. Shapes do not count."""
    return one.dtype == other.dtype and digest_of([one]) == digest_of([other])


def spoil(*tensors: torch.Tensor) -> Callable[[], None]:
    """What overwrites the memory that was handed in, so that a send which is still going on would show."""

    def overwrite() -> None:
        for tensor in tensors:
            tensor.detach().fill_(99)

    return overwrite


def unusable(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether something stands there that memory holds before anything has arrived, and that does not belong there."""
    if got.dtype.is_floating_point or got.dtype.is_complex:
        return bool((got.isnan() & ~want.isnan()).any())
    top = True if got.dtype == torch.bool else torch.iinfo(got.dtype).max
    return got.dtype != torch.bool and bool(((got == top) & (want != top)).any())


@dataclass(frozen=True)
class TokenCase:
    """A token of `count` elements. kind: "marked" data tells whose part is in it, "small" data are plain integers."""

    count: int
    kind: str = "marked"
    dtype: torch.dtype = torch.float64
    larger: bool = False
    nan: bool = False
    remark: str = ""

    @property
    def name(self) -> str:
        said = f"{self.count} element{'s' * (self.count != 1)} ({dtype_name(self.dtype)}"
        said += ", views into larger tensors" if self.larger else ""
        said += ", nan in `token` on all ranks but 0" if self.nan else ""
        return said + (f", {self.remark})" if self.remark else ")")

    @property
    def bytes(self) -> int:
        return self.count * self.dtype.itemsize

    def parts(self, world_size: int) -> list[torch.Tensor]:
        """Of every rank; then the token; then the garbage in `token` on ranks other than 0."""
        if self.kind == "marked":
            marks = Marks(world_size + 2, self.dtype)
            return [marks.part(one, self.count) for one in range(world_size + 2)]
        generator = torch.Generator().manual_seed(1000 * self.count + world_size)
        whole = torch.randint(-8, 9, (world_size + 2, self.count), generator=generator)
        return [row.to(self.dtype) for row in whole]

    def prepare(self, rank: int, world_size: int) -> Prepared:
        parts = self.parts(world_size)
        *of_ranks, start, garbage = parts
        before = start if rank == 0 else torch.full_like(garbage, float("nan")) if self.nan else garbage
        token, base = inside(before, self.larger)
        mine, base_of_mine = inside(of_ranks[rank], self.larger)
        handed, own = Handed.of(token), Handed.of(mine)
        want = start + sum(of_ranks if rank == 0 else of_ranks[: rank + 1])

        def judge(returned: Any) -> Judged:
            got = handed.memory
            finding = handed.reshaped("token") or own.reshaped("mine")
            if finding is None and not same(got, want):
                finding = handed.moved("token") or self._wrong(got, want, before, rank, world_size, returned)
                if not same(own.memory, of_ranks[rank]):
                    finding = replace(finding, look=MINE_CHANGED)
            elif finding is None and not same(own.memory, of_ranks[rank]):
                finding = Finding("`mine` has been changed", "`mine` as it was: only the token changes", "")
            elif finding is None and not same(token.detach(), want):
                finding = handed.moved("token")
            elif margins_changed(base, self.larger) or margins_changed(base_of_mine, self.larger):
                finding = finding or changed_outside("token or mine")
            return Judged(finding, digest_of([got, own.memory]), unusable(got, want))

        return Prepared((token, mine), judge, spoil(base, base_of_mine))

    def _wrong(
        self, got: torch.Tensor, want: torch.Tensor, before: torch.Tensor, rank: int, world_size: int, returned: Any
    ) -> Finding:
        among = "all ranks, once each" if rank == 0 else f"ranks 0{f' to {rank}' if rank > 1 else ' and 1'}, once each"
        expected = f"on rank {rank}, the token plus the parts of {among}"
        new = isinstance(returned, torch.Tensor) and same(returned.detach().reshape(-1), want)
        if same(got, before) and (new or rank):
            seen = "`token` has not changed" + ("; a new tensor was returned" if new else "")
            return Finding(seen, expected, IN_PLACE)
        index = int((got != want).nonzero()[0])
        value, right = got[index].item(), want[index].item()
        if value != value:
            look = "nan is what stood there before anything arrived: first receive, then add, then pass it on"
            return Finding(f"element {index} of `token` is nan", expected, look)
        plain = f"element {index} of `token` is {value:.17g}, not {right:.17g}"
        mark = Marks(world_size + 2, self.dtype).read(value) if self.kind == "marked" else None
        if mark is None or mark.position != index:
            look = "this is no sum of the token and parts: something else has been added, or it has been scaled"
            return Finding(plain, expected, look if self.kind == "marked" else "")
        *counts, token, garbage = mark.counts
        which = f"element {index} of `token`" if index else "`token`"
        seen = f"{which} holds {contents(counts, token, garbage)}"
        look = self._look(counts, token, garbage, rank)
        return Finding(seen, expected, look, decoded=True, plain=plain, parts=mark.counts)

    def _look(self, counts: list[int], token: int, garbage: int, rank: int) -> str:
        wanted = [1 if rank == 0 or other <= rank else 0 for other in range(len(counts))]
        if garbage:
            return "on ranks other than 0 `token` holds garbage at first: receive, then add, then pass it on"
        if not token:
            return "what is sent: it is the token that travels, with all that has been added to it"
        if not any(counts):
            return "every rank adds its part before it passes the token on: `token += mine`"
        if rank == 0 and token == 1 and counts == [1] + [0] * (len(counts) - 1):
            return "at the end rank 0 receives the token from rank N-1, into `token`"
        if rank == 0 and counts[0] == 2 and counts[1:] == wanted[1:]:
            return "rank 0 adds its part once, at the start, and not again when the token comes home"
        if counts[rank] == 0 and [*counts[:rank], 1, *counts[rank + 1 :]] == wanted and token:
            return "where a rank adds: `token += mine` changes the token, `token = token + mine` makes a new one"
        return ""


def contents(counts: list[int], token: int, garbage: int) -> str:
    """ "the token, rank 0's part and rank 1's part 2 times" """
    named = [("the token", token), *((f"rank {rank}'s part", count) for rank, count in enumerate(counts))]
    named += [("what stood there before the call", garbage)]
    said = [name + (f" {count} times" if count > 1 else "") for name, count in named if count]
    *first, last = said
    return f"{', '.join(first)} and {last}" if first else f"{last} alone"


@dataclass(frozen=True)
class BroadcastCase:
    """A tensor of this shape; every rank's differs. special: the root's holds nan and infinities too. nan: the others'
    hold nothing but nan before.
    """

    shape: tuple[int, ...]
    root: int
    dtype: torch.dtype = torch.float32
    larger: bool = False
    nan: bool = False
    special: bool = False
    remark: str = ""

    @property
    def name(self) -> str:
        shape = "0-d" if not self.shape else f"shape {self.shape}"
        said = f"root {self.root}, {shape} ({dtype_name(self.dtype)}"
        said += ", a view into a larger tensor" if self.larger else ""
        said += ", nan on all ranks but the root" if self.nan else ""
        said += ", with inf and nan" if self.special else ""
        return said + (f", {self.remark})" if self.remark else ")")

    @property
    def count(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.count * self.dtype.itemsize

    def of(self, rank: int) -> torch.Tensor:
        """What `tensor` holds on a rank before. A smaller type would lose digits. Ranks differ in every element."""
        if self.dtype == torch.bool:
            generator = torch.Generator().manual_seed(100 * self.count + rank)
            return torch.randint(0, 2, self.shape, generator=generator).bool()
        numbers = 10 * (rank + 1) + torch.arange(self.count).view(self.shape) % 7
        values = numbers.to(self.dtype)
        if self.dtype in (torch.float32, torch.float64, torch.int64):
            values = values / 3 if self.dtype.is_floating_point else values + 2**40
        if self.dtype.is_complex:
            values = values + 1j * numbers
        if self.nan and rank != self.root:
            values = torch.full_like(values, float("nan"))
        if self.special and rank == self.root:
            values.view(-1)[:3] = torch.tensor([float("nan"), float("-inf"), -0.0], dtype=self.dtype)
        return values

    def prepare(self, rank: int, world_size: int) -> Prepared:
        every = [self.of(one) for one in range(world_size)]
        tensor, base = inside(every[rank], self.larger)
        handed, want = Handed.of(tensor), every[self.root]

        def judge(returned: Any) -> Judged:
            got = handed.memory
            finding = handed.reshaped("the tensor")
            if finding is None and not same(got, want):
                finding = handed.moved("the tensor") or self._wrong(got, every, rank, returned)
            elif finding is None and not same(tensor.detach(), want):
                finding = handed.moved("the tensor")
            elif finding is None and margins_changed(base, self.larger):
                finding = changed_outside("the tensor")
            return Judged(finding, digest_of([got]), unusable(got, want))

        return Prepared((tensor, self.root), judge, spoil(base))

    def _wrong(self, got: torch.Tensor, every: list[torch.Tensor], rank: int, returned: Any) -> Finding:
        before, want = every[rank], every[self.root]
        expected = f"what rank {self.root}, the root, had before the call"
        if rank == self.root:
            return Finding("the root's own tensor has changed", expected, "the root sends and never receives")
        if same(got, before):
            new = isinstance(returned, torch.Tensor) and same(returned.detach(), want)
            if self.nan and not new:
                look = "what arrives replaces what was there: a calculation with nan gives nan"
                return Finding("the tensor is nan, as it was before the call", expected, look)
            seen = f"the tensor has not changed{'; a new one was returned' if new else ''}"
            return Finding(seen, expected, IN_PLACE)
        if got.dtype != torch.bool and same(got, before + want):
            return Finding("what arrived has been added to what was there", expected, "a broadcast replaces")
        holders = [other for other, tensor in enumerate(every) if same(got, tensor)]
        if holders:
            seen = f"the tensor holds what rank {holders[0]} had"
            return Finding(seen, expected, f"which rank starts, and whether rank {holders[0]} sent before it received")
        flat, right = got.reshape(-1), want.reshape(-1)
        differs = [not same(flat[i], right[i]) for i in range(len(flat))]
        correct = len(list(takewhile(lambda wrong: not wrong, differs)))
        value = flat[correct].item()
        seen = f"element {correct} is {value}, not {right[correct].item()}"
        seen += f"; {sum(differs)} of {len(flat)} elements are wrong" if sum(differs) < len(flat) else ""
        return Finding(seen, expected)
