"""Lab 01: engines with a wrong update or wrong master weights."""

from __future__ import annotations

import torch

from . import wrong
from .states_engine import ENGINE, Engine

VANISH = r"60 updates of 0.0001 on float16 weights(?s:.*)1 has not moved(?s:.*)float32 master weights that live"


@wrong(ENGINE, reason="values", says=VANISH)
class UpdatesTheWeightsDirectly(Engine):
    """No master weights: the update is taken off the 16-bit weights."""

    def descend(self, p, s):
        mean, square = self.corrected(s)
        w = p.float() * (1 - self.lr * self.weight_decay)
        p.copy_(w - self.lr * mean / (square.sqrt() + self.eps))


@wrong(ENGINE, reason="values", says=VANISH)
class RebuildsTheMaster(Engine):
    """The master weights are made from the 16-bit weights in every step."""

    def descend(self, p, s):
        s["master"] = p.detach().to(torch.float32, copy=True)
        super().descend(p, s)


@wrong(ENGINE, reason="memory", says=r'"master"(?s:.*)share one memory')
class RebuildsTheMasterWithoutACopy(Engine):
    """As above, with float(): the parameter itself, where it is float32."""

    def descend(self, p, s):
        s["master"] = p.detach().float()
        super().descend(p, s)


@wrong(ENGINE, reason="memory", says=r'float16 weights of 1(?s:.*)"master" of parameter 0 in self.state is float16')
class MasterInSixteenBits(Engine):
    """The master is a copy, but of the same type."""

    def new_state(self, p):
        return {**super().new_state(p), "master": p.detach().clone()}


@wrong(
    ENGINE, reason="values", says=r'float32 weights: step 1: parameter 0(?s:.*)has not moved(?s:.*)"master" is right'
)
class NeverWritesBack(Engine):
    """The master weights move, the model's do not."""

    def write(self, p, master):
        pass


@wrong(ENGINE, reason="values", says=r'has not moved(?s:.*)"master" is right, the parameter is not its rounded copy')
class RebindsAName(Engine):
    """`p = master.half()` changes what the name p stands for."""

    def write(self, p, master):
        p = master.to(p.dtype)


@wrong(ENGINE, reason="memory", says=r'"master" of parameter 0 in self.state and a parameter share one memory')
class MakesTheWeightsFloat32(Engine):
    """p.data = master: now the model computes in fp32."""

    def write(self, p, master):
        p.data = master


@wrong(
    ENGINE, reason="memory", says=r'float16 weights of 1(?s:.*)"first_moment" of parameter 0 in self.state is float16'
)
class MomentsInSixteenBits(Engine):
    """zeros_like(p) has the type of p."""

    def new_state(self, p):
        return {**super().new_state(p), "first_moment": torch.zeros_like(p), "second_moment": torch.zeros_like(p)}

    def update(self, p):
        s, (b1, b2) = self.state[p], self.betas
        s["step"] += 1
        g = self.gradient(p)
        s["first_moment"].copy_(b1 * s["first_moment"].float() + (1 - b1) * g)
        s["second_moment"].copy_(b2 * s["second_moment"].float() + (1 - b2) * g * g)
        self.descend(p, s)

    def corrected(self, s):
        return tuple(one.float() for one in super().corrected(s))


@wrong(ENGINE, reason="values", says=r"without the bias corrections")
class NoBiasCorrection(Engine):
    """The moments as they are."""

    def corrected(self, s):
        return s["first_moment"], s["second_moment"]


@wrong(ENGINE, reason="values", says=r"bias correction of the second moment")
class CorrectsTheFirstOnly(Engine):
    """The second moment is not corrected."""

    def corrected(self, s):
        return super().corrected(s)[0], s["second_moment"]


@wrong(ENGINE, reason="values", says=r"inf or NaN, both moments are right: a division by zero\?(?s:.*)t = 1")
class CountsFromZero(Engine):
    """1 - beta**0 is 0."""

    def descend(self, p, s):
        s["step"] -= 1
        super().descend(p, s)
        s["step"] += 1


@wrong(ENGINE, reason="values", says=r"t one too high")
class CountsFromTwo(Engine):
    """The count goes up before and after."""

    def new_state(self, p):
        return {**super().new_state(p), "step": 1}


