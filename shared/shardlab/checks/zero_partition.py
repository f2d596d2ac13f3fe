"""Lab 06: the sizes that are split over ranks, and what is wrong with a partition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .notes import Finding, Judged, Prepared

MOST_SHOWN = 100  # characters of a partition in a message


@dataclass(frozen=True)
class PartitionCase:
    """sizes: elements of each parameter. as_tuple: they are handed over as a tuple."""

    sizes: tuple[int, ...]
    world_size: int
    as_tuple: bool = False

    @property
    def name(self) -> str:
        return f"partition({_short(list(self.sizes))}, {self.world_size})"

    def prepare(self, rank: int, world_size: int) -> Prepared:
        handed = self.sizes if self.as_tuple else list(self.sizes)

        def judge(returned: Any) -> Judged:
            if tuple(handed) != self.sizes:
                said = f"the list that was handed in is now {_short(list(handed))}"
                return Judged(Finding(said, "a result; the list stays as it is", "make a list of your own"), "")
            finding = self.finding(returned)
            return Judged(finding, "" if finding else _short([[tuple(piece) for piece in one] for one in returned]))

        return Prepared((handed, self.world_size), judge, lambda: None)

    def finding(self, returned: Any) -> Finding | None:
        """What is wrong with a partition, or None."""
        n = self.world_size
        same = "one list stands for several ranks: [[]] * N repeats it, [[] for _ in range(N)] makes N of them"
        shape = f"a list of {n} lists, one per rank, of (index, start, stop)"
        if not isinstance(returned, (list, tuple)):
            return Finding(f"returned {_short(returned)}", shape)
        if len(returned) != n:
            return Finding(f"{len(returned)} lists: {_short(returned)}", shape, "a rank that gets nothing has []")
        owner: dict[int, list[int]] = {index: [-1] * size for index, size in enumerate(self.sizes)}
        for rank, pieces in enumerate(returned):
            if not isinstance(pieces, (list, tuple)):
                return Finding(f"rank {rank} has {_short(pieces)}", shape)
            for piece in pieces:
                wrong = self._piece(rank, piece, owner)
                if wrong:
                    alike = n > 1 and returned[rank] is returned[rank - 1]
                    return Finding(wrong.seen, wrong.expected, same) if alike else wrong
        for index, owners in owner.items():
            if -1 in owners:
                lost = owners.index(-1)
                said = f"element {lost} of parameter {index} (of {len(owners)}) belongs to nobody"
                return Finding(
                    f"{said}: {_short(returned)}", "every element once", "the last elements, or a remainder?"
                )
        return self._balance(returned)

    def _piece(self, rank: int, piece: Any, owner: dict[int, list[int]]) -> Finding | None:
        at = f"rank {rank} has the piece {_short(piece)}"
        rule = "(index, start, stop), three whole numbers: elements start to stop - 1 of parameter index"
        if not isinstance(piece, (list, tuple)) or len(piece) != 3 or any(type(each) is not int for each in piece):
            return Finding(at, rule, "// divides whole numbers, / makes a float")
        index, start, stop = piece
        if index not in owner:
            return Finding(at, f"index 0 to {len(self.sizes) - 1}")
        if not 0 <= start <= stop <= self.sizes[index]:
            look = "start and stop count inside the parameter, not from the beginning of the model"
            return Finding(f"{at}; the parameter has {self.sizes[index]} elements", rule, look)
        if start == stop:
            return Finding(at, "no empty pieces; a parameter of 0 elements appears nowhere", "start < stop")
        for element in range(start, stop):
            if owner[index][element] != -1:
                other = owner[index][element]
                said = f"element {element} of parameter {index} belongs to rank {other} and to rank {rank}"
                return Finding(said if other != rank else f"{at}, whose element {element} it has already", "once")
            owner[index][element] = rank
        return None

    def _balance(self, returned: Any) -> Finding | None:
        total, n = sum(self.sizes), self.world_size
        most = -(-total // n)
        counts = [sum(stop - start for _, start, stop in pieces) for pieces in returned]
        if max(counts) > most:
            rank = counts.index(max(counts))
            said = f"rank {rank} has {counts[rank]:,} elements: {_short(counts)} in all"
            look = "a parameter may be cut where a rank is full"
            if total % n == 0 and counts[rank] == most + 1:
                look = "// N + 1 is one too many where nothing is left over: round up only if there is a remainder"
            elif counts[rank] == sum(-(-size // n) for size in self.sizes):
                look = "a rounding up for each parameter adds up: lay all end to end, then cut once"
            if -1 not in counts and counts[-1] == max(counts) and n > 1:
                look = "whole // N leaves a remainder, which the last rank gets here: round up instead"
            return Finding(said, f"at most ceil({total:,} / {n}) = {most:,} each", look)
        return None


def partition_cases() -> list[PartitionCase]:
    """The simplest first."""
    return [
        PartitionCase((8,), 2),
        PartitionCase((4, 4), 2),
        PartitionCase((6, 3, 3), 2),
        PartitionCase((5, 3, 2), 2),
        PartitionCase((7,), 3),
        PartitionCase((3, 5, 1, 6), 4),
        PartitionCase((12,), 1),
        PartitionCase((9, 1, 2), 1),
        PartitionCase((100, 1, 1), 3),
        PartitionCase((1, 1, 100), 3),
        PartitionCase((2, 0, 3), 2),
        PartitionCase((0, 4, 0), 3),
        PartitionCase((1, 1), 4),
        PartitionCase((1, 1, 1, 1, 1), 4),
        PartitionCase((5,), 4),
        PartitionCase((9,), 4),
        PartitionCase((), 3),
        PartitionCase((0, 0), 2),
        PartitionCase((10, 10, 10), 3),
        PartitionCase((7, 11, 13, 17, 19, 23), 5),
        PartitionCase((3, 1, 4, 1, 5, 9, 2, 6), 8, as_tuple=True),
        PartitionCase((1000, 7, 300, 1, 1, 64), 16),
    ]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."
