"""Lab 06: ZeRO-1 engines that are wrong in what they hold, in who owns what, and in how gradients travel."""

from __future__ import annotations

import torch
import torch.distributed as dist

from zoo import wrong
from zoo.zero1_base import ZERO1, Bucket, Engine


class WholeState(Bucket):
    """Master weights and moments of everything."""

    def make_state(self):
        self.master = self.weights.float() if self.weights.dtype != torch.float32 else self.weights
        self.first, self.second = torch.zeros_like(self.master), torch.zeros_like(self.master)


@wrong(ZERO1, reason="memory", says=r"12.* psi")
class ShardsNothing(Engine):
    """DDP with an optimizer that is whole on every rank: right numbers, 16 psi bytes."""

    make = WholeState

    def launch(self, bucket):
        bucket.handle = self.communicator.all_reduce(bucket.gradients)

    def clear_others(self, bucket):
        # What was summed already must not be summed again.
        pass

    def backward(self, loss):
        kept = [bucket.gradients.clone() for bucket in self.buckets]
        for bucket in self.buckets:
            bucket.gradients.zero_()
        super().backward(loss)
        for bucket, before in zip(self.buckets, kept, strict=True):
            bucket.gradients.add_(before)

    def own(self, bucket):
        return bucket.gradients

    def squares(self):
        return super().squares() / dist.get_world_size()

    def write(self, bucket):
        bucket.weights.copy_(bucket.master)

    def publish(self):
        pass


@wrong(ZERO1, reason="memory", says=r"construction|at most|peak")
class BuiltWholeFirst(Engine):
    """Full state for a moment, in all buckets at once."""

    make = WholeState

    def hook(self):
        super().hook()
        for bucket in self.buckets:
            mine = bucket.mine
            bucket.master = bucket.weights[mine] if bucket.master is bucket.weights else bucket.master[mine].clone()
            bucket.first, bucket.second = bucket.first[mine].clone(), bucket.second[mine].clone()


class ViewOfTheWhole(Bucket):
    """The chunk is a view: the whole stays in memory."""

    def make_state(self):
        master = self.weights.float() if self.weights.dtype != torch.float32 else self.weights
        self.master = master[self.mine]
        self.first, self.second = (torch.zeros_like(master)[self.mine] for _ in range(2))


@wrong(ZERO1, reason="memory", says=r"psi")
class SlicesKeepTheWhole(Engine):
    """Slices of full tensors: numel() says 1/N, the storage says all."""

    make = ViewOfTheWhole


@wrong(ZERO1, reason="memory", says=r"psi")
class KeepsGradients(Engine):
    """.grad stays beside the flat gradients: 6 psi instead of 4 psi."""

    def drop(self, parameter):
        pass

    def take(self, bucket, place, parameter):
        super().take(bucket, place, parameter)
        parameter.grad = parameter.grad.clone()

    def backward(self, loss):
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.grad = None
        super().backward(loss)


class GradientsInFp32(Bucket):
    """4 bytes for each gradient."""

    def __init__(self, parameters, group):
        super().__init__(parameters, group)
        self.gradients = self.gradients.float()


@wrong(ZERO1, reason="memory", says=r"psi")
class Fp32Gradients(Engine):
    """Whole gradients in fp32: 6 psi + 12 psi/N, and twice the bytes."""

    make = GradientsInFp32


class KeepsTheOld(Bucket):
    """The parameters' former memory is still referred to."""

    def __init__(self, parameters, group):
        self.before = [parameter.data for parameter in parameters]
        super().__init__(parameters, group)


@wrong(ZERO1, reason="memory", says=r"psi")
class KeepsFormerWeights(Engine):
    """Two copies of the weights."""

    make = KeepsTheOld


class StateOfRank0(Bucket):
    """Rank 0 is the optimizer."""

    def make_state(self):
        empty = self.weights[:0].float()
        self.master, self.first, self.second = empty, empty.clone(), empty.clone()
        if dist.get_rank() == 0:
            self.master = self.weights.float() if self.weights.dtype != torch.float32 else self.weights
            self.first, self.second = torch.zeros_like(self.master), torch.zeros_like(self.master)


