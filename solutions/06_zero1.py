# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 06 - ZeRO-1: every rank owns a part of the optimizer
#
# **You build:** `partition` and `Zero1`, an engine in which every rank keeps one N-th of the optimizer's state.
# **Time:** 75 to 90 minutes.

# %% tags=["parameters"]
WORLD_SIZE = 4  # number of ranks (processes), at least 2
DEVICE = "auto"  # "auto": one GPU per rank if there are enough, else the CPU
SEED = 0
BUCKET_BYTES = 60_000  # of the engines in most measurements

# %% tags=["export"]
import contextlib
import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist

from shardlab import reuse
from shardlab.communicator import Library
from shardlab.meters import label
from shardlab.pieces import Piece

# %% tags=["export"]
_rings = reuse("04_ring_all_reduce")
ring_reduce_scatter, ring_all_gather = _rings.ring_reduce_scatter, _rings.ring_all_gather
ring_all_reduce = _rings.ring_all_reduce
broadcast_parameters = reuse("03_ddp").broadcast_parameters  # of parameters and buffers
plan_buckets = reuse("05_ddp_overlap").plan_buckets
Pending = reuse("05_ddp_overlap").Pending  # wait() waits for a thread


class Rings:
    """A communicator made of lab 04's rings: one thread runs them, one after the other. Holds one chunk as a buffer."""

    def __init__(self):
        self.thread = ThreadPoolExecutor(max_workers=1)

    def reduce_scatter(self, flat):
        return self.start(ring_reduce_scatter, list(flat.chunk(dist.get_world_size())))

    def all_gather(self, flat):
        return self.start(ring_all_gather, list(flat.chunk(dist.get_world_size())))

    def all_reduce(self, flat):
        return self.start(ring_all_reduce, flat)

    def start(self, collective, argument):
        return Pending(self.thread.submit(collective, argument))


