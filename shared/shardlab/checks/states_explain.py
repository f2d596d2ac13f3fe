"""Why gradients or weights are wrong: by what was done to them, and by what an engine keeps in its state."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .states_close import close
from .states_reference import Expected
from .states_script import Script

Kept = Sequence[dict[str, torch.Tensor] | None]


def about_gradient(
    script: Script,
    number: int,
    parameter: int,
    seen: torch.Tensor,
    wanted: torch.Tensor,
    gradient: torch.Tensor,
    scale: float,
) -> str:
    """Words for a `.grad` after backward that is not what it should be. gradient: the loss's own, unscaled."""
    dtype, times = script.dtype(parameter), script.steps[number].backwards
    lost = "what underflows in backward stays zero: multiply the loss by the scale, before its backward"
    if not seen.any() and wanted.any():
        return lost
    if close(seen, (gradient * times).to(dtype)) and scale != 1:
        return "backward: the loss is to be multiplied by the scale before its backward"
    if close(seen, ((gradient.to(dtype) * times) * scale).to(dtype)):
        return lost
    if times > 1 and close(seen, wanted / times):
        return "backward adds to .grad, as loss.backward() does: who wants it empty calls zero_grad()"
    if number:
        return "is the old gradient still there? zero_grad() is called after every step"
    return ""


def about_moments(script: Script, number: int, kept: Kept, before: Kept, wanted: Expected) -> str:
    """Words for the first moment that is not what it should be; "" when all are. number: of the step, from 0."""
    for parameter, state in enumerate(kept):
        if state is None or not wanted.first[parameter].any():
            continue
        for place, name in enumerate(("first_moment", "second_moment")):
            right = (wanted.first, wanted.second)[place][parameter].reshape(-1)
            seen, beta = state[name].double(), script.option("betas")[place]
            if _near(seen, right):
                continue
            earlier = before[parameter] if parameter < len(before) else None
            told = _moment(script, number, seen, right, beta, name)
            if torch.equal(state[name], earlier[name] if earlier else torch.zeros_like(state[name])):
                told = f'"{name}" is what it was before the step: write the new one into self.state'
            return f"parameter {parameter}: {told}"
    return ""


def _moment(script: Script, number: int, seen: torch.Tensor, right: torch.Tensor, beta: float, name: str) -> str:
    symbol, what, index = ("m", "g", 1) if name == "first_moment" else ("v", "g*g", 2)
    rule = f"beta{index} {symbol} + (1 - beta{index}) {what}"
    at = int((seen - right).abs().nan_to_num(torch.inf).argmax())
    numbers = f'"{name}" is {float(seen[at]):.6g}, and should be {float(right[at]):.6g}: {rule}'
    if number == 0 and _near(seen, right * beta / (1 - beta)):
        return f"{numbers}. beta and 1 - beta are swapped; {symbol}.lerp_(x, w) is (1 - w) {symbol} + w x"
    if number == 0 and index == 2 and _near(seen.abs(), (right * (1 - beta)).sqrt()):
        return f"{numbers}. It took in g, not g*g"
    return numbers


def about_weights(kept: Kept, weights: Sequence[torch.Tensor], wanted: Expected) -> str:
    """Words where both moments are right and some weight is not."""
    for parameter, state in enumerate(kept):
        if state is None:
            continue
        master, right = state["master"], wanted.weights[parameter].reshape(-1)
        weight = weights[parameter].reshape(-1)
        if not _near(master.double(), right):
            at = int((master.double() - right).abs().nan_to_num(torch.inf).argmax())
            return (
                f'parameter {parameter}: both moments are right, "master" is {float(master[at]):.6g} and should be'
                f" {float(right[at]):.6g}: look at the last formula"
            )
        if not torch.equal(master.to(weight.dtype), weight):
            return (
                f'parameter {parameter}: "master" is right, the parameter is not its rounded copy:'
                " parameter.copy_(master) writes it"
            )
    return ""


def _near(one: torch.Tensor, other: torch.Tensor) -> bool:
    room = 2e-5 * float(other.abs().max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=1e-4, atol=room)
