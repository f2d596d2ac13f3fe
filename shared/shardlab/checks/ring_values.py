"""Lab 04: looks at the values that one rank ended with, and says what is wrong with them in a learner's words.

What is said is what the numbers prove (whose part is missing, which chunk has come to lie where), and no guess at the
mistake behind it: one symptom has many causes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .element import Place, describe
from .handed import IN_PLACE, Handed, changed_outside
from .marked import Marks
from .notes import Finding, Judged
from .trial import digest_of, unusable

MarksOf = Callable[[int], Marks] | None


@dataclass(frozen=True)
class Chunks:
    """What one rank has after a phase. given: the list handed in, as it is after the call. before: the values then.

    split[r][c]: rank r's chunk c. outside: whether elements of a larger storage around the chunks have changed.
    """

    handed: Sequence[Handed]
    given: list[torch.Tensor]
    before: list[torch.Tensor]
    split: list[tuple[torch.Tensor, ...]]
    rank: int
    marks_of: MarksOf
    outside: bool

    @property
    def memory(self) -> list[torch.Tensor]:
        return [one.memory for one in self.handed]

    def place(self) -> Place:
        sizes = [len(chunk) for chunk in self.before]
        return Place(sizes)

    @property
    def unchanged(self) -> bool:
        return all(torch.equal(now, then) for now, then in zip(self.memory, self.before, strict=True))

    def misplaced(self, chunk: int) -> Finding | None:
        if chunk >= len(self.given) or self.given[chunk] is not self.handed[chunk].tensor:
            seen = f"chunks[{chunk}] is another tensor now; the one handed in has not got the result"
            return Finding(seen, "the result in the tensor that was handed in", IN_PLACE)
        name = f"chunks[{chunk}]"
        return self.handed[chunk].reshaped(name) or self.handed[chunk].moved(name)


def judge_all_reduce(
    handed: Handed, parts: list[torch.Tensor], rank: int, marks_of: MarksOf, returned: Any, outside: bool
) -> Judged:
    """parts[r]: rank r's values before the call, flat. outside: as in Chunks."""
    got, want = handed.memory.reshape(-1), _total(parts)
    judged = Judged(None, digest_of([got]), unusable(got))
    index = _first_difference(got, want, _tolerance(parts))
    moved, reshaped = handed.moved("the tensor"), handed.reshaped("the tensor")
    if reshaped:
        return _with(judged, reshaped)
    if index is None:
        if moved and not _same(handed.tensor, want, parts):
            return _with(judged, moved)
        return _with(judged, changed_outside("the tensor") if outside else None)
    if moved:
        return _with(judged, moved)
    if torch.equal(got, parts[rank]):
        handed_back = isinstance(returned, torch.Tensor) and returned is not handed.tensor
        seen = "the tensor handed in did not change" + ("; a new one was returned" if handed_back else "")
        return _with(judged, Finding(seen, "the sum over all ranks in that tensor", IN_PLACE))
    said = describe(got, want, index, len(parts), marks_of, Place([len(got)]))
    return _with(
        judged,
        Finding(
            said.seen, "the sum of every rank's part, once each", said.look, decoded=said.decoded, plain=said.plain
        ),
    )


def judge_reduce_scatter(chunks: Chunks) -> Judged:
    rank, split = chunks.rank, chunks.split
    got, parts = chunks.memory[rank], [part[rank] for part in chunks.split]
    complete = tuple(
        owner
        for owner, chunk in enumerate(chunks.memory)
        if len(chunk) and _is_total([part[owner] for part in split], chunk)
    )
    judged = Judged(None, digest_of([got]), unusable(got), complete)
    index = _first_difference(got, _total(parts), _tolerance(parts))
    if index is None:
        wrong = chunks.misplaced(rank)
        if wrong and not (rank < len(chunks.given) and _same(chunks.given[rank], _total(parts), parts)):
            return _with(judged, wrong)
        return _with(judged, changed_outside("the chunks") if chunks.outside else None)
    misplaced = chunks.misplaced(rank)
    if misplaced:
        return _with(judged, misplaced)
    if chunks.unchanged:
        return _with(judged, Finding("no chunk has changed", f"on rank {rank}, chunk {rank} complete", IN_PLACE))
    said = describe(got, _total(parts), index, len(split), chunks.marks_of, chunks.place(), rank)
    expected = f"on rank {rank}, chunk {rank} complete"
    return _with(
        judged, Finding(said.seen, expected, said.look, rank if said.decoded else None, said.decoded, said.plain)
    )


