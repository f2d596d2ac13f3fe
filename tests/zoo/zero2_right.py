"""Lab 07: ZeRO-2 engines that are right, written in their own ways."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
import torch.distributed as dist

from zoo import right
from zoo.zero2_base import ZERO2, Bucket, Engine


@right(ZERO2)
class OneBucketPerParameter(Engine):
    """No two parameters share a bucket. Hooks are on the graph's AccumulateGrad nodes."""

    def size_of_bucket(self):
        return 0

    def hook(self, bucket, place, parameter):
        node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_: self.arrived(bucket, place, parameter))
        self.nodes = [*getattr(self, "nodes", []), node]  # or they are made anew, without the hook


@right(ZERO2)
class ShardInFloat32(Engine):
    """Sums are added up in fp32: 4 bytes for an element of the shard instead of 2. Divided by N after the sum."""

    class make(Bucket):  # noqa: N801
        def __init__(self, parameters, group):
            super().__init__(parameters, group)
            self.gradient = self.gradient.float()

    def scaled(self, loss):
        return loss * self.scale

    def add(self, bucket):
        bucket.gradient.add_(bucket.flat[bucket.mine].float() / dist.get_world_size())


@right(ZERO2)
class SideDictionary(Engine):
    """The shard exists only between backward and zero_grad, in a dictionary. A flag of its own for overflow."""

    class make(Bucket):  # noqa: N801
        sums: dict = {}

        def __init__(self, parameters, group):
            super().__init__(parameters, group)
            del self.gradient

        def __getattr__(self, name):
            if name != "gradient":
                raise AttributeError(name)
            if id(self) not in self.sums:
                self.sums[id(self)] = self.weights.new_zeros(self.chunk)
            return self.sums[id(self)]

    def zero_grad(self):
        self.make.sums.clear()

    def norm(self):
        bad = torch.tensor([float(any(not bucket.gradient.isfinite().all() for bucket in self.buckets))])
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        if bad.item():
            return math.inf
        return 0.0 if self.max_norm is None else super().norm()


@right(ZERO2)
class FinishesInACallback(Engine):
    """The rest is sent in a callback at the end of backward. Divides by the root of N, twice."""

    def arrived(self, bucket, place, parameter):
        if self.active and not self.asked:
            self.asked = True
            torch.autograd.Variable._execution_engine.queue_callback(super().finish)
        super().arrived(bucket, place, parameter)

    def backward(self, loss):
        self.asked = False
        super().backward(loss)

    def finish(self):
        if not self.asked:
            super().finish()

    def scaled(self, loss):
        return loss * (self.scale / math.sqrt(dist.get_world_size()))

    def add(self, bucket):
        bucket.gradient.add_(bucket.flat[bucket.mine] / math.sqrt(dist.get_world_size()))


@right(ZERO2)
class ReducesInFloat32(Engine):
    """Sums are made in fp32, as FSDP's reduce_dtype does: as many elements, twice the bytes."""

    def reduce(self, bucket):
        bucket.wide = bucket.flat.float()
        return self.communicator.reduce_scatter(bucket.wide)

    def add(self, bucket):
        bucket.gradient.add_(bucket.wide[bucket.mine])
        bucket.wide = None


@right(ZERO2)
class BroadcastsTheWeights(Engine):
    """Each owner hands its part round by a broadcast, between barriers. Flat tensors are freed by their storage."""

    def publish(self):
        count = dist.get_world_size()
        dist.barrier()
        for bucket in self.buckets:
            parts = bucket.weights.chunk(count)
            for handle in [self.communicator.broadcast(part, owner) for owner, part in enumerate(parts)]:
                handle.wait()
        dist.barrier()

    def land(self, bucket):
        flat = bucket.flat
        super().land(bucket)
        flat.untyped_storage().resize_(0)


