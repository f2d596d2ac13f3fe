"""Lab 01: engines whose state is not what the contract says, and that change what is the caller's."""

from __future__ import annotations

import torch

from . import wrong
from .states_engine import ENGINE, Engine

KINDS = ("master", "first_moment", "second_moment")


@wrong(ENGINE, reason="memory", says=r'"master"(?s:.*)share one memory(?s:.*)copy=True')
class FloatAliasesFloat32(Engine):
    """`.float()` of an fp32 parameter is the parameter: 8 bytes per element instead of 12."""

    def new_state(self, p):
        return {**super().new_state(p), "master": p.detach().float()}


@wrong(ENGINE, reason="signature", says=r"the engine has no attribute state(?s:.*)later|has no attribute state")
class KeepsThreeDicts(Engine):
    """A dict for each kind, and no `state`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.states = self.state
        del self.state

    def update(self, p):
        self.state = self.states
        super().update(p)
        del self.state


@wrong(ENGINE, reason="signature", says=r"no entry for parameter 0; its keys are of type int")
class KeyedById(Engine):
    """id(p) instead of p."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.state = {id(p): state for p, state in self.state.items()}

    def update(self, p):
        kept, self.state = self.state, {p: self.state[id(p)]}
        super().update(p)
        self.state = kept


@wrong(
    ENGINE, reason="signature", says=r'"first_moment" of parameter 0 in self.state is missing; there is "master", "m"'
)
class HasNamesOfItsOwn(Engine):
    """m and v, as in the formulas."""

    def update(self, p):
        names = {"m": "first_moment", "v": "second_moment"}
        self.state[p] = {names.get(name, name): value for name, value in self.state[p].items()}
        super().update(p)
        names = {"first_moment": "m", "second_moment": "v"}
        self.state[p] = {names.get(name, name): value for name, value in self.state[p].items()}


@wrong(ENGINE, reason="memory", says=r'"step" in self.state is a tensor(?s:.*)a count is a plain number')
class CountsInATensor(Engine):
    """As torch does it: 4 bytes more per parameter."""

    def new_state(self, p):
        return {**super().new_state(p), "step": torch.zeros(())}


@wrong(ENGINE, reason="values", says=r"after step\(\) the .grad of parameter 0 is None(?s:.*)zero_grad")
class ClearsInStep(Engine):
    """zero_grad at the end of step, to be helpful."""

    def step(self):
        stepped = super().step()
        self.zero_grad()
        return stepped


@wrong(ENGINE, reason="values", says=r"overflow(?s:.*)after step\(\) the .grad of parameter \d is None")
class ThrowsOverflowsAway(Engine):
    """A skipped step takes the gradients with it."""

    def shrink(self):
        super().shrink()
        self.zero_grad()


@wrong(ENGINE, reason="values", says=r"backward\(loss\) changed the caller's loss from 1 to 1024")
class ScalesTheLossInPlace(Engine):
    """loss *= scale: the number that is printed afterwards is not the loss."""

    def backward(self, loss):
        loss *= self.scale
        loss.backward()


@wrong(ENGINE, reason="values", says=r'step 2(?s:.*)"first_moment" is what it was before the step')
class ForgetsTheMoments(Engine):
    """The new moments are used, and not stored."""

    def update(self, p):
        s = self.state[p]
        old = {name: s[name].clone() for name in ("first_moment", "second_moment")}
        super().update(p)
        s.update(old)


@wrong(ENGINE, reason="values", says=r'"first_moment" is (?s:.*)beta and 1 - beta are swapped; m.lerp_')
class LerpsTheWrongWay(Engine):
    """m.lerp_(g, beta): the gradient gets beta's weight. The second moment is right."""

    def update(self, p):
        s, (b1, b2) = self.state[p], self.betas
        s["step"] += 1
        g = self.gradient(p)
        s["first_moment"].lerp_(g, b1)
        s["second_moment"].lerp_(g * g, 1 - b2)
        self.descend(p, s)


@wrong(ENGINE, reason="values", says=r'"second_moment" is (?s:.*)took in g, not g\*g')
class TakesTheGradientUnsquared(Engine):
    """v from g: roots of negative numbers."""

    def update(self, p):
        s, (b1, b2) = self.state[p], self.betas
        s["step"] += 1
        g = self.gradient(p)
        s["first_moment"].lerp_(g, 1 - b1)
        s["second_moment"].lerp_(g, 1 - b2)
        self.descend(p, s)


@wrong(ENGINE, reason="values", says=r"both moments are right, \"master\" is (?s:.*)look at the last formula")
class DividesByTheSquare(Engine):
    """No mistake that has a name: twice the denominator."""

    def corrected(self, s):
        mean, square = super().corrected(s)
        return mean, 4 * square


@wrong(ENGINE, reason="values", says=r"2\*\*-30(?s:.*)became zero when it was unscaled in 16 bits")
class UnscalesInSixteenBitsWithDecay(Engine):
    """The inverse scale is a tensor of the gradient's type."""

    def gradient(self, p):
        return (p.grad * torch.tensor(1 / self.scale, dtype=p.dtype)).float()
