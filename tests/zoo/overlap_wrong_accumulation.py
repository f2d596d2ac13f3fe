"""Lab 05: engines that are wrong when gradients accumulate, are cleared, or belong to parameters that go unused."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist

from zoo import wrong
from zoo.overlap_base import Engine

DDP = "05.DistributedDataParallel"


@wrong(DDP, reason="bytes", says=r"inside no_sync\(\) there are calls that carry data")
class SyncsEveryMicroStep(Engine):
    """no_sync() does nothing. The values are right: averaging is linear."""

    @contextlib.contextmanager
    def no_sync(self):
        yield


@wrong(DDP, reason="values", says=r"no_sync\(\), the third outside[\s\S]*which micro-steps")
class SyncsTheFirstMicroStep(Engine):
    """Inverted: reduces inside no_sync(), and not outside after it."""

    @contextlib.contextmanager
    def no_sync(self):
        self.inside = True
        yield

    def backward(self, loss):
        if getattr(self, "inside", False) and any(p.grad is not None for p in self.trained):
            loss.backward()
        else:
            super().backward(loss)


@wrong(DDP, reason="values", says=r"an exception inside no_sync\(\)[\s\S]*synchronise is still False")
class NoSyncWithoutFinally(Engine):
    """After an exception inside no_sync() nothing is synchronised any more."""

    @contextlib.contextmanager
    def no_sync(self):
        self.sync = False
        yield
        self.sync = True


@wrong(DDP, reason="bytes", says=r"no_sync\(\) inside no_sync\(\)[\s\S]*put back what was before")
class InnerNoSyncEndsTheOuter(Engine):
    """Synchronises again after any no_sync(), also when it stands inside another one."""

    @contextlib.contextmanager
    def no_sync(self):
        self.sync = False
        try:
            yield
        finally:
            self.sync = True


@wrong(DDP, reason="calls|hang", says=r"on rank 0[\s\S]*each rank must send all buckets")
class OnlyItsOwnStaleness(Engine):
    """A rank reduces again what is stale on this rank; the others do not come."""

    def agree(self):
        present, _ = super().agree()
        return present, [bucket.stale for bucket in self.buckets]


@wrong(DDP, reason="crash", says=r"KeyError")
class EachHookOnce(Engine):
    """remove() instead of discard(): the second call of a hook finds nothing to remove."""

    def arrived(self, parameter):
        bucket, place = self.place[parameter]
        if self.active and bucket.handle is None:
            bucket.missing.remove(place)
            bucket.missing.add(place)
        super().arrived(parameter)


@wrong(DDP, reason="order", says=r"complete already[\s\S]*while")
class OneAtATime(Engine):
    """An if instead of a while: of the buckets that are complete, each hook sends one."""

    def advance(self):
        if self.next < len(self.buckets) and not self.buckets[self.next].missing:
            self.launch(self.buckets[self.next])
            self.next += 1


@wrong(DDP, reason="values|order", says=r"called twice")
class UnusedOnesGetTheView(Engine):
    """A gradient that was None becomes a view of the bucket, and the next one is added right into the bucket."""

    def give_back(self, parameter):
        bucket, place = self.place[parameter]
        if parameter.grad is None:
            parameter.grad = bucket.views[place]
        else:
            parameter.grad.copy_(bucket.views[place])


@wrong(DDP, reason="calls", says=r"branches[\s\S]*in plan order, then the flags")
class FlagsBeforeTheRest(Engine):
    """Agrees when backward is over, and sends what has not left after that."""

    def finish(self):
        self.agreed = super().agree()
        super().finish()

    def agree(self):
        return self.agreed


@wrong(DDP, reason="values", says=r"last micro-step")
class ReducesTheNewGradientOnly(Engine):
    """Reduces what this backward adds, and forgets what had been accumulated."""

    def start(self):
        super().start()
        self.held = {p: None if p.grad is None else p.grad.clone() for p in self.trained}

    @torch.no_grad()
    def fill(self, bucket, place):
        parameter = bucket.parameters[place]
        held, gradient = self.held[parameter], parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        elif held is not None:
            gradient = gradient - held
        bucket.views[place].copy_(gradient / dist.get_world_size())


@wrong(DDP, reason="values", says=r"used only in an earlier micro-step")
class ForgetsEarlierMicroSteps(Engine):
    """A parameter whose hook is not called in the last micro-step counts as zeros, whatever it has accumulated."""

    def finish(self):
        for bucket in self.buckets[self.next :]:
            for place in bucket.missing:
                bucket.views[place].zero_()
            bucket.missing = set()
        super().finish()


@wrong(DDP, reason="values", says=r"branches|used")
class KeepsUnusedAsTheyAre(Engine):
    """A parameter that this rank did not use keeps its p.grad, though others have one."""

    def give_back(self, parameter):
        if parameter.grad is not None:
            super().give_back(parameter)


@wrong(DDP, reason="values", says=r"branches")
class LeavesOldNumbersInTheBucket(Engine):
    """The place of an unused parameter is not cleared: the numbers of an earlier step travel again."""

    @torch.no_grad()
    def fill(self, bucket, place):
        if bucket.parameters[place].grad is not None:
            super().fill(bucket, place)


@wrong(DDP, reason="values", says=r"the mean added to this rank's own")
class AddsTheMeanOntoTheGradient(Engine):
    """p.grad += mean: right only where p.grad was None, which it never is after a backward."""

    def give_back(self, parameter):
        bucket, place = self.place[parameter]
        parameter.grad = bucket.views[place].clone() if parameter.grad is None else parameter.grad + bucket.views[place]


@wrong(DDP, reason="order|values", says=r"called twice: step 2")
class GradientsAreTheBuckets(Engine):
    """p.grad is a view of the bucket: what is added to it later is added to what is on its way."""

    def give_back(self, parameter):
        bucket, place = self.place[parameter]
        parameter.grad = bucket.views[place]


@wrong(DDP, reason="values|order", says=r"called twice[\s\S]*before the second part came")
class TheSecondCallIsLost(Engine):
    """A gradient that grows after its bucket has left stays out of the mean."""

    def agree(self):
        present, stale = super().agree()
        return present, [0.0] * len(stale)


@wrong(DDP, reason="values", says=r"step \d: ")
class CountsTwice(Engine):
    """Counts calls of hooks instead of parameters: a second call closes a bucket early."""

    def arrived(self, parameter):
        if not self.active:
            return
        bucket, place = self.place[parameter]
        if bucket.handle is not None:
            return
        self.fill(bucket, place)
        if bucket.missing:
            bucket.missing.pop()
        self.advance()


@wrong(DDP, reason="memory", says=r"live memory has grown")
class KeepsEveryBucket(Engine):
    """A list of all that was ever reduced, for debugging."""

    def launch(self, bucket):
        self.history = [*getattr(self, "history", []), bucket.flat.clone()]
        super().launch(bucket)


_shared: list = []


@wrong(DDP, reason="values|crash|hang|calls", says=r"N = 2")
class SharedState(Engine):
    """The buckets are a global of the process: a second engine takes them over."""

    def start(self):
        _shared[:] = _shared or self.buckets
        self.buckets = _shared
        super().start()

    def arrived(self, parameter):
        if parameter in self.place:
            super().arrived(parameter)


@wrong(DDP, reason="bytes", says=r"step 1 it sends")
class ReducesTwice(Engine):
    """Every bucket is reduced once more at the end, to be safe."""

    def complete(self, bucket):
        bucket.handle.wait()
        bucket.flat /= dist.get_world_size()
        self.all_reduce(bucket.flat).wait()


@wrong(DDP, reason="bytes", says=r"all_gather")
class GathersAllGradients(Engine):
    """Every rank collects everybody's buckets and adds them up."""

    def launch(self, bucket):
        if self.all_reduce.__name__ != "<lambda>":
            super().launch(bucket)
            return
        pieces = [torch.empty_like(bucket.flat) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, bucket.flat)
        bucket.flat.copy_(torch.stack(pieces).sum(0))
        bucket.handle = _Done()


class _Done:
    def wait(self):
        pass


@wrong(DDP, reason="values", says=r"two forwards before one backward|no_sync|without zero_grad|None")
class ClearsInForward(Engine):
    """Gradients are set to None in every forward, to save a call."""

    def forward(self, *inputs):
        for parameter in self.trained:
            parameter.grad = None
        return super().forward(*inputs)
