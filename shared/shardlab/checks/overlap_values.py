"""Lab 05: how parameters and gradients on one rank are judged, and what wrong ones are taken for."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from .ddp_words import Guess, averaging_guesses, broadcasting_guesses, close, numbers, recognise
from .notes import Finding
from .overlap_mirror import Expected

START = "after construction"


def judge_start(
    model: nn.Module, own: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor], rank: int
) -> Finding | None:
    """After construction every parameter and buffer is rank 0's. own: this rank's before."""
    for name, tensor in model.state_dict().items():
        if torch.equal(tensor, right[name]):
            continue
        values = [right[name].double(), *[own[name].double()] * rank]
        guess = recognise(tensor.detach(), torch.float32, broadcasting_guesses(values, rank)) if rank else None
        held = guess.words if guess else numbers(tensor)
        kind = "parameter" if name in dict(model.named_parameters()) else "buffer"
        look = "rank 0's parameters and buffers are broadcast when the engine is made"
        return Finding(f"{START} the {kind} '{name}' is {held}", f"rank 0's: {numbers(right[name])}", look)
    return None


def judge_gradients(
    model: nn.Module,
    expected: Mapping[str, Expected],
    rank: int,
    before: Mapping[str, torch.Tensor | None],
    micros: int,
) -> Finding | None:
    """The first parameter whose `.grad` is not the mean. before: the means of the step before."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            if parameter.grad is None:
                continue
            return Finding(f"the frozen parameter '{name}' has a gradient now", "None: it takes part in nothing")
        finding = _judge(name, parameter, expected[name], rank, before.get(name), micros)
        if finding is not None:
            return finding
    return None


def _judge(
    name: str, parameter: nn.Parameter, right: Expected, rank: int, before: torch.Tensor | None, micros: int
) -> Finding | None:
    seen, mean = parameter.grad, right.mean
    if seen is None:
        if mean is None:
            return None
        had = right.local[rank] is not None
        words = f"'{name}'.grad is None" if had else f"'{name}'.grad is None: this rank did not use it, others did"
        look = "a rank without a gradient takes part with zeros, and keeps the mean as its p.grad"
        return Finding(words, f"the mean over the ranks: {numbers(mean)}", look)
    if seen.shape != parameter.shape or seen.dtype != parameter.dtype:
        dtype = str(seen.dtype).removeprefix("torch.")
        return Finding(f"'{name}'.grad is a {dtype} tensor of shape {tuple(seen.shape)}", "as the parameter itself")
    seen = seen.detach()
    zeros = torch.zeros(parameter.shape, dtype=torch.float64)
    wanted = zeros if mean is None else mean
    if close(seen, wanted, parameter.dtype):
        return None
    unused = "no rank used it" if mean is None else ""
    expected = "zeros or None, alike on all ranks" if mean is None else f"the mean over the ranks: {numbers(mean)}"
    if not bool(seen.isfinite().all()):
        look = "nan marks a reduction that is still on its way, or memory that nothing was written to"
        return Finding(f"'{name}'.grad holds {numbers(seen)}", expected, look)
    guess = recognise(seen, parameter.dtype, _guesses(right, rank, before, micros))
    if guess is not None:
        return Finding(f"'{name}'.grad is {guess.words}", expected, guess.look)
    look = "which elements of which bucket end up here, and when were they filled?"
    if micros > 1:
        look = "which micro-steps are reduced, and what stands in p.grad then?"
    return Finding(f"'{name}'.grad is {numbers(seen)}", expected, unused or look)


def _guesses(right: Expected, rank: int, before: torch.Tensor | None, micros: int) -> list[Guess]:
    n = len(right.local)
    zeros = torch.zeros_like(right.parameters[0])
    local = [zeros if one is None else one for one in right.local]
    mean = torch.stack(local).sum(0) / n
    guesses = averaging_guesses(right.local, rank, right.parameters)
    guesses += [
        Guess(local[rank] + mean, "the mean added to this rank's own gradient", "the mean replaces p.grad: copy_"),
    ]
    if micros > 1:
        last = torch.stack([zeros if one is None else one for one in right.last])
        look = "reduce what has been accumulated in p.grad, not what this backward adds"
        guesses += [
            Guess(last.sum(0) / n, "the mean of the last micro-step alone", look),
            Guess(last[rank], "this rank's own gradient of the last micro-step alone", look),
            Guess(local[rank] - last[rank] + last.sum(0) / n, "averaged in the last micro-step only", look),
            Guess(mean - last.sum(0) / n, "the mean without the last micro-step", look),
            Guess(
                mean - last.sum(0) / n + last[rank],
                "averaged in all micro-steps but the last",
                "gradients are reduced outside no_sync(), and not inside",
            ),
        ]
    if before is not None:
        look = "what a bucket keeps from step to step must be reset: counters, handles, its contents"
        guesses += [
            Guess(before, "the mean of the step before", look),
            Guess(before / n, "the mean of the step before, divided by N", look),
            Guess(before + mean, "this step's mean added to that of the step before", look),
        ]
    return guesses
