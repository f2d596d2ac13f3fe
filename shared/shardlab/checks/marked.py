"""Data that says where it came from: from a sum one can read whose part is in it, how often, and for which element.

Rank r's part of element p is B^r (1 + K (p+1)). As long as every part is counted fewer than B times, a sum of parts of
one element is s (1 + K (p+1)), where the base-B digits of s are the counts; s is the sum modulo K. All numbers are
integers that the dtype holds exactly, so any order of summation gives the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MOST_ELEMENTS = 15  # positions, so that float32 has room for 5 ranks
_POSITION_BITS = 4
_EXACT_BITS = {torch.float32: 24, torch.float64: 53, torch.int32: 31, torch.int64: 62}


@dataclass(frozen=True)
class Mark:
    """What a number says: counts[r] is how often rank r's part is in it; position is the element it belongs to, or
    None when parts of different elements have been added. Then places[r] is where rank r's part comes from, None for a
    rank without a part, if that can be read: it can when no part is counted twice and the places are few enough.
    """

    counts: tuple[int, ...]
    position: int | None
    places: tuple[int | None, ...] | None = None


@dataclass(frozen=True)
class Marks:
    """The code for one world size and dtype."""

    world_size: int
    dtype: torch.dtype = torch.float32

    @property
    def digit_bits(self) -> int:
        return min(4, (_EXACT_BITS[self.dtype] - _POSITION_BITS) // (2 * self.world_size))

    @property
    def shift(self) -> int:
        """K is 2 to this power: as large as the dtype allows, so that a detour through a smaller type shows."""
        return _EXACT_BITS[self.dtype] - _POSITION_BITS - self.digit_bits * self.world_size

    def part(self, rank: int, count: int, first: int = 0) -> torch.Tensor:
        """Rank's parts of elements first .. first+count-1."""
        return self.total({rank}, count, first)

    def total(self, ranks: set[int], count: int, first: int = 0) -> torch.Tensor:
        """The sum of the parts of these ranks."""
        digits = sum(1 << (self.digit_bits * rank) for rank in ranks)
        positions = torch.arange(first + 1, first + count + 1, dtype=torch.int64)
        return (digits * (1 + (positions << self.shift))).to(self.dtype)

    def read(self, value: float | int) -> Mark | None:
        """None when the number is no sum of parts."""
        if value != value or value in (float("inf"), float("-inf")) or value <= 0 or value != int(value):
            return None
        digits = int(value) % (1 << self.shift)
        high = int(value) >> self.shift
        if not digits <= high <= MOST_ELEMENTS * digits or digits >= 1 << (self.digit_bits * self.world_size):
            return None
        base = 1 << self.digit_bits
        counts = self._digits(digits)
        if high % digits == 0:
            return Mark(counts, high // digits - 1)
        # Digit r of the high half is p + 1 for a part of element p, unless two have been added or it overflowed.
        places = self._digits(high)
        if base <= MOST_ELEMENTS or max(counts) > 1:
            return Mark(counts, None)
        if high >= base**self.world_size or [place > 0 for place in places] != [count > 0 for count in counts]:
            return None
        return Mark(counts, None, tuple(place - 1 if place else None for place in places))

    def _digits(self, number: int) -> tuple[int, ...]:
        base = 1 << self.digit_bits
        return tuple((number >> (self.digit_bits * rank)) % base for rank in range(self.world_size))


def names(ranks: list[int]) -> str:
    """ "rank 0's", "rank 0's and rank 2's", ..."""
    said = [f"rank {rank}'s" for rank in ranks]
    return said[0] if len(said) == 1 else f"{', '.join(said[:-1])} and {said[-1]}"


def miscounted(counts: tuple[int, ...]) -> str:
    """ "rank 0's part is missing", "rank 1's part is counted 2 times", or "" when every part is there once."""
    missing = [rank for rank, count in enumerate(counts) if count == 0]
    said = [f"{names(missing)} part{'s are' if len(missing) > 1 else ' is'} missing"] if missing else []
    said += [f"rank {rank}'s part is counted {count} times" for rank, count in enumerate(counts) if count > 1]
    return ", ".join(said)
