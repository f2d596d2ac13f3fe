"""Lab 01: engines whose ranks do not decide alike, or talk too much."""

from __future__ import annotations

import torch
import torch.distributed as dist

from . import wrong
from .states_engine import ENGINE, Engine

APART = r"N = 2(?s:.*)returned True \(rank 0 (stepped|skipped), rank 1 (stepped|skipped)\)"


@wrong(ENGINE, reason="values", says=APART)
class DecidesAlone(Engine):
    """Only the rank with the overflow skips."""

    def agreed(self, bad):
        return bad


@wrong(ENGINE, reason="values", says=r"N = 2(?s:.*)step\(\) returned True")
class TakesTheSmallest(Engine):
    """MIN: all skip only when all overflow."""

    def agreed(self, bad):
        flag = torch.tensor(float(bad))
        if dist.is_initialized():
            dist.all_reduce(flag, dist.ReduceOp.MIN)
        return flag.item() > 0


@wrong(ENGINE, reason="values", says=r"on rank 1 only: step\(\) returned True")
class RankZeroDecides(Engine):
    """Rank 0's flag is broadcast."""

    def agreed(self, bad):
        flag = torch.tensor(float(bad))
        if dist.is_initialized():
            dist.broadcast(flag, src=0)
        return flag.item() > 0


@wrong(ENGINE, reason="values", says=r"step\(\) returned True")
class WantsExactlyOne(Engine):
    """SUM, and compares with 1: two ranks with an overflow cancel."""

    def agreed(self, bad):
        flag = torch.tensor(float(bad))
        if dist.is_initialized():
            dist.all_reduce(flag)
        return flag.item() == 1


@wrong(ENGINE, reason="values", says=r"step\(\) returned True")
class WantsAllRanks(Engine):
    """SUM, and compares with N."""

    def agreed(self, bad):
        flag = torch.tensor(float(bad))
        if dist.is_initialized():
            dist.all_reduce(flag)
            return flag.item() == dist.get_world_size()
        return bad


@wrong(
    ENGINE,
    reason="calls",
    says=r"rank 0, N = 2(?s:.*)this rank calls all_reduce, rank 1 does not(?s:.*)dist.all_reduce\(",
)
class SpeaksOnlyInNeed(Engine):
    """Only a rank with an overflow takes part in the all-reduce."""

    def agreed(self, bad):
        if bad and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(torch.tensor(1.0), dist.ReduceOp.MAX)
        return bad


@wrong(ENGINE, reason="calls|hang|crash", says=r"N = 2")
class LeavesEarlyWithoutGradients(Engine):
    """A rank without gradients returns before the all-reduce."""

    def step(self):
        if all(p.grad is None for p in self.parameters):
            return True
        return super().step()


@wrong(ENGINE, reason="calls", says=r"N = 2(?s:.*)step makes 4 all_reduce calls(?s:.*)one all-reduce for all")
class AsksForEachParameter(Engine):
    """One all-reduce per parameter with a gradient."""

    def overflow(self, parameters):
        return any([Engine.agreed(self, not p.grad.isfinite().all()) for p in parameters])

    def agreed(self, bad):
        return bad


@wrong(ENGINE, reason="calls", says=r"step makes 10 all_reduce calls(?s:.*)one all-reduce for all")
class AsksTooOften(Engine):
    """The same flag, ten times."""

    def agreed(self, bad):
        return any([super(AsksTooOften, self).agreed(bad) for _ in range(10)])


@wrong(ENGINE, reason="values|calls|bytes|hang|crash", says=r"N = 2")
class AveragesTheGradients(Engine):
    """Reduces the gradients too, which is lab 03's task."""

    def overflow(self, parameters):
        for p in parameters:
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        return super().overflow(parameters)


@wrong(ENGINE, reason="values|order", says=r"N = 2")
class ForgetsToWait(Engine):
    """async_op=True without wait: the flag may not be there yet."""

    def agreed(self, bad):
        flag = torch.tensor(float(bad))
        if dist.is_initialized() and dist.get_world_size() > 1:
            self.work = dist.all_reduce(flag, dist.ReduceOp.MAX, async_op=True)
        return flag.item() > 0


@wrong(ENGINE, reason="values", says=r"N = 2(?s:.*)an overflow halves the scale")
class HalvesOnlyItsOwnScale(Engine):
    """All skip, but only the rank with the overflow lowers its scale."""

    def agreed(self, bad):
        self.own = bad
        return super().agreed(bad)

    def shrink(self):
        if self.own:
            super().shrink()
        else:
            self.good = 0


@wrong(ENGINE, reason="crash", says=r"without a process group(?s:.*)process group has not been initialized")
class NeedsAProcessGroup(Engine):
    """Asks for the world size without looking whether there is one."""

    def agreed(self, bad):
        if dist.get_world_size() > 1:
            return super().agreed(bad)
        return bad


@wrong(ENGINE, reason="values", says=r"N = 2(?s:.*)returned True")
class StepsBeforeItKnows(Engine):
    """The local answer decides about the step, the common one about the scale and what is returned."""

    @torch.no_grad()
    def step(self):
        with_gradient = [p for p in self.parameters if p.grad is not None]
        bad = self.overflow(with_gradient)
        if not bad:
            self.update_all(with_gradient)
        self.shrink() if self.agreed(bad) else self.grow()
        return not bad


@wrong(ENGINE, reason="values", says=r"N = 2(?s:.*)step\(\) skipped, yet parameter 0")
class SaysWhatAllSayAfterStepping(Engine):
    """As above, and returns the common answer: only the weights tell."""

    @torch.no_grad()
    def step(self):
        with_gradient = [p for p in self.parameters if p.grad is not None]
        bad = self.overflow(with_gradient)
        if not bad:
            self.update_all(with_gradient)
        bad = self.agreed(bad)
        self.shrink() if bad else self.grow()
        return not bad
