"""Lab 06: right ZeRO-1 engines, written in other ways."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from zoo import right
from zoo.zero1_base import ZERO1, Bucket, Engine


@right(ZERO1)
class Plain(Engine):
    """Equal flat slices, reduce-scatter and all-gather."""


@right(ZERO1)
class ByAllReduce(Engine):
    """All-reduce, then only the own part is used: right, and 3 units instead of 2."""

    def launch(self, bucket):
        bucket.handle = self.communicator.all_reduce(bucket.gradients)


@right(ZERO1)
class OneBucketForEachParameter(Engine):
    """Every parameter is cut for itself: with few elements some ranks own nothing of it but padding."""

    def plan(self):
        return [([parameter], group) for parameters, group in super().plan() for parameter in parameters]


class Owned(Bucket):
    """Whole buckets have one owner."""

    def chunk_of(self, total, count):
        return total

    def __init__(self, parameters, group):
        self.owner = self.choose(parameters)
        super().__init__(parameters, group)

    def choose(self, parameters):
        raise NotImplementedError

    def make_state(self):
        total = sum(self.sizes)
        self.weights = self.weights[:total].clone()
        for parameter, view in zip(self.parameters, self.views(self.weights), strict=True):
            parameter.data = view
        self.gradients = torch.zeros_like(self.weights)
        self.mine = slice(0, total if self.owner == dist.get_rank() else 0)
        super().make_state()


class WholeBuckets(Engine):
    """Reduce to the owner, broadcast from it."""

    def launch(self, bucket):
        bucket.handle = self.communicator.reduce(bucket.gradients, bucket.owner)

    def publish(self):
        handles = [self.communicator.broadcast(bucket.weights, bucket.owner) for bucket in self.buckets]
        for handle in handles:
            handle.wait()


@right(ZERO1)
class RoundRobin(WholeBuckets):
    """Whole parameters, each a bucket, to the ranks in turn, the largest first. Tiny ones included."""

    def plan(self):
        parts = [([parameter], group) for parameters, group in super().plan() for parameter in parameters]
        by_size = sorted((parameter for (parameter,), _ in parts), key=lambda parameter: -parameter.numel())
        self.turn = {parameter: place for place, parameter in enumerate(by_size)}
        return parts

    def make(self, parameters, group):
        turn = self.turn[parameters[0]]

        class Mine(Owned):
            def choose(self, parameters):
                return turn % dist.get_world_size()

        return Mine(parameters, group)


@right(ZERO1)
class Greedy(WholeBuckets):
    """Whole parameters to whoever owns least so far, the largest first."""

    def plan(self):
        parts = [([parameter], group) for parameters, group in super().plan() for parameter in parameters]
        held = [0] * dist.get_world_size()
        self.owner = {}
        for (parameter,), _ in sorted(parts, key=lambda part: -part[0][0].numel()):
            self.owner[parameter] = held.index(min(held))
            held[self.owner[parameter]] += parameter.numel()
        return parts

    def make(self, parameters, group):
        owner = self.owner[parameters[0]]

        class Mine(Owned):
            def choose(self, parameters):
                return owner

        return Mine(parameters, group)


@right(ZERO1)
class BroadcastPerOwner(Engine):
    """A broadcast of each rank's chunk instead of an all-gather."""

    def publish(self):
        for bucket in self.buckets:
            parts = list(enumerate(bucket.weights.chunk(dist.get_world_size())))
            for handle in [self.communicator.broadcast(part, owner) for owner, part in parts]:
                handle.wait()


@right(ZERO1)
class UnscaledAtOnce(Engine):
    """The own chunk is turned to fp32 and unscaled before the norm is taken."""

    @torch.no_grad()
    def step(self):
        true = {bucket: super(UnscaledAtOnce, self).own(bucket).float() / self.scale for bucket in self.buckets}
        square = sum((each.double().square().sum() for each in true.values()), torch.zeros((), dtype=torch.float64))
        square = square.reshape(1)
        self.communicator.all_reduce(square).wait()
        if not square.isfinite().item():
            self.overflowed()
            return False
        clip = 1.0
        if self.max_norm is not None:
            clip = min(1.0, self.max_norm / (square.sqrt().item() + 1e-6))
        for bucket, gradient in true.items():
            bucket.steps += 1
            self.adam(bucket, bucket.group, gradient * clip, bucket.steps)
            self.write(bucket)
        self.publish()
        self.grow()
        return True


@right(ZERO1)
class FlagByMax(Engine):
    """A flag of its own, by the library's MAX, and the norm only where it is needed."""

    def norm(self):
        flag = torch.tensor([0.0 if all(self.own(bucket).isfinite().all() for bucket in self.buckets) else 1.0])
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        if flag.item():
            return math.inf
        return super().norm() if self.max_norm is not None else 0.0


