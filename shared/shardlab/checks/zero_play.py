"""Labs 06 to 08, inside a rank: puts a learner's engine through a case and keeps what it showed."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ..meters import is_library, on_call
from ..records import Call, Where
from .notes import Judged
from .trial import digest_of
from .zero_cases import Step, ZeroCase
from .zero_memory import Held, MemoryWatch, readable
from .zero_mirror import loss_at, peek
from .zero_models import build
from .zero_order import Happened, Log


@dataclass(frozen=True)
class StepSeen:
    """weights: of all parameters after the step, unless bytes are measured. losses: one per backward.

    returned: what step() returned, as text when it is no bool. calls: those made in the step. peek: a loss of the whole
    model after the step.
    """

    weights: list[torch.Tensor]
    returned: bool | str
    scale: float
    losses: list[float]
    calls: list[Call]
    peek: float
    where: Where | None = None


@dataclass(frozen=True)
class Played(Judged):
    """lacks: what the engine should have and has not. start: the weights and buffers after construction.

    steps: what each showed. held: live bytes by the moment they were looked at. happened: the order of events in the
    last step, when the check's own communicator was plugged in.
    """

    lacks: str = ""
    start: dict[str, torch.Tensor] = field(default_factory=dict)
    steps: list[StepSeen] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    happened: list[Happened] = field(default_factory=list)
    through: int = 0  # elements that went through the plugged communicator in the last step
    waiting: list[str] = field(default_factory=list)  # its operations that nobody waited for
    freed: list[str] = field(default_factory=list)  # whose memory went before that
    around: list[Call] = field(default_factory=list)  # calls of that step that did not


class Lacks(Exception):
    """The engine has not what its contract says. The words are for the learner."""


@dataclass(frozen=True)
class Player:
    """What is launched in place of a solution: plays a case with the learner's class."""

    engine: Callable[..., Any]

    def __call__(self, case: ZeroCase, rank: int, world_size: int) -> Played:
        # Modes watch every operation, for memory and for tensors that are used too early. That takes its time.
        watched = contextlib.nullcontext() if case.measured or case.watched else _disable_current_modes()
        with watched:
            life = _Life(self.engine, case, rank)
            try:
                life.play()
            except Lacks as lacks:
                return Played(None, "", lacks=str(lacks))
        stepped = [torch.tensor(step.returned is True) for step in life.steps]
        tensors = [each for step in life.steps for each in step.weights] + stepped
        return Played(
            None,
            digest_of(tensors),
            start=life.start,
            steps=life.steps,
            held=life.memory.seen,
            happened=life.log.happened,
            through=life.log.elements,
            around=life.log.around,
            waiting=list(life.log.waiting.values()),
            freed=life.log.freed,
        )


