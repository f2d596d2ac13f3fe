"""Lab 05: right engines, written in other ways."""

from __future__ import annotations

import contextlib
import math

import torch
import torch.distributed as dist
from torch.func import functional_call

from zoo import right
from zoo.overlap_base import Bucket, Engine

DDP = "05.DistributedDataParallel"


@right(DDP)
class Plain(Engine):
    """Post-accumulate hooks and flags."""


@right(DDP)
class OnePerParameter(Engine):
    """Every parameter is a bucket of its own: many messages, but all of them overlap."""

    def plan(self, parameters, bucket_bytes):
        return [[index] for index in range(len(parameters))]


@right(DDP)
class HooksOnTheGraph(Engine):
    """Hooks on the AccumulateGrad nodes, as torch's reducer has them."""

    def hook(self):
        self.nodes = []
        for parameter in self.trained:
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            node.register_hook(lambda *_, parameter=parameter: self.arrived(parameter))
            self.nodes.append(node)


@right(DDP)
class TensorHooks(Engine):
    """Hooks that see the new gradient before it is added to p.grad."""

    def hook(self):
        self.coming = {}
        for parameter in self.trained:
            parameter.register_hook(lambda gradient, parameter=parameter: self.seen(parameter, gradient))

    def seen(self, parameter, gradient):
        self.coming = {parameter: gradient}
        self.arrived(parameter)
        self.coming = {}

    @torch.no_grad()
    def fill(self, bucket, place):
        super().fill(bucket, place)
        parameter = bucket.parameters[place]
        if parameter in self.coming:
            bucket.views[place].add_(self.coming[parameter] / dist.get_world_size())


class Through(torch.autograd.Function):
    """The parameter itself; tells the engine when its gradient passes on the way back."""

    @staticmethod
    def forward(ctx, parameter, engine, which):
        ctx.engine, ctx.which = engine, which
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx, gradient):
        ctx.engine.seen(ctx.which, gradient)
        return gradient, None, None


@right(DDP)
class AutogradFunction(TensorHooks):
    """Parameters go through an autograd.Function on their way into the module."""

    def hook(self):
        self.coming = {}

    def forward(self, *inputs):
        if self.module.training and self.sync:
            self.share_buffers()
        wrapped = {
            name: Through.apply(parameter, self, parameter)
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad
        }
        return functional_call(self.module, wrapped, inputs)


@right(DDP)
class CallbackAtTheEnd(Engine):
    """Autograd itself calls finish() when the backward is over."""

    def backward(self, loss):
        if self.sync:
            self.start()
            loss.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(self.over))
        loss.backward()

    def over(self):
        self.active = False
        self.finish()


@right(DDP)
class OrderOfArrival(Engine):
    """After the first step buckets are made anew, in the order in which rank 0's gradients came."""

    def __init__(self, module, bucket_bytes=25 * 2**20, all_reduce=None):
        self.arrivals = None
        super().__init__(module, bucket_bytes, all_reduce)
        self.limit, self.arrivals = bucket_bytes, {}

    def arrived(self, parameter):
        if self.active and self.arrivals is not None:
            self.arrivals.setdefault(parameter)
        super().arrived(parameter)

    def finish(self):
        super().finish()
        if self.arrivals is None or not self.trained:
            return
        number = {parameter: index for index, parameter in enumerate(self.trained)}
        order = torch.tensor([number[parameter] for parameter in (self.arrivals | number)])
        dist.broadcast(order, 0)
        self.arrivals = None
        self.trained = [self.trained[index] for index in order.tolist()]
        self.buckets = [Bucket([self.trained[index] for index in plan]) for plan in self.plan(self.trained, self.limit)]
        self.place = {
            parameter: (bucket, place) for bucket in self.buckets for place, parameter in enumerate(bucket.parameters)
        }


@right(DDP)
class PlannedForwards(Engine):
    """Buckets are planned in the order of definition, and leave from the last to the first."""

    def order(self):
        return super().order()[::-1]

    def plan(self, parameters, bucket_bytes):
        return super().plan(parameters, bucket_bytes)[::-1]


@right(DDP)
class FilledWhenComplete(Engine):
    """Nothing is copied before all gradients of a bucket are there."""

    def fill(self, bucket, place):
        pass

    def launch(self, bucket):
        for place in range(len(bucket.parameters)):
            super().fill(bucket, place)
        super().launch(bucket)


@right(DDP)
class DividesAfterTheSum(Engine):
    """Sums first, then divides."""

    @torch.no_grad()
    def fill(self, bucket, place):
        gradient = bucket.parameters[place].grad
        bucket.views[place].copy_(torch.zeros(()) if gradient is None else gradient)

    def give_back(self, parameter):
        super().give_back(parameter)
        parameter.grad /= dist.get_world_size()


@right(DDP)
class DividesByTheRootTwice(DividesAfterTheSum):
    """Half of the factor before, half after: safe in float16 in both directions."""

    @torch.no_grad()
    def fill(self, bucket, place):
        super().fill(bucket, place)
        bucket.views[place].div_(math.sqrt(dist.get_world_size()))

    def give_back(self, parameter):
        Engine.give_back(self, parameter)
        parameter.grad /= math.sqrt(dist.get_world_size())


@right(DDP)
class ViewsBetweenSteps(Engine):
    """p.grad is a view of the bucket, which saves a copy; before a backward it becomes a tensor of its own again."""

    def start(self):
        super().start()
        for parameter in self.trained:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()

    @contextlib.contextmanager
    def no_sync(self):
        with super().no_sync():
            yield

    def give_back(self, parameter):
        bucket, place = self.place[parameter]
        parameter.grad = bucket.views[place]


@right(DDP)
class FreshBuckets(Engine):
    """No memory is kept between steps: a bucket's flat tensor is made when it leaves."""

    def fill(self, bucket, place):
        pass

    @torch.no_grad()
    def launch(self, bucket):
        n = dist.get_world_size()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad / n for p in bucket.parameters]
        bucket.flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        pieces = bucket.flat.split([p.numel() for p in bucket.parameters])
        bucket.views = [piece.view(p.shape) for piece, p in zip(pieces, bucket.parameters, strict=True)]
        super().launch(bucket)
