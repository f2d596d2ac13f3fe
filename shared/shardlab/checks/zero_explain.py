"""Labs 06 to 08: why weights are wrong, where a well-known mistake explains the numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .zero_mirror import VARIATIONS, expected
from .zero_stage import ZERO3

if TYPE_CHECKING:
    from .zero_judge import Judge


def explained(judge: Judge, number: int, rank: int, place: int, element: int) -> str:
    """Words for where to look, or ""."""
    from .zero_judge import excess

    case, n = judge.case, len(judge.played)
    weight = judge.step(rank, number).weights[place].reshape(-1)
    if not bool(weight.isfinite().all()):
        return "nan marks what has not arrived: an operation that was not waited for, or memory nobody wrote to"
    told = _stale(judge, number, rank, place, element)
    if told:
        return told
    for how, words in VARIATIONS.items():
        if how in case.accepts or how == "one rank":
            continue
        if n == 1 and how in ("sum", "divided twice", "clipped by sum", "reduced again"):
            continue
        other = expected(case, n, how)[number]
        right = expected(case, n)[number]
        if all(excess(case, a.to(case.torch_dtype), b) <= 0 for a, b in zip(other.weights, right.weights, strict=True)):
            continue  # this case does not tell them apart
        if all(bool(each.isfinite().all()) for each in other.weights) and judge.agree(number, other):
            return words
    if n > 1 and any(_one_rank(judge, number, rank, how) for how in ("one rank", "one rank's share")):
        return VARIATIONS["one rank"]
    if case.option("max_norm") is not None:
        norm = expected(case, n)[number].norm
        return f"the norm is that of the mean gradient, over all ranks' parts and all groups: here {norm:.6g}, unscaled"
    return ""


def _one_rank(judge: Judge, number: int, rank: int, how: str) -> bool:
    """Whether every element follows one rank's own gradient, not the same rank's everywhere, perhaps."""
    from .zero_judge import excess

    case, n = judge.case, len(judge.played)
    if number:
        return False
    ways = [expected(case, n, how, other)[number].weights for other in range(n)]
    for place, weight in enumerate(judge.step(rank, number).weights):
        flat = weight.reshape(-1)
        for at in range(flat.numel()):
            if not any(excess(case, flat[at : at + 1], way[place].reshape(-1)[at : at + 1]) <= 0 for way in ways):
                return False
    return True


def _stale(judge: Judge, number: int, rank: int, place: int, element: int) -> str:
    """When the element has not moved on this rank, and has elsewhere."""
    from .zero_judge import excess

    def moved(other: int) -> bool:
        now = judge.step(other, number).weights[place].reshape(-1)[element]
        return bool(now != judge.before(other, number, place).reshape(-1)[element])

    if moved(rank):
        return ""
    right = expected(judge.case, len(judge.played))[number].weights[place].reshape(-1)[element : element + 1]
    for other in range(len(judge.played)):
        there = judge.step(other, number).weights[place].reshape(-1)[element : element + 1]
        if other != rank and moved(other) and excess(judge.case, there, right) <= 0:
            return f"rank {other} has the new weight and rank {rank} the old one: it was never sent, or not received"
    if all(
        torch.equal(judge.step(other, number).weights[place], judge.before(other, number, place))
        for other in range(len(judge.played))
    ):
        if judge.trial.exercise == ZERO3.exercise:
            return (
                "it moves on no rank: weights that were whole, or on their way, outlived the step and are old now; or"
                " nobody owns it"
            )
        return "it moves on no rank: who owns it, and is what that rank updates the memory that the model uses?"
    return ""
