"""What an engine must do, in float64 and without haste; and what it does with one well-known mistake.

A variation is a mistake by name. When what was seen agrees with a variation, the verdict can say what was done.
Source of the update: AdamW, Loshchilov & Hutter 2019, algorithm 2, with lr as PyTorch's AdamW has it (it multiplies
the decay, too); of halving and doubling the scale: PyTorch's GradScaler.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .states_script import Script

# What a learner reads when the numbers are those of the variation.
VARIATIONS = {
    "unscaled in 16 bits": "the gradient became zero when it was unscaled in 16 bits: convert it to float32, then"
    " divide",
    "never unscaled": "these are the numbers of gradients that were never divided by the scale",
    "unscaled twice": "these are the numbers of gradients that were divided by the scale twice",
    "new scale": "these are the numbers of gradients divided by the scale after it had grown: unscale first, grow last",
    "no correction": "these are the numbers without the bias corrections 1 - beta**t",
    "first uncorrected": "these are the numbers without the bias correction of the first moment, 1 - beta1**t",
    "second uncorrected": "these are the numbers without the bias correction of the second moment, 1 - beta2**t",
    "count over skips": "these are the numbers of a step count that also counts the skipped steps",
    "count ahead": "these are the numbers of bias corrections with t one too high: the first step is t = 1",
    "count per parameter": "these are the numbers of a step count that goes up once per parameter instead of per step",
    "coupled decay": "these are the numbers of weight decay added to the gradient; AdamW takes it off the weights",
    "no decay": "these are the numbers without weight decay",
    "decay without lr": "these are the numbers of weight decay that is not multiplied by the learning rate",
    "decay after": "these are the numbers of weight decay that is applied after the update, to the new weights",
    "eps inside": "these are the numbers of eps inside the square root",
    "eps uncorrected": "these are the numbers of eps added before the bias correction of the second moment",
    "no eps": "these are the numbers without eps",
    "default eps": "these are the numbers of eps = 1e-8: is the argument used?",
    "default betas": "these are the numbers of betas = (0.9, 0.999): are the arguments used?",
    "default lr": "these are the numbers of lr = 1e-3: is the argument used?",
    "betas swapped": "these are the numbers of beta1 and beta2 swapped",
    "weights swapped": "these are the numbers of beta and 1 - beta swapped",
    "uphill": "these are the numbers of the update added instead of subtracted",
    "no root": "these are the numbers without the square root of the second moment",
    "first moment only": "these are the numbers of the first moment's step without dividing by the second",
    "plain": "these are the numbers of plain gradient descent",
    "not squared": "these are the numbers of a second moment of the gradient itself instead of its square",
    "rounded": "these are the numbers of weights rounded to 16 bits in every step: small updates are lost. They must"
    " add up in float32 master weights that live from step to step",
    "global count": "these are the numbers of one step count for all parameters",
}


@dataclass(frozen=True)
class Expected:
    """What must be seen on one rank in one step. weights: float64, before they are rounded to the parameters' dtype."""

    gradients: list[torch.Tensor | None]  # in `.grad` after backward: times the scale, rounded to the dtype
    overflow: bool
    scale: float  # afterwards
    weights: list[torch.Tensor]
    first: list[torch.Tensor]  # the moments, float64
    second: list[torch.Tensor]


def scales(script: Script, world_size: int) -> list[tuple[float, bool, float]]:
    """For each step: the scale before it, whether any rank overflows, and the scale after it."""
    scale, good = float(script.option("scale")), 0
    found = []
    for number in range(len(script.steps)):
        bad = any(
            gradient is not None and not gradient.isfinite().all()
            for rank in range(world_size)
            for gradient in _at_step(script, number, rank, scale)
        )
        before = scale
        good = 0 if bad else good + 1
        if bad:
            scale = max(scale / 2, 1.0)
        elif good == script.option("growth_interval"):
            scale, good = scale * 2, 0
        found.append((before, bad, scale))
    return found