@right(ZERO2)
class WholeParametersByOwner(Engine):
    """Each parameter has one owner, the rank that has least so far. Reduced to it, broadcast from it."""

    def plan(self):
        self.load = [0] * dist.get_world_size()
        found = [(p, group) for group in self.param_groups for p in group["params"] if p.requires_grad and p.numel()]
        order = {parameter: place for place, parameter in enumerate(reversed(list(self.module.parameters())))}
        return [([parameter], group) for parameter, group in sorted(found, key=lambda one: order[one[0]])]

    def make(self, parameters, group):
        (parameter,) = parameters
        owner = min(range(len(self.load)), key=self.load.__getitem__)
        self.load[owner] += parameter.numel()
        bucket = SimpleNamespace(parameters=parameters, group=group, owner=owner, flat=None, handle=None, steps=0)
        bucket.mine = owner == dist.get_rank()
        bucket.gradient = parameter.new_zeros(parameter.numel() if bucket.mine else 0, requires_grad=False)
        if bucket.mine:
            weight = parameter.detach().reshape(-1)
            bucket.master = weight if weight.dtype == torch.float32 else weight.float()
            bucket.first, bucket.second = torch.zeros_like(bucket.master), torch.zeros_like(bucket.master)
        return bucket

    def take(self, bucket, place, parameter):
        while len(self.on_way) > 1:
            self.land(self.on_way.pop(0))
        bucket.flat = parameter.grad.reshape(-1)  # no copy: the gradient itself travels

    def launch(self, bucket):
        if bucket.flat is None:
            bucket.flat = torch.zeros_like(bucket.parameters[0]).reshape(-1).detach()
        bucket.handle = self.communicator.reduce(bucket.flat, bucket.owner)
        self.on_way.append(bucket)

    def add(self, bucket):
        if bucket.mine:
            bucket.gradient.add_(bucket.flat)

    def update(self, bucket, factor):
        if bucket.mine:
            super().update(bucket, factor)

    def write(self, bucket):
        parameter = bucket.parameters[0]
        parameter.data.copy_(bucket.master.view(parameter.shape))

    def publish(self):
        for bucket in self.buckets:  # a transposed parameter is no flat tensor: then a copy travels
            bucket.whole = bucket.parameters[0].detach().reshape(-1)
            bucket.handle = self.communicator.broadcast(bucket.whole, bucket.owner)
        for bucket in self.buckets:
            bucket.handle.wait()
            parameter = bucket.parameters[0]
            parameter.data.copy_(bucket.whole.view(parameter.shape))
            bucket.handle = bucket.whole = None


@right(ZERO2)
class OwnersKeepGrad(WholeParametersByOwner):
    """The owner's sums are in `.grad`, where everybody looks for them; elsewhere it is None."""

    def make(self, parameters, group):
        bucket = super().make(parameters, group)
        bucket.total, bucket.gradient = bucket.gradient, None
        return bucket

    def backward(self, loss):
        for bucket in self.buckets:  # away with it, or autograd would add to it
            bucket.total = bucket.parameters[0].grad
            bucket.parameters[0].grad = None
        super().backward(loss)
        for bucket in self.buckets:
            bucket.parameters[0].grad, bucket.total = bucket.total, None

    def add(self, bucket):
        if bucket.mine:
            whole = bucket.flat.view_as(bucket.parameters[0])
            bucket.total = whole if bucket.total is None else bucket.total.add_(whole)

    def norm(self):
        for bucket in self.buckets:
            grad = bucket.parameters[0].grad
            bucket.gradient = torch.zeros(0) if grad is None else grad.reshape(-1)
        return super().norm()

    def update(self, bucket, factor):
        if bucket.mine and bucket.parameters[0].grad is None:
            bucket.gradient = torch.zeros_like(bucket.master)
        super().update(bucket, factor)

    def zero_grad(self):
        for bucket in self.buckets:
            bucket.parameters[0].grad = None


@right(ZERO2)
class TwoBuffersInTurns(Engine):
    """Two buffers that are filled in turns, kept for the length of a backward (as DeepSpeed does)."""

    def backward(self, loss):
        self.spare = {}
        super().backward(loss)
        self.spare = {}

    def open(self, bucket):
        if bucket.flat is not None:
            return
        while len(self.on_way) > 1:
            self.land(self.on_way.pop(0))
        size, dtype = bucket.weights.numel(), bucket.weights.dtype
        kept = self.spare.get((size, dtype), [])
        bucket.flat = kept.pop().zero_() if kept else torch.zeros(size, dtype=dtype)

    def land(self, bucket):
        flat = bucket.flat
        super().land(bucket)
        self.spare = {(flat.numel(), flat.dtype): [flat]}  # one at most
