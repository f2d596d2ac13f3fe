"""Lab 07: ZeRO-2 engines that hold or send too much, or let go of gradients too early or too late."""

from __future__ import annotations

import torch
import torch.distributed as dist

from zoo import wrong
from zoo.zero2_base import ZERO2, Bucket, Engine
from zoo.zero_replicated import Alone, Replicated


@wrong(ZERO2, reason="memory|bytes", says=r"everything else \d|optimizer state, for the whole model|units of")
class PlainDDP(Replicated):
    """torch's DDP and AdamW behind the engine's methods: every rank holds everything."""


@wrong(ZERO2, reason="values", says=r"this rank's own|not the same bits|one rank|step 1")
class PlainAdamW(Alone):
    """Sends nothing at all: each rank trains a model of its own."""


@wrong(ZERO2, reason="memory", says=r"rank \d holds (?s:.*)flat gradients")
class Zero1InDisguise(Engine):
    """All gradients stay in flat tensors of the whole model; only the optimizer is sharded."""

    def open(self, bucket):
        if bucket.flat is None:
            bucket.flat = torch.zeros_like(bucket.weights)

    def land(self, bucket):
        bucket.handle.wait()
        bucket.gradient.add_(bucket.flat[bucket.mine])
        bucket.flat.zero_()


@wrong(ZERO2, reason="memory", says=r"during backward rank \d holds up to")
class FullBufferUntilTheEnd(Engine):
    """Buckets leave early, but none is freed before backward is over."""

    def open(self, bucket):
        if bucket.flat is None:
            bucket.flat = torch.zeros_like(bucket.weights)


@wrong(ZERO2, reason="memory", says=r"during backward rank \d holds up to 1\d\.")
class OneGiantBucket(Engine):
    """bucket_bytes is ignored."""

    def size_of_bucket(self):
        return 10**12


@wrong(ZERO2, reason="memory", says=r"during backward rank")
class ReducesAfterBackward(Engine):
    """Gradients wait in `.grad` until the last one is there; then bucket after bucket."""

    def arrived(self, bucket, place, parameter):
        pass

    @torch.no_grad()
    def finish(self):
        for bucket in self.buckets:
            for place, parameter in enumerate(bucket.parameters):
                if parameter.grad is not None:
                    self.take(bucket, place, parameter)
                    parameter.grad = None
        super().finish()


@wrong(ZERO2, reason="memory", says=r"\.grad 2\.00")
class KeepsGrad(Engine):
    """Every rank keeps every `.grad` until zero_grad()."""

    def drop(self, parameter):
        pass

    def backward(self, loss):
        for parameter in self.module.parameters():
            parameter.grad = None
        super().backward(loss)

    def zero_grad(self):
        super().zero_grad()
        for parameter in self.module.parameters():
            parameter.grad = None


@wrong(ZERO2, reason="memory", says=r"\.grad 1\.\d\d")
class NonOwnersKeepGrad(Engine):
    """Frees `.grad` where a piece of it is this rank's own, and forgets the rest."""

    def drop(self, parameter):
        place = [id(each) for each in self.module.parameters()].index(id(parameter))
        if place % dist.get_world_size() == dist.get_rank():
            parameter.grad = None

    def backward(self, loss):
        for parameter in self.module.parameters():
            parameter.grad = None
        super().backward(loss)

    def zero_grad(self):
        super().zero_grad()
        for parameter in self.module.parameters():
            parameter.grad = None


@wrong(ZERO2, reason="memory", says=r"rank \d holds")
class KeepsAView(Engine):
    """The shard is a slice of the flat tensor, which therefore stays alive as a whole."""

    def add(self, bucket):
        mine = bucket.flat[bucket.mine]
        bucket.gradient = mine if not bucket.gradient.any() else mine.add_(bucket.gradient)


@wrong(ZERO2, reason="memory", says=r"everything else \d(?s:.*)flat gradients")
class KeepsTheHandles(Engine):
    """A list of all flat tensors, for debugging."""

    def reduce(self, bucket):
        self.log = [*getattr(self, "log", [])[-200:], bucket.flat]
        return super().reduce(bucket)


@wrong(ZERO2, reason="memory", says=r"optimizer state of the whole model, 12 psi bytes")
class ShardsGradientsOnly(Engine):
    """Whole master weights and moments on every rank, of which a part is used."""

    class make(Bucket):  # noqa: N801
        def __init__(self, parameters, group):
            super().__init__(parameters, group)
            self.whole = [self.weights.float(), torch.zeros_like(self.weights, dtype=torch.float32)]
            self.whole.append(self.whole[1].clone())
            self.master, self.first, self.second = (whole[self.mine] for whole in self.whole)