@wrong(ZERO1, reason="memory", says=r"rank 0.*psi")
class Rank0OwnsAll(Engine):
    """One owner for everything: rank 0 holds 16 psi."""

    make = StateOfRank0

    def launch(self, bucket):
        bucket.handle = self.communicator.reduce(bucket.gradients, 0)

    def clear_others(self, bucket):
        if dist.get_rank():
            bucket.gradients.zero_()

    def own(self, bucket):
        return bucket.gradients if dist.get_rank() == 0 else bucket.gradients[:0]

    def write(self, bucket):
        if dist.get_rank() == 0:
            bucket.weights.copy_(bucket.master)

    def publish(self):
        for bucket in self.buckets:
            self.communicator.broadcast(bucket.weights, 0).wait()


@wrong(ZERO1, reason="values", says=r"has not moved")
class NobodyIsRank0(Engine):
    """`if owner`: rank 0's part is never sent."""

    def publish(self):
        for bucket in self.buckets:
            for owner, part in enumerate(bucket.weights.chunk(dist.get_world_size())):
                if owner:
                    self.communicator.broadcast(part, owner).wait()


@wrong(ZERO1, reason="values", says=r"has not moved")
class NeverPublishes(Engine):
    """Every rank has its own part of the new weights only."""

    def publish(self):
        pass


@wrong(ZERO1, reason="values", says=r"has not moved")
class PublishesTheFirstBucket(Engine):
    """A return where the loop should go on."""

    def publish(self):
        for bucket in self.buckets:
            return self.communicator.all_gather(bucket.weights).wait()


@wrong(ZERO1, reason="values|order", says=r"has not moved|has become|nobody waits|not waited for")
class NeverWaitsForTheGather(Engine):
    """The next forward finds weights that are on their way."""

    def publish(self):
        self.handles = [self.communicator.all_gather(bucket.weights) for bucket in self.buckets]


class RoundsDown(Bucket):
    """Chunks of total // N: the last elements are nobody's."""

    def __init__(self, parameters, group):
        super().__init__(parameters, group)
        total, count = sum(self.sizes), dist.get_world_size()
        rank, self.chunk = dist.get_rank(), total // count
        self.mine = slice(rank * self.chunk, (rank + 1) * self.chunk)
        self.make_state()
        self.part = self.weights[: self.chunk * count]


@wrong(ZERO1, reason="values", says=r"has not moved")
class TailIsNobodys(Engine):
    """What N does not divide is never trained."""

    make = RoundsDown

    def launch(self, bucket):
        count = dist.get_world_size()
        bucket.handle = self.communicator.reduce_scatter(bucket.gradients[: bucket.chunk * count])

    def publish(self):
        for bucket in self.buckets:
            self.communicator.all_gather(bucket.part).wait()


class PaddingInFront(Bucket):
    """Parameters are read one element too early: the padding leaks in."""

    def __init__(self, parameters, group):
        super().__init__(parameters, group)
        padding = len(self.weights) - sum(self.sizes)
        if padding:
            self.gradients_views = self.gradients[padding:].split(self.sizes)
        else:
            self.gradients_views = self.gradients.split(self.sizes)


@wrong(ZERO1, reason="values", says=r"has become|has not moved")
class PaddingLeaks(Engine):
    """Weights are padded behind, gradients in front."""

    make = PaddingInFront

    def take(self, bucket, place, parameter):
        bucket.gradients_views[place].add_(parameter.grad.flatten())


@wrong(ZERO1, reason="values", says=r"after construction")
class NoBroadcast(Engine):
    """Ranks start from different weights."""

    def broadcast(self):
        pass


@wrong(ZERO1, reason="values", says=r"the buffer|after construction")
class BroadcastsNoBuffers(Engine):
    """Parameters only."""

    def broadcast(self):
        for tensor in self.module.parameters():
            dist.broadcast(tensor.data, src=0)


@wrong(ZERO1, reason="values", says=r"the sum of the ranks' gradients")
class NeverDivides(Engine):
    """The sum instead of the mean."""

    def scaled(self, loss):
        return loss * self.scale


@wrong(ZERO1, reason="values", says=r"divided by N twice")
class DividesTwice(Engine):
    """In the loss, and again in the step."""

    def own(self, bucket):
        return bucket.gradients[bucket.mine] / dist.get_world_size()


@wrong(ZERO1, reason="values", says=r"has become")
class DividesByTwo(Engine):
    """Tried with two ranks only."""

    def scaled(self, loss):
        return loss * (self.scale / 2)


@wrong(ZERO1, reason="values", says=r"one rank's own gradient")
class NeverReduces(Engine):
    """Each owner uses its own gradient."""

    class _Done:
        def wait(self):
            pass

    def launch(self, bucket):
        bucket.handle = self._Done()

    def scaled(self, loss):
        return loss * self.scale


