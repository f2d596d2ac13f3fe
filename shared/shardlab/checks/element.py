"""What one wrong element says about the parts that are in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .marked import Mark, Marks, miscounted

MOST_PARTS = 4  # listed in one message


@dataclass(frozen=True)
class Place:
    """Names elements: by chunk and number in it when there are several chunks."""

    sizes: Sequence[int]

    def of(self, position: int) -> tuple[int, int]:
        for chunk, size in enumerate(self.sizes):
            if position < size:
                return chunk, position
            position -= size
        return len(self.sizes), position

    def name(self, position: int) -> str:
        chunk, element = self.of(position)
        return f"chunk {chunk}, element {element}" if len(self.sizes) > 1 else f"element {element}"

    def elsewhere(self, position: int, seen_from: int) -> str:
        """The chunk alone, when it is the same element of another chunk."""
        chunk, element = self.of(position)
        same = len(self.sizes) > 1 and element == self.of(seen_from)[1]
        return f"chunk {chunk}" if same else self.name(position)

    def position(self, chunk: int, element: int) -> int:
        return sum(self.sizes[:chunk]) + element


@dataclass(frozen=True)
class Said:
    """decoded: whether the parts could be read off the number; plain: the numbers then."""

    seen: str
    look: str = ""
    plain: str = ""
    decoded: bool = False


def describe(
    got: torch.Tensor,
    want: torch.Tensor,
    index: int,
    world_size: int,
    marks_of: Callable[[int], Marks] | None,
    place: Place,
    chunk: int = 0,
    summed: bool = True,
) -> Said:
    """What is wrong with element `index` of `chunk`. summed: whether the sum of all parts is wanted, or one part."""
    value, right = got[index].item(), want[index].item()
    here = place.name(place.position(chunk, index))
    if value != value:
        look = "nan marks memory that nothing has been written into: a new buffer, or one that is still being received"
        return Said(f"{here} is nan", look)
    if summed and _is_average(got, want, world_size):
        return Said(f"{here} has been divided by N: it is the average", "the contract says sum")
    mark = marks_of(world_size).read(value) if marks_of else None
    right_mark = marks_of(world_size).read(right) if marks_of else None
    digits = 8 if f"{value:.8g}" != f"{right:.8g}" else 17
    plain = f"{here} is {value:.{digits}g}, not {right:.{digits}g}"
    if mark is None or right_mark is None or right_mark.position is None:
        lost = _fits_smaller(value, got.dtype) and not _fits_smaller(right, got.dtype)
        near = lost and abs(value - right) <= 1e-2 * abs(right)
        return Said(plain, "whether it becomes another dtype on the way: digits have been lost" if near else "")
    return Said(f"{here} {_parts(mark, right_mark, place, summed)}", plain=plain, decoded=True)


def _fits_smaller(value: float | int, dtype: torch.dtype) -> bool:
    """Whether a smaller floating-point type holds this number exactly."""
    smaller = [one for one in (torch.float32, torch.float16, torch.bfloat16) if one.itemsize < dtype.itemsize]
    if dtype == torch.int32:
        smaller.append(torch.float32)
    return any(torch.tensor(value, dtype=one).item() == value for one in smaller)


def _parts(mark: Mark, right: Mark, place: Place, summed: bool) -> str:
    assert right.position is not None
    wrong = miscounted(mark.counts) if summed else ""
    if mark.position is None:
        if mark.places is None:
            return "adds up parts of different elements" + (f"; {wrong}" if wrong else "")
        strange = [(rank, at) for rank, at in enumerate(mark.places) if at not in (None, right.position)]
        listed = [f"rank {rank}'s part of {place.elsewhere(position, right.position)}" for rank, position in strange]
        more = [f"{len(listed) - MOST_PARTS} more"] if len(listed) > MOST_PARTS else []
        *first, last = listed[:MOST_PARTS] + more
        missing = f"; {wrong}" if wrong else ""
        return f"has got {', '.join(first)}{' and ' if first else ''}{last} in it{missing}"
    if mark.position != right.position:
        there = place.elsewhere(mark.position, right.position)
        if sum(mark.counts) == 1:
            return f"holds rank {mark.counts.index(1)}'s part of {there}"
        return f"holds what belongs in {there}" + (f"; {wrong}" if wrong else "")
    if not summed:
        return f"holds {_whose(mark.counts)}, not rank {right.counts.index(1)}'s alone"
    return f"is wrong: {wrong}"


def _whose(counts: Sequence[int]) -> str:
    said = [f"rank {rank}'s" + (f" {count} times" if count > 1 else "") for rank, count in enumerate(counts) if count]
    return " + ".join(said)


def _is_average(got: torch.Tensor, want: torch.Tensor, world_size: int) -> bool:
    if world_size == 1 or not bool(want.double().abs().max() > 0):
        return False
    coarse = got.element_size() < 4
    rounding = 1e-6 if got.is_floating_point() else float(world_size)
    return torch.allclose(got.double() * world_size, want.double(), rtol=1e-2 if coarse else 1e-6, atol=rounding)
