"""Lab 05: more right engines, written in other ways."""

from __future__ import annotations

import queue
import threading

import torch
import torch.distributed as dist

from zoo import right
from zoo.overlap_base import Engine

DDP = "05.DistributedDataParallel"


@right(DDP)
class InAThread(Engine):
    """A thread of its own reduces one bucket after the other, and blocks in each."""

    def __init__(self, module, bucket_bytes=25 * 2**20, all_reduce=None):
        super().__init__(module, bucket_bytes, all_reduce)
        self.jobs = queue.SimpleQueue()
        threading.Thread(target=self.work, daemon=True).start()

    def work(self):
        while True:
            bucket, done = self.jobs.get()
            self.all_reduce(bucket.flat).wait()
            done.set()

    def launch(self, bucket):
        bucket.handle = threading.Event()
        self.jobs.put((bucket, bucket.handle))

    def agree(self):
        for bucket in self.buckets:
            bucket.handle.wait()
        return super().agree()


@right(DDP)
class ZerosForUnused(Engine):
    """A parameter that nobody used ends with zeros."""

    def agree(self):
        present, stale = super().agree()
        return [1.0] * len(present), stale


@right(DDP)
class FlagsByTheLibrary(Engine):
    """Flags are bytes that go through dist.all_reduce with MAX, and a barrier ends each step."""

    def agree(self):
        flags = [parameter.grad is not None for parameter in self.trained] + [one.stale for one in self.buckets]
        flags = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        dist.barrier()
        count = len(self.trained)
        return flags[:count].tolist(), flags[count:].tolist()


@right(DDP)
class WaitsForOldOnes(Engine):
    """At most three reductions are on their way at a time: the hook waits for the third last."""

    def launch(self, bucket):
        super().launch(bucket)
        place = self.buckets.index(bucket)
        if place >= 3:
            self.buckets[place - 3].handle.wait()

    def complete(self, bucket):
        bucket.handle.wait()


@right(DDP)
class WaitsBackwards(Engine):
    """Waits for the last bucket first."""

    def agree(self):
        present, stale = super().agree()
        for bucket in reversed(self.buckets):
            bucket.handle.wait()
        return present, stale


@right(DDP)
class NoModule:
    """A plain class around an engine, with __call__ instead of forward, and **kwargs."""

    def __init__(self, model, **options):
        self.engine = Engine(model, **options)
        self.module = model

    def __call__(self, *inputs):
        return self.engine(*inputs)

    def backward(self, loss):
        print("backward")
        self.engine.backward(loss)

    def no_sync(self):
        return self.engine.no_sync()


@right(DDP)
class BroadcastsFlat(Engine):
    """One broadcast for each dtype at the start, asynchronous ones for buffers."""

    @torch.no_grad()
    def broadcast(self):
        tensors = [*self.module.parameters(), *self.module.buffers()]
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            mine = [tensor for tensor in tensors if tensor.dtype is dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in mine])
            dist.broadcast(flat, 0)
            for tensor, piece in zip(mine, flat.split([tensor.numel() for tensor in mine]), strict=True):
                tensor.copy_(piece.view(tensor.shape))

    def share_buffers(self):
        handles = [dist.broadcast(buffer.data, 0, async_op=True) for buffer in self.module.buffers()]
        for handle in handles:
            handle.wait()
