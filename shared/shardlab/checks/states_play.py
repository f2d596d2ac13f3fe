"""Inside a rank: puts a learner's engine through its scripts and keeps what it showed, as plain numbers."""

from __future__ import annotations

import contextlib
import gc
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.distributed_c10d import GroupMember

from ..meters import memory_so_far, on_call
from ..records import Call, Where
from .notes import Judged, Prepared
from .states_inside import StateSeen, look_inside
from .states_script import EngineCase, Script


@dataclass(frozen=True)
class StepSeen:
    """What one step showed on one rank. gradients: `.grad` after backward. cleared: whether zero_grad left nothing.

    returned: what step() returned, in words when it is no truth value. weights: None where they were not looked at.
    """

    gradients: list[torch.Tensor | None]
    returned: bool | str
    scale: float
    weights: list[torch.Tensor] | None
    cleared: bool
    calls: list[Call]
    where: Where | None  # of the engine's `step`
    state: StateSeen
    lost: str  # what step() did to gradients that it must leave alone
    loss: tuple[float, float]  # before and after backward


@dataclass(frozen=True)
class MemorySeen:
    """Bytes that an engine added at rest, beside parameters and gradients, and at most while it stepped."""

    at_rest: int
    peak: int


@dataclass(frozen=True)
class Played(Judged):
    """steps[engine][step]. lacks: what the engine should have and has not; then nothing else was seen."""

    steps: list[list[StepSeen]] = field(default_factory=list)
    memory: MemorySeen | None = None
    lacks: str = ""


class Lacks(Exception):
    """The engine has not what its contract says. The words are for the learner."""


@dataclass(frozen=True)
class Player:
    """What is launched in place of a solution: plays a case with the learner's class."""

    engine: Callable[..., Any]

    def __call__(self, case: EngineCase, rank: int) -> Played:
        with contextlib.nullcontext() if case.group else no_process_group():
            before = _live() if case.memory else 0
            lives = [_Life(self.engine, script, rank) for script in case.scripts]
            try:
                for number in range(max(len(script.steps) for script in case.scripts)):
                    for life in lives:
                        if number < len(life.script.steps):
                            life.step(number, look=not case.memory)
            except Lacks as lacks:
                return Played(None, "", lacks=str(lacks))
            memory = _measured(lives[0], before) if case.memory else None
            return Played(None, "", steps=[life.seen for life in lives], memory=memory)


def prepared(case: EngineCase, rank: int) -> Prepared:
    return Prepared((case, rank), lambda played: played, lambda: None)