@right(ZERO1)
class FlagBySum(Engine):
    """Counts the ranks that overflowed, looking at the gradients as they arrive and after the sum."""

    bad = False

    def take(self, bucket, place, parameter):
        self.bad = self.bad or not bool(parameter.grad.isfinite().all())
        super().take(bucket, place, parameter)

    def zero_grad(self):
        self.bad = False
        super().zero_grad()

    def norm(self):
        self.bad = self.bad or not math.isfinite(self.squares().item())
        numbers = torch.tensor([float(self.bad), 0.0 if self.bad else self.squares().item()], dtype=torch.float64)
        self.communicator.all_reduce(numbers).wait()
        return math.inf if numbers[0].item() else numbers[1].sqrt().item()


@right(ZERO1)
class GradientsAreViews(Engine):
    """.grad is a view of the flat gradients from the start: autograd adds right there."""

    def hook(self):
        super().hook()
        self.point()

    def point(self):
        for bucket in self.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views(bucket.gradients), strict=True):
                parameter.grad = view

    def take(self, bucket, place, parameter):
        pass

    def drop(self, parameter):
        pass


@right(ZERO1)
class DividesLater(Engine):
    """Sums, and divides when the gradient is read."""

    def scaled(self, loss):
        return loss * self.scale

    def take(self, bucket, place, parameter):
        bucket.views(bucket.gradients)[place].add_(parameter.grad / dist.get_world_size())


@right(ZERO1)
class ByFutures(ByAllReduce):
    """Waits for the library's future, where there is one."""

    def land(self, bucket):
        if hasattr(bucket.handle, "get_future"):
            bucket.handle.get_future().wait()
        super().land(bucket)


@right(ZERO1)
class InAThread(Engine):
    """One thread starts and awaits the collectives, in order."""

    def hook(self):
        super().hook()
        self.thread = ThreadPoolExecutor(1)

    def launch(self, bucket):
        work = self.thread.submit(lambda: self.communicator.reduce_scatter(bucket.gradients).wait())

        class Handle:
            def wait(self):
                work.result()

        bucket.handle = Handle()


class RowSlices(Bucket):
    """Every parameter is padded to a multiple of N and cut; chunk r is the r-th slice of each, one behind the other."""

    def __init__(self, parameters, group):
        count = dist.get_world_size()
        self.padded = [-(-parameter.numel() // count) * count for parameter in parameters]
        super().__init__(parameters, group)

    def make_state(self):
        count, rank = dist.get_world_size(), dist.get_rank()
        self.weights = torch.cat(
            [
                torch.cat([parameter.data.flatten(), parameter.data.new_zeros(padded - parameter.numel())])
                for parameter, padded in zip(self.parameters, self.padded, strict=True)
            ]
        )
        self.gradients = torch.zeros_like(self.weights)
        self.slices = [piece.view(count, -1) for piece in self.weights.split(self.padded)]
        for parameter, view in zip(self.parameters, self.views(self.weights), strict=True):
            parameter.data = view
        own = torch.cat([one[rank] for one in self.slices])
        self.master = own.float()
        self.first, self.second = torch.zeros_like(self.master), torch.zeros_like(self.master)

    def views(self, flat):
        pieces = flat.split(self.padded) if len(flat) == sum(self.padded) else None
        if pieces is None:
            return super().views(flat)
        return [
            piece[: parameter.numel()].view(parameter.shape)
            for piece, parameter in zip(pieces, self.parameters, strict=True)
        ]

    def sliced(self, flat):
        count = dist.get_world_size()
        return torch.cat([piece.view(count, -1) for piece in flat.split(self.padded)], 1).reshape(-1)


@right(ZERO1)
class SlicesOfEachParameter(Engine):
    """A slice of every parameter for each rank; a copy is made for the way. fp32 weights have masters of their own."""

    make = RowSlices

    def launch(self, bucket):
        bucket.travelling = bucket.sliced(bucket.gradients)
        bucket.handle = self.communicator.reduce_scatter(bucket.travelling)

    def land(self, bucket):
        bucket.handle.wait()
        bucket.handle = None
        own = bucket.travelling.view(dist.get_world_size(), -1)[dist.get_rank()]
        bucket.travelling = None
        bucket.gradients.zero_()
        sizes = [one.shape[1] for one in bucket.slices]
        for piece, part in zip(bucket.gradients.split(bucket.padded), own.split(sizes), strict=True):
            piece.view(dist.get_world_size(), -1)[dist.get_rank()].copy_(part)

    def own(self, bucket):
        return bucket.sliced(bucket.gradients).view(dist.get_world_size(), -1)[dist.get_rank()]

    def write(self, bucket):
        pass

    def publish(self):
        for bucket in self.buckets:
            count = dist.get_world_size()
            flat = torch.empty_like(bucket.weights).view(count, -1)
            flat[dist.get_rank()].copy_(bucket.master)
            self.communicator.all_gather(flat.view(-1)).wait()
            for one, part in zip(bucket.slices, flat.split([one.shape[1] for one in bucket.slices], 1), strict=True):
                one.copy_(part)


@right(ZERO1)
class OneTinyBarrierMore(Engine):
    """Barriers, and a flag that nobody needs."""

    def step(self):
        dist.barrier()
        flag = torch.ones(1)
        dist.all_reduce(flag)
        return super().step()