@wrong(ZERO2, reason="memory", says=r"during construction rank \d holds up to")
class BuildsEverythingFirst(Engine):
    """The whole optimizer state is made, then cut: too much for a moment, in which memory runs out."""

    def __init__(self, model, *args, **options):
        everything = [[p.detach().float().clone(), p.new_zeros(p.shape).float()] for p in model.parameters()]
        everything += [[p.new_zeros(p.shape).float()] for p in model.parameters()]
        super().__init__(model, *args, **options)
        del everything


@wrong(ZERO2, reason="bytes", says=r"all_reduce 2\.00(?s:.*)reduce_scatter")
class AllReducesAndSlices(Engine):
    """Whole sums on every rank, of which each uses 1/N: twice the bytes."""

    def reduce(self, bucket):
        return self.communicator.all_reduce(bucket.flat)


@wrong(ZERO2, reason="bytes", says=r"reduce_scatter 3\.00")
class StacksCopies(Engine):
    """Believes that reduce-scatter wants one whole tensor for each rank."""

    def reduce(self, bucket):
        count = dist.get_world_size()
        self.stacked = bucket.flat.repeat(count)
        return self.communicator.reduce_scatter(self.stacked)

    def land(self, bucket):
        bucket.handle.wait()
        whole = self.stacked.view(dist.get_world_size(), -1)[dist.get_rank()]
        bucket.gradient.add_(whole[bucket.mine])
        bucket.flat = bucket.handle = self.stacked = None

    def launch(self, bucket):
        super().launch(bucket)
        while self.on_way:
            self.land(self.on_way.pop(0))


@wrong(ZERO2, reason="bytes", says=r"reduce 3\.00")
class ReducesToEverybody(Engine):
    """A reduce to every rank in turn, of the whole bucket."""

    def reduce(self, bucket):
        handles = []
        for owner in range(dist.get_world_size()):
            copy = bucket.flat.clone()
            handles.append((self.communicator.reduce(copy, owner), copy))
        for handle, _ in handles:
            handle.wait()
        bucket.flat = handles[dist.get_rank()][1]
        return handles[0][0]


@wrong(ZERO2, reason="order", says=r"reductions is waited for before the next")
class WaitsAtOnce(Engine):
    """Each bucket is waited for and freed in the hook that sends it: memory is right, and nothing overlaps."""

    def launch(self, bucket):
        super().launch(bucket)
        self.land(self.on_way.pop())


@wrong(ZERO2, reason="order", says=r"nobody waits|used before wait|wait\(\)")
class FreesInFlight(Engine):
    """The flat tensor is used again for the next bucket as soon as its reduction has been started."""

    def launch(self, bucket):
        super().launch(bucket)
        with torch.no_grad():
            self.on_way.pop()
            bucket.gradient.add_(bucket.flat[bucket.mine])
        bucket.flat = None

    def finish(self):
        super().finish()
        for bucket in self.buckets:
            bucket.handle.wait()
            bucket.handle = None


@wrong(ZERO2, reason="order", says=r"nobody waits for 12 of 12 reduce_scatter")
class NeverWaits(Engine):
    """The sum is taken out without wait()."""

    @torch.no_grad()
    def land(self, bucket):
        self.add(bucket)
        bucket.flat = bucket.handle = None


@wrong(ZERO2, reason="order", says=r"nobody waits for \d+ of 12 reduce_scatter")
class WaitsForTheLastOnly(Engine):
    """When the last one is done all are: so it believes."""

    @torch.no_grad()
    def land(self, bucket):
        if bucket is self.buckets[-1]:
            bucket.handle.wait()
        self.add(bucket)
        bucket.flat = bucket.handle = None


@wrong(ZERO2, reason="values|order", says=r"late completions(?s:.*)skipped|wait")
class ReusesOneBuffer(Engine):
    """One flat tensor for all buckets, filled anew while the last one is still on its way."""

    def open(self, bucket):
        if bucket.flat is None:
            size = max(each.weights.numel() for each in self.buckets)
            if getattr(self, "buffer", None) is None:
                self.buffer = torch.zeros(size, dtype=bucket.weights.dtype)
            bucket.flat = self.buffer[: bucket.weights.numel()]


@wrong(ZERO2, reason="order", says=r"nobody waits for 12 of 12 all_gather")
class PublishesWithoutWaiting(Engine):
    """step() returns while the weights are still on their way."""

    def publish(self):
        self.handles = [self.communicator.all_gather(bucket.weights) for bucket in self.buckets]