class _Life:
    """One engine, its parameters, and what it has shown so far."""

    def __init__(self, engine: Callable[..., Any], script: Script, rank: int) -> None:
        self.script, self.rank = script, rank
        self.parameters = [
            torch.nn.Parameter(weight.to(script.dtype(place))) for place, weight in enumerate(script.weights(rank))
        ]
        handed = (each for each in self.parameters) if script.generator else self.parameters
        self.engine = engine(handed, **script.options)
        self.seen: list[StepSeen] = []
        self.stepped: set[int] = set()  # places of the parameters that have been updated
        self.windows: list[tuple[float, float]] = []  # live bytes before a step, the highest in it

    def step(self, number: int, look: bool) -> None:
        plan, engine = self.script.steps[number], self.engine
        loss = self._backward(number)
        gradients = [None if each.grad is None else each.grad.detach().clone() for each in self.parameters]
        for parameter in self.parameters:
            if parameter.grad is None or not plan.between:
                continue
            if plan.between == "halved in place":
                parameter.grad.mul_(0.5)
            else:
                parameter.grad = parameter.grad * 0.5
        handed = [None if each.grad is None else bool(each.grad.count_nonzero()) for each in self.parameters]
        calls: list[Call] = []
        step = _method(engine, "step")
        before = 0.0 if look else memory_so_far().at_end.time
        with on_call(lambda call, tensor: calls.append(call)):
            returned = step()
        if not look:
            record = memory_so_far()
            live = [sample.live for sample in record.samples if sample.time >= before]
            self.windows.append((record.at_end.live, max(live, default=record.at_end.live)))
        last = number == len(self.script.steps) - 1
        lost = self._lost(handed)
        if _truth(returned) is True:
            self.stepped |= {place for place, each in enumerate(handed) if each is not None}
        weights, state = None, StateSeen()
        if look and (last or number % self.script.every == 0):
            weights = [parameter.detach().clone() for parameter in self.parameters]
            state = look_inside(engine, self.parameters, self.stepped)
        _method(engine, "zero_grad")()
        left = [each.grad for each in self.parameters if each.grad is not None]
        cleared = not any(bool(gradient.count_nonzero()) for gradient in left)
        where = _where(step)
        kept = gradients if look else []
        self.seen.append(
            StepSeen(kept, _truth(returned), _scale(engine), weights, cleared, calls, where, state, lost, loss)
        )

    def _lost(self, handed: list[bool | None]) -> str:
        """What step() did to gradients that are the caller's. handed: whether they were other than 0; None: none."""
        for place, (parameter, full) in enumerate(zip(self.parameters, handed, strict=True)):
            left = parameter.grad
            if full is not None and left is None:
                return f"after step() the .grad of parameter {place} is None"
            if full and left is not None and not left.count_nonzero():
                return f"after step() the .grad of parameter {place} is all zeros"
        return ""

    def _backward(self, number: int) -> tuple[float, float]:
        """What the last loss was before and after the engine's backward."""
        plan = self.script.steps[number]
        true = self.script.gradients(number, self.rank)
        for parameter, gradient in zip(self.parameters, true, strict=True):
            if gradient is None:
                parameter.grad = None  # also where zero_grad leaves zeros
        before = after = 0.0
        for _ in range(plan.backwards):
            loss = torch.zeros(())
            for parameter, gradient in zip(self.parameters, true, strict=True):
                if gradient is not None:
                    loss = loss + _WithGradient.apply(parameter, gradient)
            if not loss.requires_grad:
                loss = loss + torch.zeros((), requires_grad=True)
            before = loss.item()
            _method(self.engine, "backward")(loss)
            after = loss.item()
        return before, after


class _WithGradient(torch.autograd.Function):
    """A finite number, float32, whose gradient with respect to the parameter is what was asked for."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(gradient)
        ctx.dtype = parameter.dtype
        return torch.tensor(0.25)

    @staticmethod
    def backward(ctx: Any, outer: torch.Tensor) -> Any:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return (gradient.to(outer.dtype) * outer).to(ctx.dtype), None


def _method(engine: Any, name: str) -> Callable[..., Any]:
    method = getattr(engine, name, None)
    if not callable(method):
        raise Lacks(f"the engine has no method {name}()")
    return method


def _where(method: Callable) -> Where | None:
    code = getattr(inspect.unwrap(getattr(method, "__func__", method)), "__code__", None)
    return None if code is None else Where(code.co_filename, code.co_firstlineno, code.co_name)


def _scale(engine: Any) -> float:
    try:
        return float(engine.scale)
    except AttributeError:
        raise Lacks("the engine has no attribute scale") from None
    except (TypeError, ValueError):
        raise Lacks(f"engine.scale is {_described(engine.scale)}, not a number") from None


def _truth(returned: Any) -> bool | str:
    if isinstance(returned, torch.Tensor) and returned.numel() == 1:
        return bool(returned)
    if isinstance(returned, (bool, int)) or type(returned).__name__ in ("bool_", "bool"):
        return bool(returned)
    return _described(returned)


def _described(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _live() -> int:
    gc.collect()
    return memory_so_far().at_end.live


def _measured(life: _Life, before: float) -> MemorySeen:
    """before: live bytes when there was no engine and no parameter."""
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for parameter in life.parameters
        for each in (parameter.data, parameter.grad)
        if each is not None
    }
    at_rest = _live() - before - sum(storages.values())
    return MemorySeen(int(at_rest), int(max(peak - now for now, peak in life.windows)))


@contextlib.contextmanager
def no_process_group() -> Iterator[None]:
    """While this is open torch.distributed is as it is before init_process_group, whichever way it is asked."""
    world = GroupMember.WORLD
    GroupMember.WORLD = None
    try:
        yield
    finally:
        GroupMember.WORLD = world