def held(script: Script, number: int, rank: int, scale: float) -> list[torch.Tensor | None]:
    """What `.grad` holds after all backwards of a step, in the parameters' dtypes."""
    one = [
        None if gradient is None else (gradient * scale).float().to(script.dtype(parameter))
        for parameter, gradient in enumerate(script.gradients(number, rank))
    ]
    return [None if each is None else each * script.steps[number].backwards for each in one]


def _at_step(script: Script, number: int, rank: int, scale: float) -> list[torch.Tensor | None]:
    """What `.grad` holds when `step` is called."""
    factor = 0.5 if script.steps[number].between else 1.0
    return [None if each is None else each * factor for each in held(script, number, rank, scale)]


def expected(script: Script, rank: int, world_size: int, how: str = "") -> list[Expected]:
    """Step by step, what must be seen on this rank. how: a variation's name, to see what that would give."""
    weights = script.weights(rank)
    first, second = [w.new_zeros(w.shape) for w in weights], [w.new_zeros(w.shape) for w in weights]
    counts, steps_done = [0] * len(weights), 0
    found = []
    for number, (scale, overflow, next_scale) in enumerate(scales(script, world_size)):
        steps_done += not overflow or how == "count over skips"
        for parameter, gradient in enumerate(_at_step(script, number, rank, scale)):
            if overflow or gradient is None:
                continue
            counts[parameter] += 1
            t = steps_done if how in ("global count", "count over skips") else counts[parameter]
            if how == "count per parameter":
                t = (counts[parameter] - 1) * len(weights) + parameter + 1
            true = gradient.double() / (next_scale if how == "new scale" else scale)
            if how == "unscaled in 16 bits":
                true = (gradient / scale).double()
            if how == "never unscaled":
                true = true * scale
            if how == "unscaled twice":
                true = true / scale
            weights[parameter], first[parameter], second[parameter] = _update(
                script, weights[parameter], first[parameter], second[parameter], true, t, how
            )
            if how == "rounded":
                weights[parameter] = weights[parameter].to(script.dtype(parameter)).double()
        gradients = held(script, number, rank, scale)
        found.append(Expected(gradients, overflow, next_scale, list(weights), list(first), list(second)))
    return found


def _update(
    script: Script, w: torch.Tensor, m: torch.Tensor, v: torch.Tensor, g: torch.Tensor, t: int, how: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One AdamW step of one parameter: new weights and moments."""
    lr = 1e-3 if how == "default lr" else script.option("lr")
    beta1, beta2 = (0.9, 0.999) if how == "default betas" else script.option("betas")
    eps = {"default eps": 1e-8, "no eps": 0.0}.get(how, script.option("eps"))
    decay = 0.0 if how == "no decay" else script.option("weight_decay")
    if how == "betas swapped":
        beta1, beta2 = beta2, beta1
    if how == "weights swapped":
        beta1, beta2 = 1 - beta1, 1 - beta2
    if how == "coupled decay":
        g, decay = g + decay * w, 0.0
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * (g if how == "not squared" else g * g)
    t += how == "count ahead"
    mean = m if how in ("no correction", "first uncorrected") else m / (1 - beta1**t)
    spread = v if how in ("no correction", "second uncorrected") else v / (1 - beta2**t)
    if how == "eps inside":
        update = mean / (spread + eps).sqrt()
    elif how == "eps uncorrected":
        update = mean * (1 - beta2**t) ** 0.5 / (v.sqrt() + eps)
    elif how == "no root":
        update = mean / (spread + eps)
    elif how == "first moment only":
        update = mean
    elif how == "plain":
        update = g
    else:
        update = mean / (spread.sqrt() + eps)
    if how == "uphill":
        update = -update
    shrunk = 1 - (decay if how == "decay without lr" else lr * decay)
    new = (w - lr * update) * shrunk if how == "decay after" else w * shrunk - lr * update
    return new, m, v
