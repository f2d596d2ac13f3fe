"""Lab 08: ZeRO-3 engines that are right, written in their own ways."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from zoo import right
from zoo.zero3_base import ZERO3, Engine, Renewed, Unit


@right(ZERO3)
class Plain(Engine):
    """The shared base: a unit for each module that has parameters, one fetched ahead; storages are emptied."""


@right(ZERO3)
class NothingAhead(Engine):
    """Each unit is fetched when it is needed."""

    ahead = 0


@right(ZERO3)
class TwoAhead(Engine):
    """Fetches the next two units."""

    ahead = 2


@right(ZERO3)
class OneFlatPerParameter(Engine):
    """Each parameter is a unit of its own."""

    def key(self, parameter, group):
        return parameter


class Rows(Unit):
    """One parameter, cut along its rows: rank r has ceil(rows / N) of them, or fewer, or none."""

    @property
    def chunk(self):
        rows = self.shapes[0][0] if self.shapes[0] else 1
        return -(-rows // dist.get_world_size()) * (self.sizes[0] // rows)

    @chunk.setter
    def chunk(self, value):
        pass


@right(ZERO3)
class RowSlices(OneFlatPerParameter):
    """Each parameter is cut along its rows, as FSDP2 does."""

    make = Rows


@right(ZERO3)
class PerChild(Engine):
    """A child of the model is a unit, and each entry of its lists; the rest belongs to the model."""

    def places(self):
        children = []
        for child in self.module.children():
            is_list = isinstance(child, (torch.nn.ModuleList, torch.nn.Sequential))
            children += list(child.children()) if is_list else [child]
        return [(self.module, list(self.module.parameters(recurse=False))), *self.all_of(children)]

    def all_of(self, children):
        return [(child, list(child.parameters())) for child in dict.fromkeys(children)]


@right(ZERO3)
class LastStaysWhole(Engine):
    """The layer that runs last is kept from forward to backward: it would be gathered again at once."""

    def __init__(self, model, **options):
        self.kept = []
        super().__init__(model, **options)

    def forward_ends(self, units, output):
        run = self.stack[-1]
        last = bool(self.order) and run.units is self.order[-1].units
        if torch.is_grad_enabled() and not self.active and last:
            self.kept.append(run)
            for unit in units:
                unit.users += 1
        super().forward_ends(units, output)

    def backward_begins(self, run):
        super().backward_begins(run)
        self.let_go(run)

    def let_go(self, run):
        if run in self.kept:
            self.kept.remove(run)
            self.release(run.units)

    def finish(self):
        for run in list(self.kept):
            self.let_go(run)
        super().finish()


@right(ZERO3)
class SavedTensorHooks(Engine):
    """New memory for each gathering. What the graph would save of it is a note, looked up when it is needed again."""

    make = Renewed

    def forward(self, *inputs):
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            return super().forward(*inputs)

    def pack(self, tensor):
        address = tensor.untyped_storage().data_ptr()
        for unit in self.units:
            if unit.whole and unit.weights.untyped_storage().data_ptr() == address:
                return unit, tensor.size(), tensor.stride(), tensor.storage_offset()
        return tensor

    def unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        unit, *view = packed
        return unit.weights.as_strided(*view)


class Again(torch.autograd.Function):
    """A module without a graph; backward runs it once more, with one."""

    @staticmethod
    def forward(ctx, engine, units, forward, switch, *inputs):
        ctx.engine, ctx.units, ctx.again = engine, units, forward
        ctx.save_for_backward(*inputs)
        engine.acquire(units)
        output = forward(*inputs)
        engine.release(units)
        return output

    @staticmethod
    def backward(ctx, *gradients):
        inputs = [each.detach().requires_grad_(each.requires_grad) for each in ctx.saved_tensors]
        ctx.engine.acquire(ctx.units)
        with torch.enable_grad():
            output = ctx.again(*inputs)
        if output.requires_grad:
            torch.autograd.backward(output, gradients)
        ctx.engine.ran_back(ctx.units)
        ctx.engine.release(ctx.units)
        return (None, None, None, None, *(each.grad for each in inputs))


@right(ZERO3)
class Recomputes(Engine):
    """No hooks on layers: each module's forward is a function of its own, which computes once more in backward."""

    def attach(self, module, units):
        if not units:
            return
        forward = module.forward
        if module is self.module:  # it cannot be run again as a whole
            super().attach(module, units)
            return

        def run(*inputs):
            if not torch.is_grad_enabled():
                self.acquire(units)
                output = forward(*inputs)
                self.release(units)
                return output
            if not self.active:
                for unit in units:
                    unit.expected = getattr(unit, "expected", 0) + 1
            return Again.apply(self, units, forward, torch.zeros((), requires_grad=True), *inputs)

        module.forward = run

    def arrived(self, bucket, place, parameter):
        """A gradient may come in parts: what is complete is known when the module has run back for the last time."""
        if parameter in self.of_the_model:
            super().arrived(bucket, place, parameter)

    def backward(self, loss):
        self.of_the_model = set(self.module.parameters(recurse=False))
        super().backward(loss)

    def ran_back(self, units):
        for unit in units:
            unit.expected -= 1
            if unit.expected == 0 and unit.gradient is not None:
                self.complete(unit)

    def complete(self, unit):
        for place, parameter in enumerate(unit.parameters):
            if parameter.grad is not None:
                Engine.arrived(self, unit, place, parameter)

    def finish(self):
        self.active = True
        for unit in self.buckets:
            unit.expected = 0
            self.complete(unit)
        self.active = False
        super().finish()


@right(ZERO3)
class WaitsAtOnce(Engine):
    """Nothing runs in the background but reductions: a fetch is waited for where it is started."""

    def fetch(self, units):
        for unit in units:
            unit.gather(self.communicator)

    def free_unused(self):
        for unit in self.units:
            if unit.users == 0 and unit.whole:
                unit.free()


@right(ZERO3)
class FlagByMaximum(Engine):
    """Overflow is a flag of its own, reduced by MAX; the norm is that of what is finite."""

    def norm(self):
        bad = any(not bool(unit.gradient.isfinite().all()) for unit in self.buckets)
        flag = torch.tensor([float(bad)])
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        norm = super().norm()
        return math.inf if flag.item() else norm


class WideGradient(Unit):
    def __init__(self, parameters, group):
        super().__init__(parameters, group)
        if group is not None:
            self.gradient = self.gradient.float()


@right(ZERO3)
class ShardOfGradientsInFloat32(Engine):
    """The sum over several backwards is kept in float32."""

    make = WideGradient


@right(ZERO3)
class AheadInBackwardOnly(PerChild):
    """In forward nothing is fetched ahead: who knows what will run? In backward the order is known."""

    def settle(self):
        self.free_unused()
