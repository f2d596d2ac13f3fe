"""Lab 06: a ZeRO-1 engine that is right, in small methods, from which specimens differ in one or two."""

from __future__ import annotations

import contextlib
import math

import torch
import torch.distributed as dist
from torch import nn

from shardlab.communicator import Library

ZERO1 = "06.Zero1"


class Bucket:
    """Some parameters of one group and dtype, flat and padded. Chunk r belongs to rank r."""

    def __init__(self, parameters, group):
        self.parameters, self.group = parameters, group
        count, rank = dist.get_world_size(), dist.get_rank()
        self.sizes = [parameter.numel() for parameter in parameters]
        self.chunk = self.chunk_of(sum(self.sizes), count)
        self.mine = slice(rank * self.chunk, (rank + 1) * self.chunk)
        self.weights = parameters[0].detach().new_zeros(count * self.chunk)
        for parameter, view in zip(parameters, self.views(self.weights), strict=True):
            view.copy_(parameter.data)
            parameter.data = view
        self.gradients = torch.zeros_like(self.weights)
        self.missing = set(range(len(parameters)))
        self.handle = None
        self.steps = 0
        self.make_state()

    def chunk_of(self, total, count):
        return -(-total // count)

    def make_state(self):
        own = self.weights[self.mine]
        self.master = own if own.dtype == torch.float32 else own.float()
        self.first, self.second = torch.zeros_like(self.master), torch.zeros_like(self.master)

    def views(self, flat):
        pieces = flat[: sum(self.sizes)].split(self.sizes)
        return [piece.view(parameter.shape) for piece, parameter in zip(pieces, self.parameters, strict=True)]


class Engine(nn.Module):
    """Reduce-scatter of full gradients, bucket by bucket during backward; all-gather of weights after the step."""

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
        self.waiting, self.active = [], False
        self.hook()

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
                if held is None or sum(p.nbytes for p in held) + parameter.nbytes > self.bucket_bytes:
                    held = filling[parameter.dtype] = []
                    buckets.append((held, group))
                held.append(parameter)
        return sorted(buckets, key=lambda bucket: order[bucket[0][-1]])

    def hook(self):
        for bucket in self.buckets:
            for place, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(
                    lambda parameter, bucket=bucket, place=place: self.arrived(bucket, place, parameter)
                )

    def forward(self, *inputs):
        return self.module(*inputs)

    @contextlib.contextmanager
    def gathered(self):
        yield

    def backward(self, loss):
        for bucket in self.buckets:
            bucket.missing = set(range(len(bucket.parameters)))
        self.waiting = list(self.buckets)
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

    def take(self, bucket, place, parameter):
        bucket.views(bucket.gradients)[place].add_(parameter.grad)

    def drop(self, parameter):
        parameter.grad = None

    def advance(self):
        while self.waiting and not self.waiting[0].missing:
            self.launch(self.waiting.pop(0))

    def launch(self, bucket):
        bucket.handle = self.communicator.reduce_scatter(bucket.gradients)

    @torch.no_grad()
    def finish(self):
        while self.waiting:
            self.launch(self.waiting.pop(0))
        for bucket in self.buckets:
            self.land(bucket)

    def land(self, bucket):
        bucket.handle.wait()
        bucket.handle = None
        self.clear_others(bucket)

    def clear_others(self, bucket):
        bucket.gradients[: bucket.mine.start] = 0
        bucket.gradients[bucket.mine.stop :] = 0

    def own(self, bucket):
        """The mean over the ranks, scaled, of this rank's chunk."""
        return bucket.gradients[bucket.mine]

    def zero_grad(self):
        for bucket in self.buckets:
            bucket.gradients.zero_()

    @torch.no_grad()
    def step(self):
        norm = self.norm()
        if not self.fine(norm):
            self.overflowed()
            return False
        factor = self.factor(norm)
        for bucket in self.buckets:
            self.update(bucket, factor)
        self.publish()
        self.grow()
        return True

    def squares(self):
        """Of this rank's chunks."""
        total = torch.zeros(1, dtype=torch.float64)
        for bucket in self.buckets:
            total += torch.linalg.vector_norm(self.own(bucket), dtype=torch.float64) ** 2
        return total

    def norm(self):
        """Of all ranks' chunks, with the scale still in it."""
        total = self.squares()
        self.communicator.all_reduce(total).wait()
        return total.sqrt().item()

    def fine(self, norm):
        return math.isfinite(norm)

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
        bucket.steps += 1
        self.adam(bucket, bucket.group, self.own(bucket).float() * factor, bucket.steps)
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
