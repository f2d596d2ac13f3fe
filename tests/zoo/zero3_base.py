"""Lab 08: a ZeRO-3 engine that is right, in small methods, from which specimens differ in one or two."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

from zoo.zero2_base import Bucket
from zoo.zero2_base import Engine as Engine2

ZERO3 = "08.Zero3"


class Unit(Bucket):
    """Parameters of one module, group and dtype. `own` is this rank's chunk; `weights` is whole while it is used."""

    def __init__(self, parameters, group):
        self.shapes = [parameter.shape for parameter in parameters]
        super().__init__(parameters, group)
        self.own = self.weights[self.mine].clone()
        if self.own.dtype == torch.float32:
            self.master = self.own
        if group is None:  # frozen
            self.gradient = self.master = self.first = self.second = None
        self.users, self.arriving, self.whole = 0, None, True
        self.free()

    def views(self, flat):
        pieces = flat[: sum(self.sizes)].split(self.sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def fill(self):
        self.weights[self.mine].copy_(self.own)

    def point(self):
        for parameter, view in zip(self.parameters, self.views(self.weights), strict=True):
            parameter.data = view

    def start(self, communicator):
        if not self.whole and self.arriving is None:
            with torch.no_grad():
                self.allocate()
                self.fill()
                self.arriving = self.fetch(communicator)

    def allocate(self):
        self.weights.untyped_storage().resize_(self.weights.nbytes)

    def fetch(self, communicator):
        return communicator.all_gather(self.weights)

    def gather(self, communicator):
        self.start(communicator)
        if not self.whole:
            self.arriving.wait()
            self.arriving, self.whole = None, True
            self.point()

    def free(self):
        if self.arriving is not None:
            self.arriving.wait()
        self.arriving, self.whole = None, False
        for parameter in self.parameters:
            parameter.data = torch.empty(0, dtype=parameter.dtype)
        self.release()

    def release(self):
        self.weights.untyped_storage().resize_(0)


class Run:
    """One forward of a module, and its backward."""

    def __init__(self, units, before):
        self.units, self.before = units, before
        self.inputs, self.entered = 0, False


class Engine(Engine2):
    """A unit is a module that has parameters of its own. Fetches one unit ahead."""

    make = Unit
    ahead = 1

    def __init__(self, model, *arguments, **options):
        super().__init__(model, *arguments, **options)
        self.order, self.now, self.stack, self.entered = [], [], [], []
        frozen = [self.make(parameters, None) for parameters, group in self.parts if group is None]
        self.units = [*self.buckets, *frozen]
        unit_of = {parameter: unit for unit in self.units for parameter in unit.parameters}
        model.register_forward_pre_hook(lambda module, inputs: self.now.clear())
        for module, parameters in self.places():
            own = [parameter for parameter in parameters if parameter in unit_of]
            self.attach(module, list(dict.fromkeys(unit_of[parameter] for parameter in own)))
        model.register_forward_hook(lambda module, inputs, output: self.settle())

    def attach(self, module, units):
        if units:
            module.register_forward_pre_hook(lambda module, inputs: self.forward_begins(units, inputs))
            module.register_forward_hook(
                lambda module, inputs, output: self.forward_ends(units, output), always_call=True
            )

    def places(self):
        """(module, parameters that it needs while it runs)."""
        return [(module, list(module.parameters(recurse=False))) for module in self.module.modules()]

    def plan(self):
        group_of = {p: group for group in self.param_groups for p in group["params"] if p.requires_grad}
        self.parts, seen = [], set()
        for _, parameters in self.places():
            alike = {}
            for parameter in parameters:
                if parameter.numel() and parameter not in seen:
                    seen.add(parameter)
                    alike.setdefault(self.key(parameter, group_of.get(parameter)), []).append(parameter)
            self.parts += [(part, group_of.get(part[0])) for part in alike.values()]
        return [(part, group) for part, group in reversed(self.parts) if group is not None]

    def key(self, parameter, group):
        """Parameters of a module with the same key are one unit."""
        return id(group), parameter.dtype

    # The four moments.

    def forward_begins(self, units, inputs):
        run = Run(units, self.now[-1] if self.now else None)
        self.stack.append(run)
        self.acquire(units)
        if not self.active:
            self.now.append(run)
            for later in self.order[len(self.now) : len(self.now) + self.ahead]:
                self.fetch(later.units)
        if torch.is_grad_enabled():
            return tree_map(lambda value: self.watched(run, value), inputs)
        return None

    def watched(self, run, value):
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            return value
        run.inputs += 1
        view = value.view_as(value)
        view.register_hook(lambda gradient: self.left(run))
        return view

    def forward_ends(self, units, output):
        run = self.stack.pop()
        self.release(units)
        for value in tree_leaves(output):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                value.register_hook(lambda gradient: self.backward_begins(run))

    def backward_begins(self, run):
        if not run.entered:
            run.entered = True
            self.entered.append(run)
            self.acquire(run.units)
            for _ in range(self.ahead):
                run = run.before if run is not None else None
                self.fetch(run.units if run is not None else [])

    def left(self, run):
        run.inputs -= 1
        if run.inputs == 0 and run in self.entered:
            self.backward_ends(run)

    def backward_ends(self, run):
        self.entered.remove(run)
        self.release(run.units)

    # What they do.

    def acquire(self, units):
        for unit in units:
            unit.users += 1
            unit.gather(self.communicator)

    def release(self, units):
        for unit in units:
            unit.users -= 1
            if unit.users == 0:
                unit.free()

    def fetch(self, units):
        for unit in units:
            unit.start(self.communicator)

    def settle(self):
        """After a forward: remembers its order, frees what was fetched in vain."""
        self.order = list(self.now)
        self.free_unused()

    def free_unused(self):
        for unit in self.units:
            if unit.users == 0:
                unit.free()

    def finish(self):
        super().finish()
        for run in list(self.entered):
            self.backward_ends(run)
        self.free_unused()

    def write(self, unit):
        unit.own.copy_(unit.master)

    def publish(self):
        self.free_unused()

    @contextlib.contextmanager
    def gathered(self):
        self.acquire(self.units)
        try:
            yield
        finally:
            self.release(self.units)


class Renewed(Unit):
    """Makes a new flat tensor for each gathering, and forgets it afterwards."""

    def allocate(self):
        self.weights = torch.zeros(len(self.own) * dist.get_world_size(), dtype=self.own.dtype)

    def release(self):
        # The length is all that anybody asks for at rest.
        self.weights = self.own.new_zeros(1).expand(len(self.own) * dist.get_world_size())
