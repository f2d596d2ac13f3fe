"""Lab 05, inside a rank: puts a learner's DistributedDataParallel through a case and keeps what it showed."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ..meters import memory_so_far, on_call
from ..records import Call
from .notes import Finding, Judged
from .overlap_cases import Micro, OverlapCase, Step
from .overlap_mirror import Expected, Mirror, clear, descend, micro_loss
from .overlap_models import build
from .overlap_values import START, judge_gradients, judge_start
from .trial import digest_of

PAUSE = 0.005  # seconds after each gradient, in which a thread that does the reductions gets its turn
WARM = 10  # steps after which live bytes must not grow


@dataclass(frozen=True)
class Happened:
    """kind: "ready" (a gradient has been computed), "issued" or "waits" (of reduction `number`). here: in the thread
    that runs backward."""

    kind: str
    number: int
    here: bool = True


@dataclass(frozen=True)
class Reduction:
    """What went through the plugged all_reduce: elements and dtype."""

    numel: int
    dtype: str


@dataclass(frozen=True)
class Played(Judged):
    """lacks: what the engine should have and has not. grads: which parameters have a gradient after each step.

    silent: calls made inside no_sync(). calls[s]: all calls of step s. happened, reductions: of the last step, when the
    check's own all_reduce was plugged in. live: bytes after WARM steps, and at the end.
    """

    lacks: str = ""
    silent: list[Call] = field(default_factory=list)
    calls: list[list[Call]] = field(default_factory=list)
    happened: list[Happened] = field(default_factory=list)
    reductions: list[Reduction] = field(default_factory=list)
    live: tuple[int, int] = (0, 0)

    @property
    def from_the_start(self) -> bool:
        """Whether the ranks were unlike before the first step."""
        return self.finding is not None and self.finding.seen.startswith(START)


class Lacks(Exception):
    """The engine has not what its contract says. The words are for the learner."""


class Interrupted(Exception):
    """What a case raises inside no_sync()."""


@dataclass(frozen=True)
class Player:
    """What is launched in place of a solution: plays a case with the learner's class."""

    engine: Callable[..., Any]

    def __call__(self, case: OverlapCase, rank: int, world_size: int) -> Played:
        watched = contextlib.nullcontext() if case.watched else _disable_current_modes()
        with watched:
            return self._play(case, rank, world_size)

    def _play(self, case: OverlapCase, rank: int, world_size: int) -> Played:
        try:
            lives = [_Life(self.engine, case, rank, world_size, twin) for twin in range(2 if case.twins else 1)]
            live = [0, 0]
            for number in range(len(case.steps)):
                for life in lives:
                    life.step(number)
                if case.growth and number in (WARM, len(case.steps) - 1):
                    live[number > WARM] = _live_bytes()
        except Lacks as lacks:
            return Played(None, "", lacks=str(lacks))
        first = lives[0]
        finding = next((life.finding for life in lives if life.finding is not None), None)
        return Played(
            finding,
            digest_of(tensor for life in lives for tensor in life.shown),
            unusable=any(bool(tensor.isnan().any()) for life in lives for tensor in life.shown),
            silent=first.silent,
            calls=first.calls,
            happened=first.log.happened,
            reductions=first.log.reductions,
            live=(live[0], live[1]),
        )


class Log:
    """The check's own all_reduce, and the order in which gradients and reductions come."""

    def __init__(self) -> None:
        self.happened: list[Happened] = []
        self.reductions: list[Reduction] = []
        self.thread = threading.get_ident()

    def clear(self) -> None:
        self.happened, self.reductions = [], []

    def note(self, kind: str, number: int) -> None:
        self.happened.append(Happened(kind, number, threading.get_ident() == self.thread))

    def watch(self, model: nn.Module) -> None:
        """Before the engine sees the model, so that a gradient is noted before anything is done about it."""
        for number, parameter in enumerate(each for each in model.parameters() if each.requires_grad):
            parameter.register_hook(lambda _, number=number: self._ready(number))  # type: ignore[misc]

    def _ready(self, number: int) -> None:
        self.note("ready", number)
        time.sleep(PAUSE)

    def all_reduce(self, flat: torch.Tensor) -> _Handle:
        if not isinstance(flat, torch.Tensor):
            raise Lacks(f"all_reduce is called with a {type(flat).__name__}, not with one flat tensor")
        number = len(self.reductions)
        self.reductions.append(Reduction(flat.numel(), str(flat.dtype).removeprefix("torch.")))
        self.note("issued", number)
        return _Handle(self, number, dist.all_reduce(flat, async_op=True))


