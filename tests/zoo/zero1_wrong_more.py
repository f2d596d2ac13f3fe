"""Lab 06: ZeRO-1 engines that are wrong in what they decide: overflow, scale, norm, options, the update itself."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from zoo import wrong
from zoo.zero1_base import ZERO1, Engine


@wrong(ZERO1, reason="values", says=r"not unscaled|never|scale")
class NeverUnscales(Engine):
    """The gradients in the step are scale times too large."""

    def factor(self, norm):
        return super().factor(norm) * self.scale


@wrong(ZERO1, reason="values", says=r"twice|scale")
class UnscalesTwice(Engine):
    """In own() and in factor()."""

    def own(self, bucket):
        return bucket.gradients[bucket.mine].float() / self.scale


@wrong(ZERO1, reason="values|crash|calls|hang|exchange", says=r"stepped|skipped|overflow|all_reduce")
class JudgesByItsOwnShard(Engine):
    """An overflow in another rank's chunk is not seen."""

    def norm(self):
        norm = super().norm()
        self.own_square = self.squares().item()
        return norm

    def fine(self, norm):
        return math.isfinite(self.own_square)


@wrong(ZERO1, reason="values", says=r"stepped")
class LooksAtTheLoss(Engine):
    """Overflow is an inf in the loss."""

    def backward(self, loss):
        self.bad = not math.isfinite(loss.item())
        super().backward(loss)

    def fine(self, norm):
        flag = torch.tensor([1.0 if self.bad else 0.0])
        self.communicator.all_reduce(flag).wait()
        return flag.item() == 0


@wrong(ZERO1, reason="values", says=r"stepped|skipped")
class LooksAtTheFirstBucket(Engine):
    """Buckets after the first may hold anything."""

    def squares(self):
        if not self.max_norm:
            first = self.own(self.buckets[-1])
            return torch.linalg.vector_norm(first, dtype=torch.float64).reshape(1) ** 2
        return super().squares()


@wrong(ZERO1, reason="values", says=r"stepped")
class MissesNan(Engine):
    """isinf alone."""

    def fine(self, norm):
        return not math.isinf(norm)


@wrong(ZERO1, reason="values", says=r"stepped|skipped|went from")
class ZeroesInsteadOfSkipping(Engine):
    """Gradients become 0, and the step is made."""

    def fine(self, norm):
        if not math.isfinite(norm):
            self.zero_grad()
            self.scale = max(self.scale / 2, 1.0)
            self.bad = True
        else:
            self.bad = False
        return True

    def step(self):
        super().step()
        return not self.bad


@wrong(ZERO1, reason="values", says=r"skipped step|over skips|counts")
class CountsSkippedSteps(Engine):
    """The step count moves in a skipped step."""

    def overflowed(self):
        super().overflowed()
        for bucket in self.buckets:
            bucket.steps += 1


@wrong(ZERO1, reason="values", says=r"scale")
class ScaleNeverMoves(Engine):
    """Skips, but keeps the scale."""

    def overflowed(self):
        pass


@wrong(ZERO1, reason="values", says=r"scale")
class NoFloor(Engine):
    """The scale halves for ever."""

    def overflowed(self):
        self.scale, self.good = self.scale / 2, 0


@wrong(ZERO1, reason="values", says=r"scale")
class GrowthCounterNotReset(Engine):
    """An overflow does not start the counting anew."""

    def overflowed(self):
        self.scale = max(self.scale / 2, 1.0)


@wrong(ZERO1, reason="values", says=r"scale")
class NeverGrows(Engine):
    """The scale only ever falls."""

    def grow(self):
        pass


@wrong(ZERO1, reason="values", says=r"scale|step")
class NewScaleForOldGradients(Engine):
    """The scale grows before the gradients are unscaled."""

    def factor(self, norm):
        self.grow_now()
        return super().factor(norm)

    def grow_now(self):
        super().grow()

    def grow(self):
        pass


@wrong(ZERO1, reason="values", says=r"scale|on rank")
class ScalesDiffer(Engine):
    """Only a rank that sees the overflow in its chunk halves its scale."""

    def overflowed(self):
        if not math.isfinite(self.squares().item()):
            super().overflowed()


@wrong(ZERO1, reason="values", says=r"rounded|has not moved|has become")
class UpdatesFp16Weights(Engine):
    """The master is made anew from the rounded weights in each step."""

    def update(self, bucket, factor):
        bucket.master.copy_(bucket.weights[bucket.mine])
        super().update(bucket, factor)


@wrong(ZERO1, reason="values", says=r"constructor's arguments for all groups|first group|options")
class GroupOptionsLost(Engine):
    """Only the parameters of a group are kept."""

    def make_groups(self, groups, options):
        return [{**options, "params": list(group["params"])} for group in groups]


@wrong(ZERO1, reason="values", says=r"first group|options")
class FirstGroupForAll(Engine):
    """One optimizer, with the first group's options."""

    def plan(self):
        return [(parameters, self.param_groups[0]) for parameters, _ in super().plan()]


@wrong(ZERO1, reason="values", says=r"param_groups is read anew")
class ScheduleIgnored(Engine):
    """Options are copied into the buckets."""

    def plan(self):
        return [(parameters, dict(group)) for parameters, group in super().plan()]


