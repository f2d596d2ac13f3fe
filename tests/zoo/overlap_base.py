"""Lab 05: an engine that is right, in small methods, from which specimens differ in one."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import nn


def planned(parameters, bucket_bytes):
    buckets, open_ones = [], {}
    for index, parameter in enumerate(parameters):
        nbytes = parameter.numel() * parameter.element_size()
        bucket, held = open_ones.get(parameter.dtype, (None, 0))
        if bucket is None or held + nbytes > bucket_bytes:
            bucket, held = [], 0
            buckets.append(bucket)
        bucket.append(index)
        open_ones[parameter.dtype] = bucket, held + nbytes
    return sorted(buckets, key=lambda one: one[-1])


class Bucket:
    def __init__(self, parameters):
        self.parameters = parameters
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = torch.zeros(sum(sizes), dtype=parameters[0].dtype)
        pieces = self.flat.split(sizes)
        self.views = [piece.view(parameter.shape) for piece, parameter in zip(pieces, parameters, strict=True)]
        self.reset()

    def reset(self):
        self.missing = set(range(len(self.parameters)))
        self.handle = None
        self.stale = False


class Engine(nn.Module):
    """Post-accumulate hooks, buckets in reverse order, flags about presence and staleness."""

    def __init__(self, module, bucket_bytes=25 * 2**20, all_reduce=None):
        super().__init__()
        self.module = module
        self.all_reduce = all_reduce or (lambda flat: dist.all_reduce(flat, async_op=True))
        self.sync = True
        self.active = False
        self.broadcast()
        self.trained = self.order()
        self.buckets = [
            Bucket([self.trained[index] for index in plan]) for plan in self.plan(self.trained, bucket_bytes)
        ]
        self.place = {
            parameter: (bucket, place) for bucket in self.buckets for place, parameter in enumerate(bucket.parameters)
        }
        self.hook()

    def order(self):
        return [parameter for parameter in reversed(list(self.module.parameters())) if parameter.requires_grad]

    def plan(self, parameters, bucket_bytes):
        return planned(parameters, bucket_bytes)

    def broadcast(self):
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            dist.broadcast(tensor.data, src=0)

    def hook(self):
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(self.arrived)

    def forward(self, *inputs):
        if self.module.training and self.sync:
            self.share_buffers()
        return self.module(*inputs)

    def share_buffers(self):
        for buffer in self.module.buffers():
            dist.broadcast(buffer.data, src=0)

    @contextlib.contextmanager
    def no_sync(self):
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    def backward(self, loss):
        if self.sync:
            self.start()
        loss.backward()
        if self.sync:
            self.active = False
            self.finish()

    def start(self):
        for bucket in self.buckets:
            bucket.reset()
        self.next = 0
        self.active = True

    def arrived(self, parameter):
        if not self.active:
            return
        bucket, place = self.place[parameter]
        if bucket.handle is not None:
            bucket.stale = True
            return
        self.fill(bucket, place)
        bucket.missing.discard(place)
        self.advance()

    def advance(self):
        while self.next < len(self.buckets) and not self.buckets[self.next].missing:
            self.launch(self.buckets[self.next])
            self.next += 1

    @torch.no_grad()
    def fill(self, bucket, place):
        gradient = bucket.parameters[place].grad
        if gradient is None:
            bucket.views[place].zero_()
        else:
            bucket.views[place].copy_(gradient / dist.get_world_size())

    def launch(self, bucket):
        bucket.handle = self.all_reduce(bucket.flat)

    def finish(self):
        for bucket in self.buckets[self.next :]:
            for place in bucket.missing:
                self.fill(bucket, place)
            self.launch(bucket)
        present, stale = self.agree()
        for bucket, again in zip(self.buckets, stale, strict=True):
            self.complete(bucket)
            if again:
                for place in range(len(bucket.parameters)):
                    self.fill(bucket, place)
                self.launch(bucket)
                self.complete(bucket)
        for parameter, anywhere in zip(self.trained, present, strict=True):
            if anywhere:
                self.give_back(parameter)

    def complete(self, bucket):
        bucket.handle.wait()

    def agree(self):
        flags = [parameter.grad is not None for parameter in self.trained] + [one.stale for one in self.buckets]
        if not flags:
            return [], []
        flags = torch.tensor(flags, dtype=torch.float32)
        self.all_reduce(flags).wait()
        count = len(self.trained)
        return flags[:count].tolist(), flags[count:].tolist()

    def give_back(self, parameter):
        bucket, place = self.place[parameter]
        parameter.grad = bucket.views[place].clone()
