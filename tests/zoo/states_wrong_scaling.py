"""Lab 01: engines that scale or unscale in a wrong way, or change the scale at the wrong time."""

from __future__ import annotations

from . import wrong
from .states_engine import ENGINE, Engine


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