@wrong(ZERO1, reason="values", says=r"norm")
class LocalNorm(Engine):
    """Each rank clips by what it has."""

    def norm(self):
        own = self.squares().sqrt().item()
        self.own_norm = own
        return super().norm()

    def factor(self, norm):
        return super().factor(self.own_norm)


@wrong(ZERO1, reason="values", says=r"norm")
class LargestNorm(Engine):
    """The largest of the ranks' norms instead of the root of all squares."""

    def norm(self):
        norms = torch.zeros(dist.get_world_size(), dtype=torch.float64)
        norms[dist.get_rank()] = self.squares().sqrt().item()
        self.communicator.all_reduce(norms).wait()
        return norms.max().item() if norms.isfinite().all() else math.inf


@wrong(ZERO1, reason="values", says=r"norm")
class SumOfNorms(Engine):
    """Adds norms, not squares."""

    def norm(self):
        total = self.squares().sqrt()
        self.communicator.all_reduce(total).wait()
        return total.item()


@wrong(ZERO1, reason="values", says=r"clipping each group|norm")
class NormOfEachBucket(Engine):
    """Each bucket is clipped for itself."""

    def update(self, bucket, factor):
        if self.max_norm is not None:
            square = self.own(bucket).double().square().sum().reshape(1)
            self.communicator.all_reduce(square).wait()
            factor = super().factor(square.sqrt().item())
        super().update(bucket, factor)


@wrong(ZERO1, reason="values", says=r"still scaled|divided by the scale twice")
class NormStillScaled(Engine):
    """max_norm is compared with the norm of the scaled gradients."""

    def factor(self, norm):
        return super().factor(norm * self.scale)


@wrong(ZERO1, reason="values", says=r"not clipped")
class NeverClips(Engine):
    """max_norm is stored and forgotten."""

    def factor(self, norm):
        return 1 / self.scale


@wrong(ZERO1, reason="values", says=r"norm|clipp")
class NormBeforeTheReduction(Engine):
    """The mean of the norms of the ranks' own gradients."""

    def backward(self, loss):
        self.before = 0.0
        super().backward(loss)

    def take(self, bucket, place, parameter):
        super().take(bucket, place, parameter)
        self.before += parameter.grad.double().square().sum().item()

    def squares(self):
        return torch.tensor([self.before * dist.get_world_size()], dtype=torch.float64)


@wrong(ZERO1, reason="values", says=r"norm|clipp|has become")
class ClipsWithoutAMinimum(Engine):
    """max_norm / norm, also where that is more than 1."""

    def factor(self, norm):
        if self.max_norm is None:
            return 1 / self.scale
        return self.max_norm / (norm / self.scale + 1e-6) / self.scale


@wrong(ZERO1, reason="values", says=r"count|step")
class OneCountForAllBuckets(Engine):
    """The count goes up with each bucket."""

    count = 0

    def update(self, bucket, factor):
        self.count += 1
        bucket.steps = self.count - 1
        super().update(bucket, factor)


@wrong(ZERO1, reason="values", says=r"decay")
class CoupledDecay(Engine):
    """Adam with L2, not AdamW."""

    def adam(self, state, group, gradient, steps):
        gradient = gradient + group["weight_decay"] * state.master
        super().adam(state, {**group, "weight_decay": 0.0}, gradient, steps)


@wrong(ZERO1, reason="values", says=r"correct")
class NoBiasCorrection(Engine):
    """The moments as they are."""

    def adam(self, state, group, gradient, steps):
        super().adam(state, group, gradient, 10**6)


@wrong(ZERO1, reason="values", says=r"eps")
class EpsForgotten(Engine):
    """The default eps, whatever is given."""

    def adam(self, state, group, gradient, steps):
        super().adam(state, {**group, "eps": 1e-8}, gradient, steps)


@wrong(ZERO1, reason="values", says=r"step\(\) returned None")
class SaysNothing(Engine):
    """step() returns nothing."""

    def step(self):
        super().step()


@wrong(ZERO1, reason="values|calls|hang|crash", says=r"norm|calls|all_reduce|waits")
class ReturnsAtOnce(Engine):
    """A rank that sees an overflow leaves the step before the others know."""

    def norm(self):
        total = self.squares()
        if not total.isfinite().item():
            return math.inf
        self.communicator.all_reduce(total).wait()
        return total.sqrt().item()


@wrong(ZERO1, reason="values", says=r"not moved|has become|drift|bits")
class AveragesWeights(Engine):
    """Every rank updates its part; then the weights of all ranks are averaged."""

    def publish(self):
        for bucket in self.buckets:
            self.communicator.all_reduce(bucket.weights).wait()
            bucket.weights.div_(dist.get_world_size())


@wrong(ZERO1, reason="crash", says=r"not enough values|division|Error")
class FewerElementsThanRanks(Engine):
    """One bucket for each parameter, cut by torch.chunk, which makes fewer chunks than ranks."""

    def plan(self):
        return [([parameter], group) for parameters, group in super().plan() for parameter in parameters]

    def publish(self):
        for bucket in self.buckets:
            mine = bucket.weights[: sum(bucket.sizes)].chunk(dist.get_world_size())[dist.get_rank()]
            assert len(mine)
            self.communicator.all_gather(bucket.weights).wait()