def judge_all_gather(chunks: Chunks) -> Judged:
    """The finished chunk c is split[c][c]."""
    judged = Judged(None, digest_of(chunks.memory), any(unusable(chunk) for chunk in chunks.memory))
    for owner, chunk in enumerate(chunks.memory):
        want = chunks.split[owner][owner]
        index = _first_difference(chunk, want, 0 * want)
        misplaced = chunks.misplaced(owner)
        if index is None:
            if misplaced and not (owner < len(chunks.given) and _same(chunks.given[owner], want, [want])):
                return _with(judged, misplaced)
            continue
        if misplaced:
            return _with(judged, misplaced)
        expected = f"chunk {owner} as rank {owner} had it, in place: in the tensor that was handed in"
        return _with(judged, _gathered(chunks, owner, index, expected))
    return _with(judged, changed_outside("the chunks") if chunks.outside else None)


def _gathered(chunks: Chunks, owner: int, index: int, expected: str) -> Finding:
    got, want, before = chunks.memory[owner], chunks.split[owner][owner], chunks.before[owner]
    at = f"chunk {owner}"
    if chunks.unchanged:
        return Finding("no chunk has changed", expected, IN_PLACE)
    if owner == chunks.rank:
        said = describe(got, want, index, len(chunks.split), None, chunks.place(), owner, summed=False)
        if said.look:
            return Finding(said.seen, expected, said.look)
        look = "a rank's own chunk is finished from the start: it is sent, never received into or added to"
        return Finding(f"{at} has been overwritten, though it was finished", expected, look)
    if torch.equal(got, before) or bool((got.isnan() & before.isnan()).all() and len(got)):
        return Finding(f"{at} still holds what was there before the call", expected)
    if torch.equal(got, before + want):
        look = "the second phase copies; only the first one adds"
        return Finding(f"{at} has been added to what was there before", expected, look)
    if bool(got.isnan().any()) and bool(before.isnan().any()):
        look = "what was there before the call is garbage: overwrite it, don't calculate with it"
        return Finding(f"{at}, element {index} is nan, as it was before the call", expected, look)
    for other, part in enumerate(chunks.split):
        if torch.equal(got, part[owner]):
            seen = f"{at} holds what rank {other} had there before the call, which was not finished"
            return Finding(seen, expected, f"where rank {other} sends its chunk {owner}: it has to receive it first")
        if len(part[other]) == len(got) and torch.equal(got, part[other]):
            return Finding(f"{at} holds what belongs in chunk {other}", expected)
    said = describe(got, want, index, len(chunks.split), chunks.marks_of, chunks.place(), owner, summed=False)
    return Finding(said.seen, expected, said.look, decoded=said.decoded, plain=said.plain)


def _total(parts: list[torch.Tensor]) -> torch.Tensor:
    """Summed in the widest type: exact for all but "normal" data."""
    wide = torch.float64 if parts[0].is_floating_point() else torch.int64
    return torch.stack(parts).to(wide).sum(0).to(parts[0].dtype)


def _tolerance(parts: list[torch.Tensor]) -> torch.Tensor:
    """How far a sum in any order may be off: (N-1) eps times the sum of the absolute values, and once more to round.

    0 where all partial sums are exact: for integers, in floating point too.
    """
    stacked = torch.stack(parts)
    if not stacked.is_floating_point() or torch.equal(stacked, stacked.round()):
        return torch.zeros(stacked.shape[1:], dtype=torch.float64)
    return len(parts) * torch.finfo(stacked.dtype).eps * stacked.to(torch.float64).abs().sum(0)


def _first_difference(got: torch.Tensor, want: torch.Tensor, tolerance: torch.Tensor) -> int | None:
    if torch.equal(got, want):
        return None
    near = (got.double() - want.double()).abs() <= tolerance.double()
    far = (~near).nonzero() if got.is_floating_point() else (got != want).nonzero()
    return int(far[0]) if len(far) else None


def _is_total(parts: list[torch.Tensor], chunk: torch.Tensor) -> bool:
    return _first_difference(chunk, _total(parts), _tolerance(parts)) is None


def _same(tensor: Any, want: torch.Tensor, parts: list[torch.Tensor]) -> bool:
    """Whether what stands in a place of the handed in tensor is as right as that."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != want.dtype or tensor.numel() != want.numel():
        return False
    tolerance = _tolerance(parts) if len(parts) > 1 else 0 * want
    return _first_difference(tensor.detach().reshape(-1), want, tolerance) is None


def _with(judged: Judged, finding: Finding | None) -> Judged:
    return Judged(finding, judged.digest, judged.unusable, judged.complete)