# %% nbgrader={"grade": false, "grade_id": "partition", "locked": false, "schema_version": 3, "solution": true, "task": false} tags=["export"]
def partition(sizes, world_size):
    """Who owns what: for each rank a list of (index, start, stop), elements start to stop - 1 of parameter `index`.

    sizes: the elements of each parameter. Every element has one owner; no rank owns more than
    ceil(sum of sizes / N) elements; no piece is empty.
    """
    ### BEGIN SOLUTION
    chunk = -(-sum(sizes) // world_size)  # rounded up
    pieces = [[] for _ in range(world_size)]
    begin = 0  # where this parameter begins when all lie end to end
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            owner, used = divmod(begin + start, chunk)
            stop = min(size, start + chunk - used)
            pieces[owner].append(Piece(index, start, stop))
            start = stop
        begin += size
    return pieces
    ### END SOLUTION


# %% tags=["export"]
class Bucket:
    """Some parameters of one dtype, laid end to end in N equal chunks: rank r owns chunk r. Holds the weights."""

    def __init__(self, parameters):
        world_size, rank = dist.get_world_size(), dist.get_rank()
        self.parameters = parameters
        self.shapes = [parameter.shape for parameter in parameters]
        self.sizes = [parameter.numel() for parameter in parameters]
        self.starts = [0, *accumulate(self.sizes)][:-1]
        self.chunk = -(-sum(self.sizes) // world_size)  # rounded up: the rest is padding
        self.mine = slice(rank * self.chunk, (rank + 1) * self.chunk)
        self.weights = parameters[0].detach().new_zeros(world_size * self.chunk)
        label("parameters", [self.weights])
        for place, parameter in enumerate(parameters):
            self.view(self.weights, place).copy_(parameter.detach())
        self.point_to(self.weights)

    def view(self, flat, place):
        """Where a parameter lies in a flat tensor of this layout, in the parameter's shape."""
        start, size = self.starts[place], self.sizes[place]
        return flat[start : start + size].view(self.shapes[place])

    def point_to(self, flat):
        """The parameters' own memory from now on: what is gathered in `flat` is in the model at once."""
        for place, parameter in enumerate(self.parameters):
            parameter.data = self.view(flat, place)

    def pieces(self, part=slice(None)):
        """What lies in a part of the flat tensor, in order: pieces of the bucket's parameters, without the padding."""
        first, last, _ = part.indices(len(self.weights))
        for place, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            begin, end = max(first, start), min(last, start + size)
            if begin < end:
                yield Piece(place, begin - start, end - start)


# %% tags=["export"]
class Shard:
    """AdamW for one chunk of weights: 12 bytes an element, 8 where fp32 weights are their own master. Sends nothing."""

    def __init__(self, weights, group):
        """weights: the chunk, which update() writes. group: "lr", "betas", "eps", "weight_decay", read at each update."""
        self.weights, self.group, self.steps = weights, group, 0
        # Memory is made here, for the chunk alone: a master of everything that is cut later would have been whole once.
        self.master = weights if weights.dtype == torch.float32 else weights.float()
        self.first_moment = torch.zeros_like(self.master)
        self.second_moment = torch.zeros_like(self.master)
        label("optimizer", [tensor for _, tensor in self.states()])

    def states(self):
        if self.master is not self.weights:
            yield "master", self.master
        yield "first_moment", self.first_moment
        yield "second_moment", self.second_moment

    @torch.no_grad()
    def update(self, gradient, factor):
        """One step (Loshchilov & Hutter 2019, algorithm 2). `gradient` times `factor` is the true gradient."""
        lr, (beta1, beta2) = self.group["lr"], self.group["betas"]
        self.steps += 1
        gradient = gradient.float() * factor  # to fp32 first, or small ones would become 0
        self.first_moment.lerp_(gradient, 1 - beta1)
        self.second_moment.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        deviation = torch.sqrt(self.second_moment, out=gradient)  # its memory is free now
        deviation.div_(math.sqrt(1 - beta2**self.steps)).add_(self.group["eps"])
        self.master.mul_(1 - lr * self.group["weight_decay"])
        self.master.addcdiv_(self.first_moment, deviation, value=-lr / (1 - beta1**self.steps))
        if self.master is not self.weights:
            self.weights.copy_(self.master)


# %% nbgrader={"grade": false, "grade_id": "Zero", "locked": false, "schema_version": 3, "solution": true, "task": false} tags=["export"]
class Zero(torch.nn.Module):
    """What ZeRO's stages share: buckets, hooks, and a step that all ranks decide alike, from one number sent.

    A stage says what a rank holds (`new_bucket`), and how gradients reach their owners (`take`, `launch`, `land`,
    `gradient_of`).
    """

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
        broadcast_parameters(model)
        self.communicator = communicator or Library()
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        groups = groups or [{"params": model.parameters()}]
        self.param_groups = [
            {**options, **group, "params": list(group["params"])} for group in groups
        ]
        self.max_norm, self.scale, self.growth_interval = (
            max_norm,
            float(scale),
            growth_interval,
        )
        self.steps_without_overflow = 0
        self.reducing = False  # hooks are always there, but act only in this engine's backward
        self.waiting, self.travelling = (
            [],
            [],
        )  # buckets that have not left; that have not arrived
        self.buckets = [self.new_bucket(*planned) for planned in self.plan(bucket_bytes)]
        for bucket in self.buckets:
            for place, parameter in enumerate(bucket.parameters):
                hook = partial(self.arrived, bucket, place)
                parameter.register_post_accumulate_grad_hook(hook)

    def plan(self, bucket_bytes):
        """[(parameters, group)] for each bucket, in the order in which backward should complete them."""
        backwards = reversed(list(self.module.parameters()))
        turn = {parameter: number for number, parameter in enumerate(backwards)}
        planned = []
        for group in self.param_groups:
            trained = [each for each in group["params"] if each.requires_grad and each.numel()]
            trained.sort(key=turn.get)
            for indices in plan_buckets(trained, bucket_bytes):
                planned.append(([trained[index] for index in indices], group))
        return sorted(planned, key=lambda one: turn[one[0][-1]])  # by the last gradient of each

    def forward(self, *inputs):
        return self.module(*inputs)

    def backward(self, loss):
        """Backward of the scaled loss. The owners' gradients grow by the mean over the ranks."""
        for bucket in self.buckets:
            bucket.missing = set(range(len(bucket.parameters)))  # places without a gradient yet
        self.waiting = list(self.buckets)
        self.reducing = True
        try:
            (loss * (self.scale / dist.get_world_size())).backward()
        finally:  # also after an exception every bucket leaves, or the other ranks would wait for ever
            self.reducing = False
            while self.waiting:
                self.send_next()
            while self.travelling:
                self.land(self.travelling.pop(0))

    def arrived(self, bucket, place, parameter):
        """A hook: the gradient of `bucket.parameters[place]` is complete, in `parameter.grad`."""
        if not self.reducing:
            return
        self.take(bucket, place, parameter.grad)
        parameter.grad = None
        bucket.missing.discard(place)
        while self.waiting and not self.waiting[0].missing:
            self.send_next()

    def send_next(self):
        bucket = self.waiting.pop(0)
        self.launch(bucket)
        self.travelling.append(bucket)

    def new_bucket(self, parameters, group):
        """A bucket with the optimizer state that this rank keeps of it, in `bucket.shard`."""
        ### BEGIN SOLUTION
        bucket = Bucket(parameters)
        bucket.shard = Shard(bucket.weights[bucket.mine], group)
        return bucket
        ### END SOLUTION

    @torch.no_grad()
    def global_norm(self):
        """The norm of all gradients, still scaled, the same on every rank. Not finite: some rank had an overflow."""
        ### BEGIN SOLUTION
        where = next(self.module.parameters()).device
        total = torch.zeros(1, dtype=torch.float64, device=where)
        for bucket in self.buckets:
            total += (
                torch.linalg.vector_norm(self.gradient_of(bucket), dtype=torch.float64) ** 2
            )
        self.communicator.all_reduce(total).wait()
        return total.sqrt().item()
        ### END SOLUTION

    @torch.no_grad()
    def step(self):
        """One AdamW step on every rank's own part, and True. Overflow on any rank: no change, and False."""
        ### BEGIN SOLUTION
        norm = self.global_norm()
        if not math.isfinite(norm):
            self.after_overflow()
            return False
        factor = 1 / self.scale
        if self.max_norm is not None:
            factor *= min(1.0, self.max_norm / (norm / self.scale + 1e-6))
        for bucket in self.buckets:
            bucket.shard.update(self.gradient_of(bucket), factor)
        self.publish()
        self.after_step()
        return True
        ### END SOLUTION

    def publish(self):
        """Every rank gets every part of the updated weights."""
        ### BEGIN SOLUTION
        handles = [self.communicator.all_gather(bucket.weights) for bucket in self.buckets]
        for handle in handles:
            handle.wait()
        ### END SOLUTION

    def after_overflow(self):
        self.scale = max(self.scale / 2, 1.0)
        self.steps_without_overflow = 0

    def after_step(self):
        self.steps_without_overflow += 1
        if self.steps_without_overflow == self.growth_interval:
            self.scale *= 2
            self.steps_without_overflow = 0

    @contextlib.contextmanager
    def gathered(self):
        """Inside, the module's parameters are whole and current. In this stage they always are."""
        yield

    def states(self):
        """(kind, tensor, pieces) of all that is held, for pictures of it."""
        for bucket in self.buckets:
            yield "weights", bucket.weights, self.pieces(bucket)
            for kind, tensor in bucket.shard.states():
                yield kind, tensor, self.pieces(bucket, bucket.mine)

    def pieces(self, bucket, part=slice(None)):
        """The pieces of a part of a bucket, by the numbers that the parameters have in the model."""
        number = {parameter: index for index, parameter in enumerate(self.module.parameters())}
        return [
            Piece(number[bucket.parameters[place]], start, stop)
            for place, start, stop in bucket.pieces(part)
        ]


# %% nbgrader={"grade": false, "grade_id": "Zero1", "locked": false, "schema_version": 3, "solution": true, "task": false} tags=["export"]
class Zero1(Zero):
    """The optimizer's state is split over the ranks (Rajbhandari et al. 2020, section 5.1).

    Holds 4 psi + 12 psi/N bytes in fp16. Sends 2 psi (N-1)/N elements a step, and one number.
    """

    def new_bucket(self, parameters, group):
        """A bucket with its shard, and `bucket.gradients` in the same layout."""
        ### BEGIN SOLUTION
        bucket = super().new_bucket(parameters, group)
        bucket.gradients = torch.zeros_like(bucket.weights)
        label("gradients", [bucket.gradients])
        return bucket
        ### END SOLUTION

    def take(self, bucket, place, gradient):
        """A gradient is complete: adds it to what is in its place."""
        ### BEGIN SOLUTION
        bucket.view(bucket.gradients, place).add_(gradient)
        ### END SOLUTION

    def launch(self, bucket):
        """All of the bucket is there: starts its way to the owners."""
        ### BEGIN SOLUTION
        bucket.handle = self.communicator.reduce_scatter(bucket.gradients)
        ### END SOLUTION

    def land(self, bucket):
        """Waits. Then only this rank's own chunk holds anything: the other chunks are zeros, for the next backward."""
        ### BEGIN SOLUTION
        bucket.handle.wait()
        bucket.handle = None  # it holds on to tensors
        bucket.gradients[: bucket.mine.start] = 0
        bucket.gradients[bucket.mine.stop :] = 0
        ### END SOLUTION

    def gradient_of(self, bucket):
        """This rank's own chunk of the gradients: the sum over the ranks of what they sent."""
        ### BEGIN SOLUTION
        return bucket.gradients[bucket.mine]
        ### END SOLUTION

    def zero_grad(self):
        """Forgets the gradients."""
        ### BEGIN SOLUTION
        for bucket in self.buckets:
            bucket.gradients.zero_()
        ### END SOLUTION

    def states(self):
        yield from super().states()
        for bucket in self.buckets:
            yield "gradients", bucket.gradients, self.pieces(bucket)