@wrong(ENGINE, reason="values", says=r"once per parameter instead of per step")
class OneCountForEachParameter(Engine):
    """One counter for the engine, which goes up inside the loop over the parameters."""

    def update(self, p):
        self.state[p]["step"] = self.count = getattr(self, "count", 0)
        super().update(p)
        self.count += 1


@wrong(ENGINE, reason="values", says=r"weight_decay=0.25: step 1(?s:.*)weight decay added to the gradient")
class CoupledDecay(Engine):
    """L2: Adam instead of AdamW."""

    def gradient(self, p):
        return super().gradient(p) + self.weight_decay * self.state[p]["master"]

    def descend(self, p, s):
        decay, self.weight_decay = self.weight_decay, 0.0
        super().descend(p, s)
        self.weight_decay = decay


@wrong(ENGINE, reason="values", says=r"weight decay that is not multiplied by the learning rate")
class DecayWithoutLearningRate(Engine):
    """W *= 1 - weight_decay."""

    def descend(self, p, s):
        s["master"].mul_((1 - self.weight_decay) / (1 - self.lr * self.weight_decay))
        super().descend(p, s)


@wrong(ENGINE, reason="values", says=r"applied after the update")
class DecaysAfterwards(Engine):
    """Takes the decay off the new weights."""

    def descend(self, p, s):
        decay, self.weight_decay = self.weight_decay, 0.0
        super().descend(p, s)
        self.weight_decay = decay
        s["master"].mul_(1 - self.lr * decay)
        self.write(p, s["master"])


@wrong(ENGINE, reason="values", says=r"without weight decay")
class ForgetsTheDecay(Engine):
    """weight_decay is stored and never used."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.weight_decay = 0.0


@wrong(ENGINE, reason="values", says=r"eps inside the square root")
class EpsInside(Engine):
    """sqrt(v + eps)."""

    def corrected(self, s):
        mean, square = super().corrected(s)
        return mean, ((square + self.eps).sqrt() - self.eps) ** 2


@wrong(ENGINE, reason="values", says=r"eps added before the bias correction")
class EpsHat(Engine):
    """The short form of section 2 of Adam's paper: its eps means something else."""

    def descend(self, p, s):
        (b1, b2), t, w = self.betas, s["step"], s["master"]
        rate = self.lr * (1 - b2**t) ** 0.5 / (1 - b1**t)
        w.mul_(1 - self.lr * self.weight_decay)
        w.sub_(rate * s["first_moment"] / (s["second_moment"].sqrt() + self.eps))
        self.write(p, w)


@wrong(ENGINE, reason="values", says=r"beta1 and beta2 swapped")
class SwapsBetas(Engine):
    """Unpacks them the other way round."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.betas = self.betas[::-1]


@wrong(ENGINE, reason="values", says=r"betas = \(0.9, 0.999\)")
class IgnoresBetas(Engine):
    """Has 0.9 and 0.999 in its code."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.betas = (0.9, 0.999)


@wrong(ENGINE, reason="values", says=r"beta and 1 - beta swapped")
class WeightsTheWrongWay(Engine):
    """m = (1 - beta) m + beta g."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.betas = tuple(1 - beta for beta in self.betas)


@wrong(ENGINE, reason="values", says=r"added instead of subtracted")
class GoesUphill(Engine):
    """The sign."""

    def corrected(self, s):
        mean, square = super().corrected(s)
        return -mean, square


@wrong(ENGINE, reason="values", says=r"lr = 1e-3: is the argument used")
class IgnoresTheLearningRate(Engine):
    """Has its own."""

    def descend(self, p, s):
        self.lr = 1e-3
        super().descend(p, s)


@wrong(ENGINE, reason="values", says=r"without the square root")
class ForgetsTheRoot(Engine):
    """Divides by the variance."""

    def corrected(self, s):
        mean, square = super().corrected(s)
        return mean, square**2


@wrong(ENGINE, reason="values", says=r"float32 weights: step \d: parameter")
class ClipsTheGradients(Engine):
    """Nobody asked for it."""

    def gradient(self, p):
        return super().gradient(p).clamp(-1, 1)