@wrong(ZERO1, reason="values", says=r"the last backward alone")
class AccumulationOverwrites(Engine):
    """copy_ instead of add_."""

    def take(self, bucket, place, parameter):
        bucket.views(bucket.gradients)[place].copy_(parameter.grad)


@wrong(ZERO1, reason="values", says=r"has become|has not moved")
class SendsAgainWhatWasSent(Engine):
    """Other ranks' chunks are not cleared: a second backward adds them once more."""

    def clear_others(self, bucket):
        pass


@wrong(ZERO1, reason="values", says=r"zero_grad\(\) did not clear")
class NeverClears(Engine):
    """zero_grad is the module's, and there is no .grad to clear."""

    def zero_grad(self):
        self.module.zero_grad()


@wrong(ZERO1, reason="order", says=r"waited for before")
class WaitsInTheHook(Engine):
    """Nothing overlaps."""

    def launch(self, bucket):
        super().launch(bucket)
        bucket.handle.wait()


@wrong(ZERO1, reason="order", says=r"no reduction has been issued")
class LaunchesAfterBackward(Engine):
    """All buckets leave when backward is over."""

    def advance(self):
        pass


@wrong(ZERO1, reason="order|memory", says=r"no reduction has been issued|1 reduction|during step\(\)")
class OneGiantBucket(Engine):
    """bucket_bytes is ignored. It shows in what a step needs for a moment, and in when the gradients leave."""

    def plan(self):
        self.bucket_bytes = 10**12
        return super().plan()


@wrong(ZERO1, reason="values|order", says=r"nobody waits|not been waited for|nan")
class NeverWaits(Engine):
    """Reads the gradients at once."""

    def land(self, bucket):
        self.clear_others(bucket)


@wrong(ZERO1, reason="values|order", says=r"nobody waits|not been waited for|nan")
class WaitsForTheLastOnly(Engine):
    """Believes that reductions complete in order."""

    def land(self, bucket):
        if bucket is self.buckets[-1]:
            bucket.handle.wait()
        self.clear_others(bucket)


@wrong(ZERO1, reason="values", says=r"branches.*has become|branches.*has not moved")
class IncompleteBucketsStay(Engine):
    """A bucket in which a gradient is missing never leaves."""

    def finish(self):
        self.waiting = []
        for bucket in self.buckets:
            if bucket.handle:
                self.land(bucket)


@wrong(ZERO1, reason="calls", says=r"go round the communicator")
class TalksPastTheCommunicator(Engine):
    """Calls torch.distributed itself."""

    def launch(self, bucket):
        own = bucket.gradients.chunk(dist.get_world_size())[dist.get_rank()]
        bucket.handle = dist.reduce_scatter_tensor(own, bucket.gradients, async_op=True)

    def publish(self):
        for bucket in self.buckets:
            dist.all_gather_into_tensor(bucket.weights, bucket.weights[bucket.mine])


@wrong(ZERO1, reason="signature", says=r"other objects")
class ParametersMadeAnew(Engine):
    """The model gets new Parameters."""

    def hook(self):
        for module in self.module.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                fresh = torch.nn.Parameter(parameter.data)
                setattr(module, name, fresh)
                for bucket in self.buckets:
                    bucket.parameters = [fresh if each is parameter else each for each in bucket.parameters]
        super().hook()


@wrong(ZERO1, reason="bytes", says=r"units of")
class AllReducesBoth(Engine):
    """Gradients by all-reduce, and weights too: each rank adds zeros where it owns nothing. 2 + 2 units."""

    def launch(self, bucket):
        bucket.handle = self.communicator.all_reduce(bucket.gradients)

    def publish(self):
        for bucket in self.buckets:
            bucket.weights[: bucket.mine.start] = 0
            bucket.weights[bucket.mine.stop :] = 0
            self.communicator.all_reduce(bucket.weights).wait()


@wrong(ZERO1, reason="bytes|memory", says=r"units of|psi")
class StacksAllGradients(Engine):
    """Every rank's gradients are gathered, and summed by everybody."""

    def launch(self, bucket):
        count, rank = dist.get_world_size(), dist.get_rank()
        bucket.all = bucket.gradients.new_zeros(count * len(bucket.gradients))
        bucket.all.view(count, -1)[rank] = bucket.gradients
        bucket.handle = self.communicator.all_gather(bucket.all)

    def land(self, bucket):
        bucket.handle.wait()
        bucket.gradients.copy_(bucket.all.view(dist.get_world_size(), -1).sum(0))
        bucket.handle = bucket.all = None
        self.clear_others(bucket)