class _Life:
    """One engine, its model, and what it has shown so far."""

    def __init__(self, engine: Callable[..., Any], case: ZeroCase, rank: int) -> None:
        self.make, self.case, self.rank = engine, case, rank
        fixed, split = case.rest
        self.memory = MemoryWatch(case.measured, 1.005 * (fixed + split / dist.get_world_size()))
        self.log = Log()
        self.steps: list[StepSeen] = []
        self.start: dict[str, torch.Tensor] = {}

    def play(self) -> None:
        case = self.case
        self.memory.begin()
        self.model = build(case.kind, case.torch_dtype, self.rank)
        before = dict(self.model.named_parameters())
        options: dict[str, Any] = dict(case.options)
        if case.bucket_bytes is not None:
            options["bucket_bytes"] = case.bucket_bytes
        if case.groups:
            options["groups"] = _groups(self.model, case)
        if case.plugged:
            self.log.watch(self.model)
        if case.plugged or case.measured:
            options["communicator"] = self.log
        self.engine = self.make(self.model, **options)
        del options
        self.memory.look("construction", self.model)
        self._look_at(before)
        with self._gathered():
            if not case.measured:
                self.start = {name: each.detach().clone() for name, each in self.engine.module.state_dict().items()}
        for number, step in enumerate(case.steps):
            self._step(number, step)

    def _look_at(self, before: dict[str, nn.Parameter]) -> None:
        for name in ("backward", "step", "zero_grad", "gathered"):
            if not callable(getattr(self.engine, name, None)):
                raise Lacks(f"the engine has no method {name}()")
        if not callable(self.engine):
            raise Lacks("the engine cannot be called: forward(*inputs), or __call__")
        for name in ("scale", "param_groups"):
            if not hasattr(self.engine, name):
                raise Lacks(f"the engine has no {name}")
        module = getattr(self.engine, "module", None)
        if not isinstance(module, nn.Module):
            raise Lacks("engine.module is not the model that was handed in")
        after = dict(module.named_parameters())
        if list(after) != list(before) or any(after[name] is not before[name] for name in before):
            raise Lacks("the parameters of engine.module are other objects than the model's")
        groups = self.engine.param_groups
        if not isinstance(groups, list) or not all(isinstance(each, dict) and "lr" in each for each in groups):
            raise Lacks('engine.param_groups is not a list of dictionaries with "params" and "lr"')
        if len(groups) != max(1, len(self.case.groups)):
            raise Lacks(f"engine.param_groups has {len(groups)} groups, not {max(1, len(self.case.groups))}")

    @contextlib.contextmanager
    def _gathered(self) -> Iterator[None]:
        context = self.engine.gathered()
        if not hasattr(context, "__exit__"):
            raise Lacks("gathered() gives no context manager: @contextlib.contextmanager makes one of a generator")
        with context:
            for name, parameter in self.engine.module.named_parameters():
                if not readable(parameter):
                    raise Lacks(f"inside gathered() '{name}' has the shape {tuple(parameter.shape)} and no memory")
            yield

    def _step(self, number: int, step: Step) -> None:
        calls: list[Call] = []
        self.log.clear()

        def called(call: Call, tensor: torch.Tensor | None) -> None:
            calls.append(call)
            self.log.called(call)

        with on_call(called):
            if step.clear:
                self.engine.zero_grad()
            losses = []
            for place, micro in enumerate(step.micros):
                self.memory.look("rest", self.model)
                loss = loss_at(self.engine, self.case, self.rank, number, place, micro)
                self.memory.look("forward", self.model)
                self.engine.backward(loss)
                losses.append(float(loss.detach()))
                del loss
                self.memory.look("backward", self.model)
            for group, rate in zip(self.engine.param_groups, step.rates, strict=bool(step.rates)):
                group["lr"] = rate
            self.log.open = False
            returned = self.engine.step()
            self.memory.look("step", self.model)
        self.steps.append(self._seen(returned, losses, calls))

    def _seen(self, returned: Any, losses: list[float], calls: list[Call]) -> StepSeen:
        with self._gathered():
            kept = [] if self.case.measured else list(self.engine.module.parameters())
            weights = [each.detach().clone() for each in kept]
        seen_by = float(peek(self.engine, self.case)) if self.case.peeked else 0.0
        truth = returned if isinstance(returned, bool) else f"{returned!r}"[:80]
        return StepSeen(weights, truth, float(self.engine.scale), losses, calls, seen_by, _definition(self.engine))


def _definition(engine: Any) -> Where | None:
    """The first line of step(), below its decorators."""
    code = getattr(inspect.unwrap(getattr(type(engine), "step", lambda: None)), "__code__", None)
    if code is None or is_library(code.co_filename):
        return None
    lines = [line for _, _, line in code.co_lines() if line and line > code.co_firstlineno]
    return Where(code.co_filename, min(lines, default=code.co_firstlineno), "step")


def _groups(model: nn.Module, case: ZeroCase) -> list[dict[str, Any]]:
    count = len(case.groups)
    parameters = list(model.parameters())
    return [{"params": parameters[place::count], **options} for place, options in enumerate(case.groups)]
