"""Lab 07: a ZeRO-2 engine that is right, in small methods, from which specimens differ in one or two."""

from __future__ import annotations

import contextlib
import math

import torch
import torch.distributed as dist
from torch import nn

from shardlab.communicator import Library

ZERO2 = "07.Zero2"


class Bucket:
    """Some parameters of one group and dtype, flat and padded; what this rank owns of them is chunk `rank`."""

    def __init__(self, parameters, group):
        self.parameters, self.group = parameters, group
        count, rank = dist.get_world_size(), dist.get_rank()
        self.sizes = [parameter.numel() for parameter in parameters]
        self.chunk = -(-sum(self.sizes) // count)
        self.mine = slice(rank * self.chunk, (rank + 1) * self.chunk)
        self.weights = torch.zeros(count * self.chunk, dtype=parameters[0].dtype)
        for parameter, view in zip(parameters, self.views(self.weights), strict=True):
            view.copy_(parameter.data)
            parameter.data = view
        self.gradient = torch.zeros(self.chunk, dtype=parameters[0].dtype)  # this rank's part of the mean
        self.flat = self.handle = None
        self.missing = set(range(len(parameters)))
        own = self.weights[self.mine]
        self.master = own if own.dtype == torch.float32 else own.float()
        self.first, self.second = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.steps = 0

    def views(self, flat):
        pieces = flat[: sum(self.sizes)].split(self.sizes)
        return [piece.view(parameter.shape) for piece, parameter in zip(pieces, self.parameters, strict=True)]


class Engine(nn.Module):
    """Buckets of a third of the budget; at most two flat ones at a time; reduced with reduce-scatter."""

    make = Bucket

    def __init__(
        self,
        model,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        groups=None,
        max_norm=None,
        bucket_bytes=25 * 2**20,
        scale=2.0**16,
        growth_interval=2000,
        communicator=None,
    ):
        super().__init__()
        self.module = model
        self.communicator = communicator or Library()
        self.max_norm, self.bucket_bytes = max_norm, bucket_bytes
        self.scale, self.growth_interval, self.good = float(scale), growth_interval, 0
        self.broadcast()
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.param_groups = self.make_groups(groups or [{"params": list(model.parameters())}], options)
        self.buckets = [self.make(parameters, group) for parameters, group in self.plan()]
        self.waiting, self.on_way, self.active = [], [], False
        for bucket in self.buckets:
            for place, parameter in enumerate(bucket.parameters):
                self.hook(bucket, place, parameter)

    def hook(self, bucket, place, parameter):
        parameter.register_post_accumulate_grad_hook(lambda parameter: self.arrived(bucket, place, parameter))

    def broadcast(self):
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            dist.broadcast(tensor.data, src=0)

    def make_groups(self, groups, options):
        return [{**options, **group, "params": list(group["params"])} for group in groups]

    def plan(self):
        """(parameters, group) of each bucket, in the order in which they should be complete."""
        order = {parameter: place for place, parameter in enumerate(reversed(list(self.module.parameters())))}
        buckets = []
        for group in self.param_groups:
            filling = {}
            for parameter in sorted((p for p in group["params"] if p.requires_grad), key=order.__getitem__):
                held = filling.get(parameter.dtype)
                if held is None or sum(p.nbytes for p in held) + parameter.nbytes > self.size_of_bucket():
                    held = filling[parameter.dtype] = []
                    buckets.append((held, group))
                held.append(parameter)
        return sorted(buckets, key=lambda bucket: order[bucket[0][-1]])

    def size_of_bucket(self):
        return self.bucket_bytes // 3

    def forward(self, *inputs):
        return self.module(*inputs)

    @contextlib.contextmanager
    def gathered(self):
        yield

    def backward(self, loss):
        for bucket in self.buckets:
            bucket.missing = set(range(len(bucket.parameters)))
        self.waiting, self.on_way = list(self.buckets), []
        self.active = True
        try:
            self.scaled(loss).backward()
        finally:
            self.active = False
            self.finish()

    def scaled(self, loss):
        return loss * (self.scale / dist.get_world_size())

    @torch.no_grad()
    def arrived(self, bucket, place, parameter):
        if not self.active:
            return
        self.take(bucket, place, parameter)
        self.drop(parameter)
        bucket.missing.discard(place)
        self.advance()

    def drop(self, parameter):
        parameter.grad = None

    def advance(self):
        while self.waiting and not self.waiting[0].missing:
            self.launch(self.waiting.pop(0))

    def take(self, bucket, place, parameter):
        self.open(bucket)
        bucket.views(bucket.flat)[place].copy_(parameter.grad)

    def open(self, bucket):
        if bucket.flat is None:
            while len(self.on_way) > 1:
                self.land(self.on_way.pop(0))
            bucket.flat = torch.zeros_like(bucket.weights)

    def launch(self, bucket):
        self.open(bucket)
        bucket.handle = self.reduce(bucket)
        self.on_way.append(bucket)

    def reduce(self, bucket):
        return self.communicator.reduce_scatter(bucket.flat)

    @torch.no_grad()
    def land(self, bucket):
        bucket.handle.wait()
        self.add(bucket)
        bucket.flat = bucket.handle = None

    def add(self, bucket):
        bucket.gradient.add_(bucket.flat[bucket.mine])

    def finish(self):
        while self.waiting:
            self.launch(self.waiting.pop(0))
        while self.on_way:
            self.land(self.on_way.pop(0))

    def zero_grad(self):
        for bucket in self.buckets:
            bucket.gradient.zero_()

    @torch.no_grad()
    def step(self):
        norm = self.norm()
        if not math.isfinite(norm):
            self.overflowed()
            return False
        factor = self.factor(norm)
        for bucket in self.buckets:
            self.update(bucket, factor)
        self.publish()
        self.grow()
        return True

    def norm(self):
        """Of all ranks' shards, with the scale still in it."""
        total = torch.zeros(1, dtype=torch.float64)
        for bucket in self.buckets:
            total += torch.linalg.vector_norm(bucket.gradient, dtype=torch.float64) ** 2
        self.communicator.all_reduce(total).wait()
        return total.sqrt().item()

    def factor(self, norm):
        """What a gradient is multiplied by."""
        if self.max_norm is None:
            return 1 / self.scale
        return min(1.0, self.max_norm / (norm / self.scale + 1e-6)) / self.scale

    def overflowed(self):
        self.scale, self.good = max(self.scale / 2, 1.0), 0

    def grow(self):
        self.good += 1
        if self.good == self.growth_interval:
            self.scale, self.good = self.scale * 2, 0

    def update(self, bucket, factor):
        gradient = bucket.gradient.float() * factor
        bucket.steps += 1
        self.adam(bucket, bucket.group, gradient, bucket.steps)
        self.write(bucket)

    def adam(self, state, group, gradient, steps):
        """AdamW on a state that has `master`, `first` and `second`, for a gradient in fp32."""
        beta1, beta2 = group["betas"]
        state.first.mul_(beta1).add_(gradient, alpha=1 - beta1)
        state.second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        mean, square = state.first / (1 - beta1**steps), state.second / (1 - beta2**steps)
        state.master.mul_(1 - group["lr"] * group["weight_decay"])
        state.master.sub_(group["lr"] * mean / (square.sqrt() + group["eps"]))

    def write(self, bucket):
        bucket.weights[bucket.mine].copy_(bucket.master)

    def publish(self):
        for handle in [self.communicator.all_gather(bucket.weights) for bucket in self.buckets]:
            handle.wait()
