"""Lab 05: engines that lack an essential: waits, order, factors, buckets that are not complete."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from zoo import wrong
from zoo.overlap_base import Engine, planned

DDP = "05.DistributedDataParallel"


@wrong(DDP, reason="order", says=r"waited for before the next gradient")
class WaitsInTheHook(Engine):
    """A wait() right after each launch: communication during backward, and nothing hidden."""

    def launch(self, bucket):
        super().launch(bucket)
        bucket.handle.wait()

    def complete(self, bucket):
        pass


@wrong(DDP, reason="order", says=r"no reduction has been issued when the last of 12 gradients is ready")
class LaunchesAfterBackward(Engine):
    """Buckets are filled by hooks, but all leave when backward is over."""

    def advance(self):
        pass


@wrong(DDP, reason="order", says=r"no reduction has been issued")
class OneGiantBucket(Engine):
    """bucket_bytes is ignored: everything is in one bucket per dtype."""

    def plan(self, parameters, bucket_bytes):
        return planned(parameters, 10**12)


@wrong(DDP, reason="order", says=r"1 reduction is on its way")
class OnlyTheFirstBucketOverlaps(Engine):
    """The first bucket leaves from the hook, the others after backward."""

    def advance(self):
        if self.next == 0 and not self.buckets[0].missing:
            self.launch(self.buckets[0])
            self.next = 1


@wrong(DDP, reason="order", says=r"nobody waits for \d+ of \d+")
class WaitsForTheLastOnly(Engine):
    """Believes that reductions complete in order."""

    def complete(self, bucket):
        if bucket is self.buckets[-1]:
            bucket.handle.wait()


@wrong(DDP, reason="order", says=r"nobody waits for \d+ of \d+")
class NeverWaits(Engine):
    """Reads the buckets at once."""

    def complete(self, bucket):
        pass


@wrong(DDP, reason="order", says=r"nobody waits for \d+ of \d+")
class ForgetsTheFirst(Engine):
    """Waits for all but the bucket that left first: surely it is done by now."""

    def complete(self, bucket):
        if bucket is not self.buckets[0] or len(self.buckets) == 1:
            bucket.handle.wait()


@wrong(DDP, reason="order", says=r"used before wait\(\)")
class CopiesBeforeTheWait(Engine):
    """Gives the gradients back, and waits afterwards."""

    def complete(self, bucket):
        for parameter in bucket.parameters:
            if parameter.grad is not None:
                super().give_back(parameter)
        bucket.handle.wait()

    def give_back(self, parameter):
        pass


@wrong(DDP, reason="values", says=r"the sum over the ranks, not divided")
class NeverDivides(Engine):
    """The sum instead of the mean."""

    @torch.no_grad()
    def fill(self, bucket, place):
        gradient = bucket.parameters[place].grad
        bucket.views[place].copy_(torch.zeros(()) if gradient is None else gradient)


@wrong(DDP, reason="values", says=r"divided by N once more")
class DividesTwice(Engine):
    """Divides when the bucket is filled and again when it is read."""

    def give_back(self, parameter):
        super().give_back(parameter)
        parameter.grad /= dist.get_world_size()


@wrong(DDP, reason="values", says=r"N = [13].*divided by 2")
class DividesByTwo(Engine):
    """Tried with two ranks only."""

    @torch.no_grad()
    def fill(self, bucket, place):
        gradient = bucket.parameters[place].grad
        bucket.views[place].copy_(torch.zeros(()) if gradient is None else gradient / 2)


@wrong(DDP, reason="values", says=r"mean of the parameters")
class AveragesTheParameter(Engine):
    """The hook is given the parameter, and its values are taken for the gradient."""

    @torch.no_grad()
    def fill(self, bucket, place):
        bucket.views[place].copy_(bucket.parameters[place] / dist.get_world_size())


@wrong(DDP, reason="values", says=r"after construction the parameter '.*' is still this rank's own")
class NoBroadcast(Engine):
    """Ranks start from different weights."""

    def broadcast(self):
        pass


@wrong(DDP, reason="values", says=r"the buffer '.*' is still this rank's own")
class BroadcastsNoBuffers(Engine):
    """Parameters only."""

    def broadcast(self):
        for tensor in self.module.parameters():
            dist.broadcast(tensor.data, src=0)


@wrong(DDP, reason="values", says=r"buffers: batch norm.*step [23]")
class BuffersDriftApart(Engine):
    """Buffers are broadcast at the start and never again."""

    def share_buffers(self):
        pass


@wrong(DDP, reason="values", says=r"this rank's own gradient")
class LastBucketIsNeverReduced(Engine):
    """A bucket leaves when it is followed by another one, so the last one stays."""

    def finish(self):
        last = self.buckets[-1]
        last.handle = last.handle or dist.barrier(async_op=True)
        self.next = len(self.buckets)
        super().finish()

    def advance(self):
        while self.next < len(self.buckets) - 1 and not self.buckets[self.next].missing:
            self.launch(self.buckets[self.next])
            self.next += 1

    def give_back(self, parameter):
        if self.place[parameter][0] is not self.buckets[-1]:
            super().give_back(parameter)


@wrong(DDP, reason="values", says=r"step 2: ")
class CountersAreNotReset(Engine):
    """What is missing is counted once, in the constructor: in the second step buckets leave at the first gradient."""

    def start(self):
        self.next, self.active = 0, True
        for bucket in self.buckets:
            bucket.handle = None

    def agree(self):
        present, stale = super().agree()
        return present, [0.0] * len(stale)


@wrong(DDP, reason="values", says=r"a parameter larger than a bucket|N = 2, .*")
class LosesWhatIsLarger(Engine):
    """A parameter that does not fit into a bucket is left out of all of them."""

    def order(self):
        return [parameter for parameter in super().order() if parameter.numel() * 4 <= self.limit]

    def __init__(self, module, bucket_bytes=25 * 2**20, all_reduce=None):
        object.__setattr__(self, "limit", max(bucket_bytes, 400))
        super().__init__(module, bucket_bytes, all_reduce)


@wrong(DDP, reason="values|crash", says=r"buffers: batch norm")
class NeedsTwoBuckets(Engine):
    """The first bucket is closed by the second: with one only, none is ever reduced."""

    def plan(self, parameters, bucket_bytes):
        plan = super().plan(parameters, bucket_bytes)
        return plan if len(plan) > 1 else []

    def hook(self):
        self.trained = [parameter for parameter in self.trained if parameter in self.place]
        super().hook()


@wrong(DDP, reason="crash|values", says=r"float32, 64, 16 and bfloat16")
class MixesDtypes(Engine):
    """One flat tensor for whatever comes next, of the first one's dtype."""

    def plan(self, parameters, bucket_bytes):
        buckets, held = [[]], 0
        for index, parameter in enumerate(parameters):
            nbytes = parameter.numel() * parameter.element_size()
            if buckets[-1] and held + nbytes > bucket_bytes:
                buckets.append([])
                held = 0
            buckets[-1].append(index)
            held += nbytes
        return [bucket for bucket in buckets if bucket]


