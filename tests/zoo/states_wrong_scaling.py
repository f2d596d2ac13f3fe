"""Lab 01: engines that scale, look for overflows, or skip in a wrong way."""

from __future__ import annotations

import torch

from . import wrong
from .states_engine import Engine
from .states_right import ENGINE


@wrong(ENGINE, reason="values", says=r"float32 weights: step 1: parameter 0(?s:.*)never divided by the scale")
class NeverUnscales(Engine):
    """The moments take in scaled gradients. Adam nearly hides it."""

    def gradient(self, p):
        return p.grad.float()


@wrong(ENGINE, reason="values", says=r"divided by the scale twice")
class UnscalesTwice(Engine):
    """Once in place, to look for overflows, and once for the update."""

    def overflow(self, parameters):
        for p in parameters:
            p.grad /= self.scale
        return super().overflow(parameters)


@wrong(
    ENGINE, reason="values", says=r"gradients of 2\*\*-30(?s:.*)has not moved(?s:.*)became zero when it was unscaled"
)
class UnscalesInSixteenBits(Engine):
    """Divides first, then converts to fp32."""

    def gradient(self, p):
        return (p.grad / self.scale).float()


@wrong(ENGINE, reason="values", says=r"gradients of 2\*\*-30(?s:.*)became zero when it was unscaled")
class UnscalesInPlace(Engine):
    """Divides .grad itself, in its own 16 bits."""

    def update_all(self, with_gradient):
        for p in with_gradient:
            p.grad.div_(self.scale)
        super().update_all(with_gradient)

    def gradient(self, p):
        return p.grad.float()


@wrong(ENGINE, reason="values", says=r"gradients of 2\*\*-30(?s:.*)\.grad is -?0,(?s:.*)what underflows in backward")
class ScalesAfterBackward(Engine):
    """Multiplies the gradients instead of the loss."""

    def backward(self, loss):
        before = {p: None if p.grad is None else p.grad.clone() for p in self.parameters}
        loss.backward()
        for p in self.parameters:
            if p.grad is not None:
                old = before[p]
                p.grad = p.grad * self.scale if old is None else old + (p.grad - old) * self.scale


@wrong(ENGINE, reason="values", says=r"loss is to be multiplied by the scale before")
class NeverScales(Engine):
    """Backward of the loss as it is; the update divides all the same."""

    def backward(self, loss):
        loss.backward()


@wrong(ENGINE, reason="values", says=r"loss is to be multiplied by the scale before")
class IgnoresTheScale(Engine):
    """No scaling at all, in both places: right in fp32."""

    def backward(self, loss):
        loss.backward()

    def gradient(self, p):
        return p.grad.float()


@wrong(ENGINE, reason="values", says=r"two backwards(?s:.*)backward adds to .grad")
class BackwardClearsFirst(Engine):
    """Calls zero_grad at the start of backward: no accumulation."""

    def backward(self, loss):
        self.zero_grad()
        super().backward(loss)


@wrong(ENGINE, reason="values", says=r"times that|scale")
class ScalesByTheFirstScale(Engine):
    """backward uses the scale that the constructor got, for ever."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.first_scale = self.scale

    def backward(self, loss):
        (loss * self.first_scale).backward()


@wrong(ENGINE, reason="values", says=r"parameter 0(?s:.*)expected")
class UnscalesByTheFirstScale(Engine):
    """The inverse scale is computed once, in the constructor."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.inverse = 1 / self.scale

    def gradient(self, p):
        return p.grad.float() * self.inverse


@wrong(ENGINE, reason="values", says=r"growth_interval=3(?s:.*)after it had grown")
class GrowsBeforeItUnscales(Engine):
    """The scale doubles first, and the update divides by the new one."""

    def update_all(self, with_gradient):
        self.grow()
        super().update_all(with_gradient)
        self.grow = lambda: None

    def step(self):
        self.__dict__.pop("grow", None)
        return super().step()


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
            s["first"] *= self.betas[0]
            s["second"] *= self.betas[1]


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


@wrong(ENGINE, reason="values", says=r"scale 1024 after from 1024: overflow 1024(?s:.*)512: an overflow halves")
class KeepsTheScale(Engine):
    """Skips for ever: the next gradients overflow again."""

    def shrink(self):
        self.good = 0


@wrong(ENGINE, reason="values", says=r"halves the scale, never below 1")
class QuartersTheScale(Engine):
    """Divides by 4."""

    def shrink(self):
        self.scale, self.good = max(self.scale / 4, 1.0), 0


@wrong(ENGINE, reason="values", says=r"a low scale(?s:.*)scale 0.5 (?s:.*)never below 1")
class HasNoFloor(Engine):
    """Halves for ever."""

    def shrink(self):
        self.scale, self.good = self.scale / 2, 0


@wrong(ENGINE, reason="values", says=r"scale=1.5(?s:.*)scale 0.75 (?s:.*)never below 1")
class LooksBeforeItHalves(Engine):
    """Halves whatever is above 1, and so gets below."""

    def shrink(self):
        self.good = 0
        if self.scale > 1:
            self.scale /= 2


@wrong(ENGINE, reason="values", says=r"growth_interval=3(?s:.*)in a row without overflow, counted anew")
class CountsOnAfterAnOverflow(Engine):
    """An overflow does not reset the growth counter."""

    def shrink(self):
        self.scale = max(self.scale / 2, 1.0)


@wrong(ENGINE, reason="values", says=r"growth_interval=3(?s:.*)counted anew")
class GrowsInEveryStep(Engine):
    """The growth counter is not reset when the scale has grown."""

    def grow(self):
        self.good += 1
        if self.good >= self.growth_interval:
            self.scale *= 2


@wrong(ENGINE, reason="values", says=r"growth_interval=3(?s:.*)growth_interval = 3")
class NeverGrows(Engine):
    """Only ever halves."""

    def grow(self):
        pass


@wrong(ENGINE, reason="values", says=r"growth_interval = 3")
class GrowsOneStepLate(Engine):
    """More than growth_interval steps."""

    def grow(self):
        self.good += 1
        if self.good > self.growth_interval:
            self.scale, self.good = self.scale * 2, 0


@wrong(ENGINE, reason="values", says=r"growth_interval = 3")
class GrowsByTheNumberOfSteps(Engine):
    """Every third step, whether the last one overflowed or not."""

    def grow(self):
        self.total = getattr(self, "total", 0) + 1
        if self.total % self.growth_interval == 0:
            self.scale *= 2

    def shrink(self):
        self.total = getattr(self, "total", 0) + 1
        super().shrink()


@wrong(ENGINE, reason="values", says=r"two engines in turn|scale")
class SharesItsScale(Engine):
    """The scale and the counter belong to the class: a second engine changes the first one's."""

    shared = {}

    def __init__(self, *args, **kwargs):
        self.shared.clear()
        super().__init__(*args, **kwargs)

    @property
    def scale(self):
        return self.shared["scale"]

    @scale.setter
    def scale(self, value):
        self.shared["scale"] = value
