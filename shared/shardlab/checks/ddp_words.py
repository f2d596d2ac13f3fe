"""Lab 03: says what a tensor holds instead of what it should, by comparing it with what usual mistakes leave there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Absolute and relative: what another order of summing and dividing may change in values of up to some hundreds.
TOLERANCE = {
    torch.float64: (1e-9, 1e-12),
    torch.float32: (2e-4, 1e-5),
    torch.float16: (1.5, 5e-3),
    torch.bfloat16: (8.0, 3e-2),
}


OWN = "this rank's own gradient: it has not been averaged"


@dataclass(frozen=True)
class Guess:
    """What a tensor may hold by mistake: float64 values, what they are in words, and what to do about it."""

    values: torch.Tensor
    words: str
    look: str = ""


def close(seen: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a tensor of `dtype` holds these float64 values, but for rounding."""
    absolute, relative = TOLERANCE[dtype]
    return torch.allclose(seen.double(), expected, rtol=relative, atol=absolute)


def recognise(seen: torch.Tensor, dtype: torch.dtype, guesses: Sequence[Guess]) -> Guess | None:
    """The first guess that fits. An empty tensor fits nothing."""
    if not seen.numel():
        return None
    return next((guess for guess in guesses if close(seen, guess.values, dtype)), None)


def numbers(values: torch.Tensor) -> str:
    """ "-120, 60, ..." """
    flat = values.detach().reshape(-1).double().tolist()
    return ", ".join(f"{value:.6g}" for value in flat[:3]) + (", ..." if len(flat) > 3 else "")


def averaging_guesses(
    gradients: Sequence[torch.Tensor | None], rank: int, parameters: Sequence[torch.Tensor]
) -> list[Guess]:
    """gradients[r], parameters[r]: rank r's before, float64; None where a rank has no gradient."""
    n = len(gradients)
    present = [one for one in gradients if one is not None]
    filled = [torch.zeros_like(parameters[0]) if one is None else one for one in gradients]
    total = torch.stack(filled).sum(0)
    mean = total / n
    divide = f"divide by the world size, here {n}"
    few = Guess(total / len(present or [0]), "the sum divided by the number of ranks that have a gradient", divide)
    guesses = [
        *([few] if len(present) < n else []),
        Guess(filled[rank], OWN, "the result must end up in p.grad"),
        Guess(total, "the sum over the ranks, not divided by N", divide),
        Guess(mean / n, "the mean divided by N once more", "divide once: before the all-reduce or after it"),
        Guess(total / 2, f"the sum divided by 2; there are {n} ranks", divide),
        Guess(filled[rank] / n, "this rank's own gradient divided by N: nothing of the other ranks has arrived"),
        Guess(total * n, "N times the sum: reduced twice", "one all-reduce for each parameter, also for a tied one"),
        Guess(torch.stack(list(parameters)).sum(0) / n, "the mean of the parameters", "p.grad is meant, not p"),
        Guess(torch.stack(list(parameters)).sum(0), "the sum of the parameters", "p.grad is meant, not p"),
    ]
    guesses += [
        Guess(one, f"rank {other}'s gradient", "the mean, on every rank")
        for other, one in enumerate(filled)
        if other != rank
    ]
    zeros = torch.zeros_like(total)
    rounded = "rounded down to whole numbers"
    guesses += [
        Guess(torch.stack([(one / n).floor() for one in filled]).sum(0), rounded, "/ divides, // rounds down"),
        Guess(mean.floor(), rounded, "/ divides, // rounds down"),
    ]
    return [*guesses, Guess(zeros, "zeros", "a rank's gradient is overwritten before it is added")]


def broadcasting_guesses(values: Sequence[torch.Tensor], rank: int) -> list[Guess]:
    """values[r]: what rank r had before, float64."""
    total = torch.stack(list(values)).sum(0)
    guesses = [
        Guess(values[rank], "still this rank's own", "the result must end up in the tensor of the module"),
        Guess(total / len(values), "the mean over the ranks", "rank 0's values, not an average"),
        Guess(total, "the sum over the ranks", "rank 0's values"),
        Guess(torch.zeros_like(total), "zeros", "rank 0's values"),
    ]
    return guesses + [
        Guess(one, f"rank {other}'s", "rank 0's values: src=0")
        for other, one in enumerate(values)
        if other not in (0, rank)
    ]