@wrong(DDP, reason="values|bytes", says=r"tied|N times the sum|divided")
class TiedTwice(Engine):
    """Walks through the modules, so a matrix in two places is in two buckets and is averaged twice."""

    def order(self):
        found = [p for module in self.module.modules() for p in module.parameters(recurse=False) if p.requires_grad]
        return found[::-1]

    def give_back(self, parameter):
        bucket, place = self.place[parameter]
        total = torch.zeros_like(parameter)
        for one in self.buckets:
            for at, other in enumerate(one.parameters):
                if other is parameter:
                    total += one.views[at]
        parameter.grad = total


@wrong(DDP, reason="values", says=r"frozen parameter '.*' has a gradient now")
class ReducesFrozenOnes(Engine):
    """All parameters are in buckets; frozen ones get zeros."""

    def order(self):
        return list(self.module.parameters())[::-1]

    def hook(self):
        for parameter in self.trained:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.arrived)

    def agree(self):
        present, stale = super().agree()
        return [1.0] * len(present), stale


@wrong(DDP, reason="values", says=r"reverse of their order|branches|checkpoint")
class ClosesByDefinition(Engine):
    """A bucket leaves as soon as its first-defined parameter has its gradient: surely the others came before."""

    def advance(self):
        while self.next < len(self.buckets):
            bucket = self.buckets[self.next]
            if len(bucket.parameters) - 1 in bucket.missing:
                return
            for place in bucket.missing:
                self.fill(bucket, place)
            self.launch(bucket)
            self.next += 1

    def arrived(self, parameter):
        bucket, place = self.place[parameter]
        if self.active and bucket.handle is None:
            super().arrived(parameter)


@wrong(DDP, reason="hang|calls", says=r"leaves out a layer: call \d+|branches.*: call \d+")
class UnusedOnesAreLeftOut(Engine):
    """A bucket of which this rank has no gradient does not leave: ranks that have some wait for ever."""

    def finish(self):
        for bucket in self.buckets[self.next :]:
            if len(bucket.missing) == len(bucket.parameters):
                bucket.handle = _Done()
                continue
            for place in bucket.missing:
                self.fill(bucket, place)
            self.launch(bucket)
        self.next = len(self.buckets)
        super().finish()


class _Done:
    def wait(self):
        pass


@wrong(DDP, reason="values|calls", says=r"branches")
class LeavesInOrderOfArrival(Engine):
    """A bucket leaves when it is complete, in whatever order that is on this rank: sums of unlike buckets."""

    def advance(self):
        for bucket in self.buckets:
            if not bucket.missing and bucket.handle is None:
                self.launch(bucket)
        self.next = 0

    def finish(self):
        for bucket in self.buckets:
            if bucket.handle is None:
                for place in bucket.missing:
                    self.fill(bucket, place)
                self.launch(bucket)
        self.next = len(self.buckets)
        super().finish()


@wrong(DDP, reason="calls", says=r"0 of \d+ elements go through")
class IgnoresThePlug(Engine):
    """Calls dist.all_reduce, whatever all_reduce was given."""

    def __init__(self, module, bucket_bytes=25 * 2**20, all_reduce=None):
        super().__init__(module, bucket_bytes, None)


@wrong(DDP, reason="signature", says=r"has no method no_sync")
class LacksNoSync(nn.Module):
    """Only forward and backward."""

    def __init__(self, module, bucket_bytes=0, all_reduce=None):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        return self.module(*inputs)

    def backward(self, loss):
        loss.backward()


@wrong(DDP, reason="not written", says=r"not written yet")
class NotWritten(Engine):
    """The stub as it is handed out."""

    def arrived(self, parameter):
        raise NotImplementedError()
