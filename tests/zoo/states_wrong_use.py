"""Lab 01: engines that stumble over parameters, hold too much, or lack a part."""

from __future__ import annotations

import torch

from . import wrong
from .states_engine import ENGINE, Engine


@wrong(ENGINE, reason="crash", says=r"without a gradient(?s:.*)'NoneType' object has no attribute")
class CrashesWithoutAGradient(Engine):
    """Every parameter is taken to have one."""

    @torch.no_grad()
    def step(self):
        if self.agreed(self.overflow(self.parameters)):
            self.shrink()
            return False
        self.update_all(self.parameters)
        self.grow()
        return True


@wrong(ENGINE, reason="values", says=r"without a gradient: step 1: parameter 1")
class ZeroForNone(Engine):
    """None counts as zeros: the parameter decays."""

    def step(self):
        for p in self.parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        return super().step()


@wrong(ENGINE, reason="values", says=r"without a gradient: step 1: parameter [23](?s:.*)has not moved")
class StopsAtTheFirstWithoutAGradient(Engine):
    """break instead of continue."""

    def update_all(self, with_gradient):
        for p in self.parameters:
            if p.grad is None:
                break
            self.update(p)


@wrong(ENGINE, reason="crash", says=r"no gradient at all(?s:.*)(max|cat|stack)\(")
class NeedsOneGradient(Engine):
    """The maximum of an empty list."""

    def overflow(self, parameters):
        return not torch.stack([p.grad.abs().max().float() for p in parameters]).max().isfinite()


@wrong(ENGINE, reason="signature", says=r"as a generator: step 1: self.state has no entry for parameter 0; it is empty")
class ConsumesTheGenerator(Engine):
    """Goes through the parameters twice, the second time through nothing."""

    def __init__(self, parameters, *args, **kwargs):
        count = sum(1 for _ in parameters)
        assert count >= 0
        super().__init__(parameters, *args, **kwargs)


@wrong(ENGINE, reason="values", says=r"\.grad is(?s:.*)zero_grad\(\) is called after every step|after zero_grad\(\)")
class ZeroGradDoesNothing(Engine):
    """Forgotten."""

    def zero_grad(self):
        pass


@wrong(ENGINE, reason="crash", says=r"leaf Variable that requires grad|requires grad")
class WithoutNoGrad(Engine):
    """Autograd follows the update."""

    def step(self):
        with torch.enable_grad():
            for p in self.parameters:
                if p.grad is not None:
                    p += 0
        return super().step()


@wrong(ENGINE, reason="memory", says=r"65,536 bytes(?s:.*)16 per element(?s:.*)fp32 gradients")
class KeepsTheUnscaledGradients(Engine):
    """fp32 gradients that stay between steps."""

    def gradient(self, p):
        self.state[p]["true"] = super().gradient(p)
        return self.state[p]["true"]


@wrong(ENGINE, reason="memory", says=r"16 per element")
class KeepsTheLargestSecondMoment(Engine):
    """AMSGrad's third tensor, unused."""

    def new_state(self, p):
        return {**super().new_state(p), "largest": torch.zeros(p.shape)}


@wrong(ENGINE, reason="memory", says=r'"master" of parameter 0 in self.state is float64')
class InFloat64(Engine):
    """Better safe than sorry: everything in fp64."""

    def new_state(self, p):
        return {k: v.double() if torch.is_tensor(v) else v for k, v in super().new_state(p).items()}

    def gradient(self, p):
        return p.grad.double() / self.scale


@wrong(ENGINE, reason="memory", says=r"per element(?s:.*)is something kept from step to step")
class KeepsAHistory(Engine):
    """The master weights of every step, for a plot."""

    def write(self, p, master):
        self.state[p].setdefault("history", []).append(master.clone())
        super().write(p, master)


@wrong(ENGINE, reason="memory", says=r"on top of what is held")
class CopiesEverythingThrice(Engine):
    """Backups of all states before a step."""

    def update_all(self, with_gradient):
        backups = [
            {p: {k: v.clone() for k, v in s.items() if torch.is_tensor(v)} for p, s in self.state.items()}
            for _ in range(3)
        ]
        super().update_all(with_gradient)
        del backups


@wrong(ENGINE, reason="signature", says=r"growth_interval(?s:.*)the class itself, made with")
class WithoutAGrowthInterval(Engine):
    """The constructor lacks an argument."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, scale=2.0**16):
        super().__init__(parameters, lr, betas, eps, weight_decay, scale)


@wrong(ENGINE, reason="signature", says=r"no attribute scale")
class HidesItsScale(Engine):
    """The scale has another name."""

    def __getattribute__(self, name):
        if name == "scale":
            raise AttributeError(name)
        return super().__getattribute__("scale" if name == "loss_scale" else name)

    def backward(self, loss):
        (loss * self.loss_scale).backward()

    def gradient(self, p):
        return p.grad.float() / self.loss_scale


@wrong(ENGINE, reason="signature", says=r"no method zero_grad\(\)")
class WithoutZeroGrad(Engine):
    """zero_grad is missing."""

    zero_grad = None


@wrong(ENGINE, reason="values", says=r"step\(\) returned a generator")
class YieldsItsAnswer(Engine):
    """A generator: its body never runs."""

    def step(self):
        yield True


@wrong(ENGINE, reason="not written", says="not written yet")
class Stub(Engine):
    """As handed out."""

    def new_state(self, p):
        raise NotImplementedError("not written yet")


@wrong(ENGINE, reason="not written", says="not written yet")
class StubOfStep(Engine):
    """The constructor is written, step is not."""

    def step(self):
        raise NotImplementedError("not written yet")
