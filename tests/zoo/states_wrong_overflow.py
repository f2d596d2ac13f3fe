"""Lab 01: engines that miss overflows, see some that are none, or change something in a skipped step."""

from __future__ import annotations

import torch

from . import wrong
from .states_engine import ENGINE, Engine


@wrong(ENGINE, reason="values", says=r"overflow(?s:.*)step\(\) returned True(?s:.*)any inf or NaN")
class LooksAtTheLoss(Engine):
    """The loss is finite where a gradient is not."""

    def backward(self, loss):
        self.bad = not loss.isfinite()
        super().backward(loss)

    def overflow(self, parameters):
        return self.bad


@wrong(ENGINE, reason="values", says=r"a gradient nan in parameter [1-3], element \d: step\(\) returned True")
class LooksAtTheFirstTensor(Engine):
    """The first gradient stands for all."""

    def overflow(self, parameters):
        return super().overflow(parameters[:1])


@wrong(ENGINE, reason="values", says=r"in parameter [012], element \d+: step\(\) returned True")
class OverwritesItsFinding(Engine):
    """The loop keeps the answer of the last gradient only."""

    def overflow(self, parameters):
        bad = False
        for p in parameters:
            bad = not p.grad.isfinite().all()
        return bad


@wrong(ENGINE, reason="values", says=r"in parameter \d, element [1-9]\d*: step\(\) returned True")
class LooksAtTheFirstElement(Engine):
    """One element of each gradient."""

    def overflow(self, parameters):
        return any(not p.grad.view(-1)[0].isfinite() for p in parameters)


@wrong(ENGINE, reason="values", says=r"a gradient nan in parameter \d, element \d: step\(\) returned True")
class MissesNaN(Engine):
    """isinf alone."""

    def overflow(self, parameters):
        return any(p.grad.isinf().any() for p in parameters)


@wrong(ENGINE, reason="values", says=r"a gradient inf in parameter \d, element \d: step\(\) returned True")
class MissesInf(Engine):
    """isnan alone."""

    def overflow(self, parameters):
        return any(p.grad.isnan().any() for p in parameters)


@wrong(ENGINE, reason="values", says=r"a gradient -inf in parameter 1, element 2: step\(\) returned True")
class MissesMinusInf(Engine):
    """The largest is inf or NaN; the smallest is not looked at."""

    def overflow(self, parameters):
        return any(not p.grad.max().isfinite() for p in parameters)


@wrong(ENGINE, reason="values", says=r"a gradient nan in parameter \d, element \d: step\(\) returned True")
class ComparesWithTheLargest(Engine):
    """NaN is not larger than anything."""

    def overflow(self, parameters):
        return any((p.grad.abs() > torch.finfo(p.grad.dtype).max).any() for p in parameters)


@wrong(
    ENGINE,
    reason="values",
    says=r"gradients are finite, the largest in .grad is 32768: step\(\) returned False",
)
class SumsInSixteenBits(Engine):
    """The sum of finite fp16 numbers can be inf."""

    def overflow(self, parameters):
        return any(not p.grad.abs().sum().isfinite() for p in parameters)


@wrong(ENGINE, reason="values", says=r"gradients are finite, the largest in .grad is 131072: step\(\) returned False")
class HasAThreshold(Engine):
    """Takes large gradients for overflows."""

    def overflow(self, parameters):
        return super().overflow(parameters) or any(p.grad.abs().max() > 1e4 for p in parameters)


@wrong(ENGINE, reason="values", says=r"step\(\) skipped, yet parameter 0, element \d+ went from")
class FindsOutOnTheWay(Engine):
    """Looks at each gradient just before its update: the first parameters have moved by then."""

    @torch.no_grad()
    def step(self):
        for p in self.parameters:
            if p.grad is None:
                continue
            if self.agreed(not p.grad.isfinite().all()):
                self.shrink()
                return False
            self.update(p)
        self.grow()
        return True


@wrong(ENGINE, reason="values", says=r"step\(\) skipped, yet parameter")
class SkipsOneParameter(Engine):
    """Leaves out the parameter with the overflow, and updates the others."""

    @torch.no_grad()
    def step(self):
        good = [p for p in self.parameters if p.grad is not None and p.grad.isfinite().all()]
        bad = [p for p in self.parameters if p.grad is not None and not p.grad.isfinite().all()]
        self.update_all(good)
        if self.agreed(bool(bad)):
            self.shrink()
            return False
        self.grow()
        return True


@wrong(ENGINE, reason="values", says=r"step\(\) skipped, yet parameter \d, element \d+ went from")
class ZeroesTheGradients(Engine):
    """Steps with zeros instead of skipping: the old first moment moves the weights on."""

    @torch.no_grad()
    def step(self):
        with_gradient = [p for p in self.parameters if p.grad is not None]
        bad = self.agreed(self.overflow(with_gradient))
        if bad:
            for p in with_gradient:
                p.grad.zero_()
        self.update_all(with_gradient)
        self.shrink() if bad else self.grow()
        return not bad


@wrong(ENGINE, reason="values", says=r"step\(\) skipped, yet parameter")
class ReplacesInfByNumbers(Engine):
    """nan_to_num, and on."""

    @torch.no_grad()
    def step(self):
        with_gradient = [p for p in self.parameters if p.grad is not None]
        bad = self.agreed(self.overflow(with_gradient))
        for p in with_gradient:
            p.grad.nan_to_num_(0.0, 0.0, 0.0)
        self.update_all(with_gradient)
        self.shrink() if bad else self.grow()
        return not bad


@wrong(ENGINE, reason="values", says=r"step count that also counts the skipped steps")
class CountsSkips(Engine):
    """The step count goes up at the start of step, whatever comes."""

    def shrink(self):
        super().shrink()
        for s in self.state.values():
            s["step"] += 1


@wrong(ENGINE, reason="values", says=r"overflow(?s:.*)parameter \d, float32, element")
class MomentsDecayInASkip(Engine):
    """The moments move in a skip, the weights do not: it shows one step later."""

    def shrink(self):
        super().shrink()
        for s in self.state.values():
            s["first_moment"] *= self.betas[0]
            s["second_moment"] *= self.betas[1]


@wrong(ENGINE, reason="values", says=r"step\(\) skipped, yet parameter 0")
class DecaysInASkip(Engine):
    """Weight decay comes before the overflow is looked for."""

    @torch.no_grad()
    def step(self):
        for p in self.parameters:
            if p.grad is not None:
                self.state[p]["master"].mul_(1 - self.lr * self.weight_decay)
                p.copy_(self.state[p]["master"])
        decay, self.weight_decay = self.weight_decay, 0.0
        answer = super().step()
        self.weight_decay = decay
        return answer


@wrong(ENGINE, reason="values", says=r"an engine that never had them|parameter \d, float32")
class MasterMovesALittleInASkip(Engine):
    """The master weights are rounded to fp16 when a step is skipped."""

    def shrink(self):
        super().shrink()
        for s in self.state.values():
            s["master"].copy_(s["master"].bfloat16())


@wrong(ENGINE, reason="values", says=r"step\(\) returned None(?s:.*)True when it stepped")
class SaysNothing(Engine):
    """step without return."""

    def step(self):
        super().step()


@wrong(ENGINE, reason="values", says=r"finite(?s:.*)step\(\) returned False")
class SaysTheOpposite(Engine):
    """True stands for an overflow."""

    def step(self):
        return not super().step()


@wrong(ENGINE, reason="values", says=r"step\(\) returned True(?s:.*)any inf or NaN")
class AlwaysSaysTrue(Engine):
    """Skips, and says it stepped."""

    def step(self):
        super().step()
        return True
