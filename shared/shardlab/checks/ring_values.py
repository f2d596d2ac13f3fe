"""Lab 04: looks at the values that one rank ended with, and says what is wrong with them in a learner's words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .marked import Marks, miscounted
from .trial import Finding, Judged, digest_of, unusable

MarksOf = Callable[[int], Marks] | None
IN_PLACE = "in place: write into the tensor that was handed in (a += b, a.copy_(b)); a = a + b makes a new tensor"


def judge_all_reduce(
    tensor: torch.Tensor, parts: list[torch.Tensor], rank: int, marks_of: MarksOf, returned: Any, touched: bool
) -> Judged:
    """tensor: what was handed in, after the call. parts[r]: rank r's values before it, flat. touched: see _outside."""
    got, want = tensor.detach().reshape(-1), _total(parts)
    judged = Judged(None, digest_of([got]), unusable(got))
    index = _first_difference(got, want, _tolerance(parts))
    if index is None:
        return _with(judged, _outside("the tensor") if touched else None)
    if torch.equal(got, parts[rank]):
        look = f"whether the steps are taken at all for this size; then {IN_PLACE}"
        handed_back = isinstance(returned, torch.Tensor) and returned is not tensor
        seen = "the tensor handed in did not change" + ("; a new one was returned" if handed_back else "")
        return _with(judged, Finding(seen, "the sum over all ranks in that tensor", look))
    seen, look = _element(got, want, index, len(parts), marks_of)
    return _with(judged, Finding(f"element {index} {seen}", "the sum of every rank's part, once each", look))


def judge_reduce_scatter(
    chunks: list[torch.Tensor],
    given: list[torch.Tensor],
    before: list[torch.Tensor],
    split: list[tuple[torch.Tensor, ...]],
    rank: int,
    marks_of: MarksOf,
    touched: bool,
) -> Judged:
    """chunks: the tensors handed in; given: the list handed in, after the call. split[r][c]: rank r's chunk c."""
    got = chunks[rank]
    parts = [part[rank] for part in split]
    judged = Judged(None, digest_of([got]), unusable(got))
    index = _first_difference(got, _total(parts), _tolerance(parts))
    if index is None:
        return _with(judged, _outside("the chunks") if touched else None)
    if _replaced(given, rank, chunks):
        return _with(judged, _new_tensor(rank))
    seen, look = _element(got, _total(parts), index, len(split), marks_of)
    complete = [
        owner
        for owner, chunk in enumerate(chunks)
        if owner != rank and len(chunk) and _is_total([part[owner] for part in split], chunk)
    ]
    if complete:
        seen += f"; chunk {complete[0]} is complete there instead"
        look = "which chunk is sent first: the chunk that a rank sends first ends one place before that rank"
    return _with(
        judged, Finding(f"chunk {rank}, element {index} {seen}", f"on rank {rank}, chunk {rank} complete", look)
    )


def judge_all_gather(
    chunks: list[torch.Tensor],
    given: list[torch.Tensor],
    before: list[torch.Tensor],
    split: list[tuple[torch.Tensor, ...]],
    rank: int,
    marks_of: MarksOf,
    touched: bool,
) -> Judged:
    """As `judge_reduce_scatter`. The finished chunk c is split[c][c]; before[c]: what it held before the call."""
    judged = Judged(None, digest_of(chunks), any(unusable(chunk) for chunk in chunks))
    for owner, chunk in enumerate(chunks):
        want = split[owner][owner]
        index = _first_difference(chunk, want, 0 * want)
        if index is None:
            continue
        if _replaced(given, owner, chunks):
            return _with(judged, _new_tensor(owner))
        seen, look = _gathered(chunk, want, before[owner], index, owner, rank, split, marks_of)
        expected = f"chunk {owner} as it was on rank {owner}"
        return _with(judged, Finding(f"chunk {owner}, element {index} {seen}", expected, look))
    return _with(judged, _outside("the chunks") if touched else None)


def _gathered(
    got: torch.Tensor,
    want: torch.Tensor,
    before: torch.Tensor,
    index: int,
    owner: int,
    rank: int,
    split: list[tuple[torch.Tensor, ...]],
    marks_of: MarksOf,
) -> tuple[str, str]:
    first = "which chunk a rank may pass on: its own first, then always the one that came last"
    if owner == rank:
        return "has been overwritten, though it was finished", "a rank's own chunk is only sent, never received into"
    if torch.equal(got, before):
        return "still holds what was there before the call", f"whether the chunk arrived. Or {IN_PLACE}"
    if torch.equal(got, before + want):
        return "has been added to what was there before", "the second phase copies; only the first one adds"
    if bool(got.isnan().any()) and bool(before.isnan().any()):
        look = "what was there before the call is garbage: overwrite it, don't calculate with it"
        return "is nan, which is what was there before the call", look
    for other, part in enumerate(split):
        if torch.equal(got, part[owner]):
            return f"holds rank {other}'s unfinished copy", first
        if len(part[other]) == len(got) and torch.equal(got, part[other]):
            return f"holds what belongs in chunk {other}", first
    return _element(got, want, index, len(split), marks_of)[0], first


def _element(got: torch.Tensor, want: torch.Tensor, index: int, world_size: int, marks_of: MarksOf) -> tuple[str, str]:
    """What is wrong with one element, and where to look."""
    value, right = got[index].item(), want[index].item()
    digits = 8 if f"{value:.8g}" != f"{right:.8g}" else 17
    plain = f"is {value:.{digits}g}, not {right:.{digits}g}"
    if right and abs(value * world_size - right) <= 1e-3 * abs(right) and world_size > 1:
        return "has been divided by N: it is the average", "the contract says sum"
    mark = marks_of(world_size).read(value) if marks_of else None
    if mark is None:
        other = got.dtype not in (torch.float32, torch.int32)
        look = "whether it becomes another dtype on the way, in a buffer or in a sum" if other else ""
        return plain, look
    wrong = miscounted(mark.counts)
    if mark.position is None:
        return "adds up parts of different elements", "in each step, is what arrives added to the chunk that was sent?"
    right_mark = marks_of(world_size).read(right) if marks_of else None
    if right_mark is not None and right_mark.position is not None and mark.position != right_mark.position:
        away = mark.position - right_mark.position
        return (
            f"holds what belongs {abs(away)} place{'s' * (abs(away) > 1)} {'further on' if away > 0 else 'before'}",
            ("which chunk is sent and which one receives, step by step"),
        )
    return (f"is wrong: {wrong}" if wrong else plain), "which chunk is sent in each step, and how many steps there are"


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


def _replaced(given: Any, index: int, chunks: list[torch.Tensor]) -> bool:
    return index < len(given) and given[index] is not chunks[index]


def _new_tensor(index: int) -> Finding:
    seen = f"chunks[{index}] is a new tensor now; the one handed in has not got the result"
    return Finding(seen, "the result in the tensor that was handed in", IN_PLACE)


def _outside(what: str) -> Finding:
    return Finding(
        f"elements of the storage outside {what} have been changed",
        "only what was handed in changes: a tensor can be a view into a larger one",
        "the storage behind a view belongs to others too",
    )


def _with(judged: Judged, finding: Finding | None) -> Judged:
    return Judged(finding, judged.digest, judged.unusable)
