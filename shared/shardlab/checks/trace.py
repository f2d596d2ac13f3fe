"""Follows a ring step by step: which chunk every message carried, and whose parts every chunk held after each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

from ..errors import UsageError
from ..meters import on_call
from ..records import Call, RingStep, RingTrace, Transfer
from ..runtime import launch
from ..theory import chunk_sizes
from .marked import Mark, Marks

PHASES = {"reduce_scatter": "reduce-scatter", "all_gather": "all-gather", "all_reduce": "all-reduce"}
MOST_RANKS = 12  # for more, counts have too few bits in a float64
GARBAGE = -1.0

Held = tuple[tuple[int, ...] | None, ...]  # one entry per chunk


def trace_ring(
    fn: Callable,
    world_size: int = 4,
    *,
    numel: int | None = None,
    phase: str = "all_reduce",
    timeout: float = 20.0,
) -> RingTrace:
    """Runs `fn` on data that shows whose parts a number contains, and records what it did, right or wrong.

    phase: "all_reduce" (fn gets a float64 tensor of `numel` elements), "reduce_scatter" or "all_gather" (fn gets a
    list of `world_size` chunks). numel: 4 elements a chunk unless given; chunks are cut as by torch.tensor_split.

    A rank's step ends when it has received as often as it has sent and makes its next call; steps with the same number
    stand side by side, however they overlapped in time. What can be seen: the tensor that was handed in, and a flat
    copy of it from which messages are sent. A solution that keeps its chunks in other tensors shows its messages, but
    the state only as far as it is written back; a chunk of which one part is a step ahead (halves, pieces) shows as
    None in between.

    Raises UsageError for arguments that cannot work, and LaunchError when the run does not end well.
    """
    if phase not in PHASES:
        raise UsageError(f"phase is one of {', '.join(PHASES)}; got {phase!r}")
    if isinstance(world_size, int) and world_size > MOST_RANKS:
        raise UsageError(f"trace_ring follows up to {MOST_RANKS} ranks; got world_size={world_size}")
    if numel is not None and (isinstance(numel, bool) or not isinstance(numel, int) or numel < 0):
        raise UsageError(f"numel is a number of elements, 0 or more; got {numel!r}")
    if not callable(fn):
        raise UsageError(f"trace_ring needs a function to follow; got {fn!r:.60}")
    run = launch(_follow, world_size, (fn, numel, phase), device="cpu", timeout=timeout)
    return _assemble(run.results, world_size, phase, getattr(fn, "__name__", "the function"))


@dataclass
class Log:
    """What one rank saw. held[k] is its state after its step k, held[0] before the first; sent[k-1] is sent in step k.

    The bool of a message says whether it carried every rank's part, once each.
    """

    held: list[Held] = field(default_factory=list)
    sent: list[list[tuple[Transfer, bool]]] = field(default_factory=list)


class _Watcher:
    """Inside a rank: sees every call before it is issued."""

    def __init__(self, tensor: torch.Tensor, rank: int, world_size: int) -> None:
        self.tensor, self.rank, self.world_size = tensor, rank, world_size
        self.watched = tensor  # or the flat copy that the solution works on
        self.marks = Marks(world_size, torch.float64)
        self.bounds = _bounds(tensor.numel(), world_size)
        self.log = Log(held=[self.state(tensor)])
        self.sends: list[tuple[Transfer, bool]] = []  # of the step that is going on
        self.sent = 0
        self.receives: list[Call] = []

    def issued(self, call: Call, tensor: torch.Tensor | None) -> None:
        if not call.point_to_point:
            return
        arrived = sum(receive.completed is not None for receive in self.receives)
        if self.sends and arrived >= self.sent:
            self.end_step(self.watched)
        if call.op == "recv":
            self.receives.append(call)
        elif tensor is not None and call.peer is not None:
            self._adopt_copy(tensor)
            marks = self._marks_in(tensor)
            transfer = Transfer(self.rank, call.peer, self._chunk_of(tensor, marks), int(call.sent))
            self.sends.append((transfer, all(mark is not None and set(mark.counts) == {1} for mark in marks)))
            self.sent += 1

    def end_step(self, tensor: torch.Tensor) -> None:
        self.log.sent.append(self.sends)
        self.log.held.append(self.state(tensor))
        self.sends = []

    def finish(self) -> Log:
        """What counts in the end is the tensor that was handed in."""
        if self.sends:
            self.end_step(self.tensor)
        else:
            self.log.held[-1] = self.state(self.tensor)
        return self.log

    def state(self, tensor: torch.Tensor) -> Held:
        return tuple(self._reading(tensor[begin:end], chunk) for chunk, (begin, end) in enumerate(self.bounds))

    def _reading(self, values: torch.Tensor, chunk: int) -> tuple[int, ...] | None:
        """The counts that all elements agree on; None when they differ, or are no sum of parts of this chunk."""
        readings = {self.marks.read(value) for value in values.tolist()}
        if not readings:
            return (0,) * self.world_size
        mark = readings.pop()
        return mark.counts if mark is not None and not readings and mark.position == chunk else None

    def _adopt_copy(self, sent: torch.Tensor) -> None:
        """When a message comes from another tensor that holds all chunks, that is where the work is done."""
        if sent.dtype != self.tensor.dtype or _same_storage(sent, self.watched):
            return
        whole = torch.empty(0, dtype=sent.dtype).set_(sent.untyped_storage())
        # What follows the chunks is padding; a copy still holds the parts of the right chunks.
        if len(whole) >= self.tensor.numel() and None not in self.state(whole):
            self.watched = whole[: self.tensor.numel()]

    def _marks_in(self, sent: torch.Tensor) -> list[Mark | None]:
        return [self.marks.read(value) for value in sent.reshape(-1).tolist()] if sent.dtype == torch.float64 else []

    def _chunk_of(self, sent: torch.Tensor, marks: list[Mark | None]) -> int | None:
        if _same_storage(sent, self.watched) and sent.numel():
            first = sent.storage_offset() - self.watched.storage_offset()
            for chunk, (begin, end) in enumerate(self.bounds):
                if begin <= first and first + sent.numel() <= end:
                    return chunk
            return None
        positions = {mark.position if mark else None for mark in marks}
        return positions.pop() if len(positions) == 1 else None


def _same_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _bounds(numel: int, world_size: int) -> list[tuple[int, int]]:
    ends = list(accumulate(chunk_sizes(numel, world_size), initial=0))
    return list(pairwise(ends))


def _follow(fn: Callable, numel: int | None, phase: str) -> Log:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    marks = Marks(world_size, torch.float64)
    tensor = torch.empty(4 * world_size if numel is None else numel, dtype=torch.float64)
    bounds = _bounds(len(tensor), world_size)
    for chunk, (begin, end) in enumerate(bounds):
        if phase != "all_gather":
            tensor[begin:end] = marks.part(rank, 1, chunk)
        else:
            tensor[begin:end] = marks.total(set(range(world_size)), 1, chunk) if chunk == rank else GARBAGE
    argument: Any = tensor if phase == "all_reduce" else [tensor[begin:end] for begin, end in bounds]
    watcher = _Watcher(tensor, rank, world_size)
    with on_call(watcher.issued):
        fn(argument)
    return watcher.finish()


def _assemble(logs: list[Log], world_size: int, phase: str, name: str) -> RingTrace:
    steps = [RingStep((), tuple(log.held[0] for log in logs))]
    for number in range(max(len(log.sent) for log in logs)):
        messages = [message for log in logs if number < len(log.sent) for message in log.sent[number]]
        held = tuple(log.held[min(number + 1, len(log.held) - 1)] for log in logs)
        label = PHASES[phase] if phase != "all_reduce" else _phase_of(messages)
        steps.append(RingStep(tuple(transfer for transfer, _ in messages), held, label))
    return RingTrace(world_size, tuple(steps), f"{name}: {PHASES[phase]} on {world_size} ranks")


def _phase_of(messages: list[tuple[Transfer, bool]]) -> str:
    """By what the messages carry: finished chunks are gathered, unfinished ones are reduced."""
    if any(transfer.chunk is None for transfer, _ in messages):
        return ""
    complete = {complete for _, complete in messages}
    return "all-gather" if complete == {True} else "reduce-scatter" if complete == {False} else ""
