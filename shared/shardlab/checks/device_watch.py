"""Modules that tell what a DataParallel does with them: which replica worked on which device, in which thread, when.

What they write to lies outside of them, so that they can be copied, pickled and moved as any module.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..devices.world import current_world

PATIENCE = 4.0  # seconds that a replica waits for the others; replicas that work at the same time never need them


@dataclass(frozen=True)
class Visit:
    """One forward of one replica. device: that of its parameters, None for the host."""

    replica: int
    device: int | None
    rows: int
    thread: int
    training: bool


class Meeting:
    """A place where so many replicas must be at the same time. `met`: whether they were."""

    def __init__(self, parties: int) -> None:
        self.parties, self.present, self.most = parties, 0, 0
        self.threads: set[int] = set()
        self.met = self.given_up = False
        self._changed = threading.Condition()

    def arrive(self) -> None:
        with self._changed:
            self.present += 1
            self.most = max(self.most, self.present)
            self.threads.add(threading.get_ident())
            self.met = self.met or self.present >= self.parties
            self._changed.notify_all()
            if not self.given_up:
                self._changed.wait_for(lambda: self.met or self.given_up, PATIENCE)
                self.given_up = not self.met
            self.present -= 1
            self._changed.notify_all()

    def wait_until_over(self) -> None:
        """Returns when all have been there and left, or will not come: what runs later is not taken for this call."""
        with self._changed:
            self._changed.wait_for(lambda: (self.met or self.given_up) and not self.present, PATIENCE)


class Backwards:
    """Lets replicas finish in the reverse order of their devices, as far as they work at the same time."""

    def __init__(self, order: list[int]) -> None:
        self.order = order
        self._threads: dict[int, threading.Thread] = {}
        self._finished = {index: threading.Event() for index in order}

    def finish(self, device: int | None) -> None:
        if device not in self._finished:
            return
        place = self.order.index(device)
        self._threads[device] = threading.current_thread()
        if place + 1 < len(self.order):
            later = self.order[place + 1]
            if self._finished[later].wait(PATIENCE) and self._threads[later] is not threading.main_thread():
                self._threads[later].join(0.2)  # it may still have to hand its result over; a pool's thread stays
        self._finished[device].set()


@dataclass
class Watch:
    visits: list[Visit] = field(default_factory=list)
    forward: Meeting | None = None
    backward: Meeting | None = None
    backwards: Backwards | None = None

    @property
    def rows(self) -> int:
        return sum(visit.rows for visit in self.visits)


_watch = Watch()


@contextlib.contextmanager
def watching(forward: int = 0, backward: int = 0, backwards: list[int] | None = None) -> Iterator[Watch]:
    """forward, backward: how many replicas must be there at the same time."""
    global _watch
    before, _watch = _watch, Watch()
    _watch.forward = Meeting(forward) if forward else None
    _watch.backward = Meeting(backward) if backward else None
    _watch.backwards = Backwards(backwards) if backwards else None
    try:
        yield _watch
    finally:
        _watch = before


class Watched(nn.Module):
    """Another module, watched."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        watch, world = _watch, current_world()
        weight = next(self.parameters())
        device = world.places.of(weight) if world is not None else None
        watch.visits.append(Visit(id(self), device, len(inputs), threading.get_ident(), self.training))
        if watch.forward is not None:
            watch.forward.arrive()
        outputs = self.body(inputs)
        if watch.backward is not None:
            outputs = _Passing.apply(outputs, watch.backward)
        if watch.backwards is not None:
            watch.backwards.finish(device)
        return outputs


class _Passing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: torch.Tensor, meeting: Meeting) -> torch.Tensor:
        ctx.meeting = meeting
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.meeting.arrive()
        return gradient, None


class Remembers(nn.Module):
    """Keeps its input on itself from one half of forward to the other, as modules with a cache do."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.kept: torch.Tensor | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.kept = inputs
        outputs = self.body(inputs)  # watched: all replicas meet here
        return outputs + self.kept.sum(1, keepdim=True)


class Scaled(nn.Module):
    """Multiplies by a buffer, which is no parameter and no part of the state_dict, and counts in an integer one."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.register_buffer("factor", torch.tensor([2.0], dtype=torch.float64), persistent=False)
        self.register_buffer("offset", torch.tensor([3]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.body(inputs) * self.factor + self.offset


class Picky(nn.Module):
    """Raises when a sample is all negative."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if bool((inputs < 0).all(1).any()):
            raise ValueError(f"a sample with {SPOILT}")
        return self.body(inputs)


SPOILT = "nothing but negative numbers"


class Branches(nn.Module):
    """`often` is used for samples that begin with a positive number, `never` for none."""

    def __init__(self) -> None:
        super().__init__()
        self.often = nn.Linear(4, 3)
        self.rare = nn.Linear(4, 3)
        self.never = nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.often(inputs)
        if bool((inputs[:, 0] > 0).any()):
            outputs = outputs + torch.where(inputs[:, :1] > 0, self.rare(inputs), 0.0)
        return outputs


class Tied(nn.Module):
    """Two layers with one weight, and a layer that does not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.frozen.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.frozen(torch.tanh(self.first(inputs)))))[:, :3]


class Characters(nn.Module):
    """Tokens (rows, time) to logits (rows, time, 5), as a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embedding(tokens)))