class _Handle:
    """All that the contract says of a handle: it has wait()."""

    def __init__(self, log: Log, number: int, work: Any) -> None:
        self._log, self._number, self._work = log, number, work

    def wait(self) -> None:
        self._log.note("waits", self._number)
        self._work.wait()


class _Life:
    """One engine, its model, and what it has shown so far."""

    def __init__(self, engine: Callable[..., Any], case: OverlapCase, rank: int, world_size: int, twin: int) -> None:
        self.case, self.rank, self.twin = case, rank, twin
        self.mirror = None if case.growth else Mirror(case, world_size, twin)
        self.model = build(case.kind, rank, twin)
        self.own = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        self.log = Log()
        self.finding: Finding | None = None
        self.shown: list[torch.Tensor] = []
        self.before: dict[str, torch.Tensor | None] = {}  # the means of the step before
        self.silent: list[Call] = []
        self.calls: list[list[Call]] = []
        options: dict[str, Any] = {} if case.bucket_bytes is None else {"bucket_bytes": case.bucket_bytes}
        if case.plugged:
            self.log.watch(self.model)
            options["all_reduce"] = self.log.all_reduce
        before = dict(self.model.named_parameters())
        self.ddp = engine(self.model, **options)
        self._look_at(before)
        if self.mirror is not None:
            self.finding = judge_start(self.model, self.own, self.mirror.initial(), rank)

    def _look_at(self, before: dict[str, nn.Parameter]) -> None:
        for name in ("backward", "no_sync"):
            if not callable(getattr(self.ddp, name, None)):
                raise Lacks(f"the engine has no method {name}()")
        if not callable(self.ddp):
            raise Lacks("the engine cannot be called: forward(*inputs), or __call__")
        module = getattr(self.ddp, "module", None)
        if not isinstance(module, nn.Module):
            raise Lacks("ddp.module is not the model that was handed in")
        after = dict(module.named_parameters())
        if list(after) != list(before) or any(after[name] is not before[name] for name in before):
            raise Lacks("the parameters of ddp.module are other objects than the model's: the optimizer holds those")

    def step(self, number: int) -> None:
        step = self.case.steps[number]
        clear(self.model, step)
        self.log.clear()
        calls: list[Call] = []
        with on_call(lambda call, tensor: calls.append(call)):
            for place, micro in enumerate(step.micros):
                before = len(calls)
                self._micro(micro, number, place)
                if not micro.sync:
                    self.silent += calls[before:]
        self.calls.append(calls)
        expected = None if self.mirror is None else self._look(step, number)
        descend(self.model)
        if self.mirror is not None and expected is not None:
            with _disable_current_modes():
                self.mirror.finish(expected, self.model)

    def _micro(self, micro: Micro, number: int, place: int) -> None:
        with contextlib.suppress(Interrupted), contextlib.nullcontext() if micro.sync else self._no_sync():
            if micro.nested:
                with self._no_sync():
                    pass
            self.ddp.backward(micro_loss(self.ddp, micro, self.rank, number, place, self.twin))
            if micro.raises:
                raise Interrupted

    @contextlib.contextmanager
    def _no_sync(self) -> Iterator[None]:
        context = self.ddp.no_sync()
        if not hasattr(context, "__exit__"):
            raise Lacks("no_sync() gives no context manager: @contextlib.contextmanager makes one of a generator")
        with context:
            yield

    def _look(self, step: Step, number: int) -> dict[str, Expected]:
        assert self.mirror is not None
        with _disable_current_modes():  # the replicas are the check's own affair, and N times the work
            expected = self.mirror.step(number)
        finding = judge_gradients(self.model, expected, self.rank, self.before, len(step.micros))
        if self.finding is None and finding is not None:
            at = f"step {number + 1}: " if len(self.case.steps) > 1 else ""
            twin = f"model {self.twin + 1}, " if self.case.twins else ""
            self.finding = Finding(f"{twin}{at}{finding.seen}", finding.expected, finding.look)
        self.before = {name: one.mean for name, one in expected.items()}
        for _, parameter in self.model.named_parameters():
            present = torch.tensor([parameter.grad is not None])
            self.shown += [present, *([] if parameter.grad is None else [parameter.grad.detach().clone()])]
        return expected


def _live_bytes() -> int:
    gc.collect()
    return memory_so_far().at_end.live
