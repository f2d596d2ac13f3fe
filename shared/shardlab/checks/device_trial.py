"""Runs a solution for several devices, case by case, in one fresh process, and says how that ended.

All devices are in one process, so a case is judged where it runs: it returns the first fault it sees. What is written
to a file as it happens survives a process that hangs or dies.
"""

from __future__ import annotations

import _thread
import contextlib
import gc
import os
import pickle
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..devices import launch_devices
from ..devices.device import Device
from ..devices.world import World, current_world
from ..errors import CheckFailed, LaunchError
from ..meters import caller
from ..records import RankTraffic, Where, traffic_of
from . import observe
from .notes import Begun, Endless, Raised, raised_note, read_notes
from .observe import line_at
from .printed import Listener, Printout, in_words, read_printed

MOST_DEVICES = 5
LONGEST = 30.0  # seconds for one case, which takes some milliseconds: a solution that goes on and on never times out
MOST_CHARACTERS = 240  # of an exception's message


@dataclass(frozen=True)
class Fault:
    """What is wrong, in a learner's words. look: a hint, or the place in the learner's code."""

    reason: str
    seen: str
    expected: str = ""
    look: str | Where | None = ""


@dataclass(frozen=True)
class Case:
    """name: "N = 4, 13 rows". judge: looks at the solution at work, and returns what is wrong with it."""

    name: str
    judge: Callable[[Bench], Fault | None]


@dataclass
class Bench:
    """What a case works with, inside the process. facts: numbers for the verdict."""

    world: World
    all_devices: list[Device]
    solution: Callable
    facts: dict[str, Any] = field(default_factory=dict)
    calling: bool = False  # whether the solution has been called and has not returned yet

    def call(self, function: Callable, *args: Any) -> Any:
        """Calls the solution, or a method of what it made: what is raised meanwhile is the learner's."""
        self.calling = True
        returned = function(*args)
        self.calling = False
        return returned

    def devices(self, order: int | Sequence[int]) -> list[Device]:
        """The first N devices, or those of the given numbers, in that order."""
        chosen = range(order) if isinstance(order, int) else order
        return [self.all_devices[index] for index in chosen]

    @contextlib.contextmanager
    def traffic(self) -> Iterator[list[RankTraffic]]:
        """Fills the list, when it closes, with what each device of the process sent and received meanwhile."""
        before = [len(calls) for calls in self.world.calls]
        seen: list[RankTraffic] = []
        yield seen
        for index, calls in enumerate(self.world.calls):
            seen.append(traffic_of(index, calls[before[index] :]))

    def live(self) -> list[int]:
        """Live bytes of each device."""
        gc.collect()
        return [memory.at_end.live for memory in self.world.memory()]

    def index_of(self, tensor: torch.Tensor) -> int | None:
        return self.world.places.of(tensor)


@dataclass(frozen=True)
class Ended:
    """How a trial ended: at which case, with what, and the facts that were collected."""

    case: int
    fault: Fault | None = None
    raised: Raised | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def try_cases(exercise: str, solution: Callable, cases: Sequence[Case]) -> tuple[dict[str, Any], int]:
    """Runs the cases; returns the facts they collected, and how many lines the solution printed.

    Raises CheckFailed at the first fault.
    """
    ended, error = None, None
    with tempfile.TemporaryDirectory(prefix="shardlab-check-") as folder:
        try:
            arguments = (folder, solution, list(cases), LONGEST)
            run = launch_devices(run_cases, MOST_DEVICES, arguments, device="cpu", timeout=observe.TIMEOUT)
            ended = run.results[0]
        except LaunchError as caught:
            if caught.kind == "interrupted":
                raise
            error = caught
        notes = read_notes(folder, 0)
        printed = [read_printed(folder, 0, case) for case in range(len(cases))]
    if ended is None:
        assert error is not None
        raise _noted(exercise, _stopped(exercise, cases, notes, error), printed, _last(notes))
    if ended.raised is not None:
        raise _noted(exercise, _raised(exercise, cases[ended.case], ended.raised), printed, ended.case)
    if ended.fault is not None:
        fault, name = ended.fault, cases[ended.case].name
        look = line_at(fault.look) if isinstance(fault.look, Where) else fault.look or ""
        failed = CheckFailed(exercise, fault.reason, f"{name}: {fault.seen}", fault.expected, look)
        raise _noted(exercise, failed, printed, ended.case)
    return ended.facts, sum(one.total for one in printed)


def run_cases(devices: list[Device], folder: str, solution: Callable, cases: Sequence[Case], longest: float) -> Ended:
    """What a check launches."""
    world = current_world()
    assert world is not None
    torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.simplefilter("ignore")
    bench = Bench(world, devices, solution)
    listener = Listener(folder, 0)
    with (
        (Path(folder) / "0").open("wb", buffering=0) as file,
        contextlib.redirect_stdout(listener),
        contextlib.redirect_stderr(listener),
    ):
        for number, case in enumerate(cases):
            listener.begin(number)
            file.write(pickle.dumps(Begun(number)))
            with _ends_in_time(file, number, longest):
                try:
                    fault = case.judge(bench)
                except BaseException as error:
                    return _crashed(bench, number, error)
            if world.failures:
                return _crashed(bench, number, world.failures[0])
            if fault is not None:
                return Ended(number, fault)
    return Ended(len(cases) - 1, facts=bench.facts)


def _crashed(bench: Bench, number: int, error: BaseException) -> Ended:
    """What a thread raised comes before what followed from it."""
    failures = bench.world.failures
    error = failures[0] if failures else error
    failures.clear()
    note = raised_note(number, error)
    if note.where is None and not bench.calling:
        raise error  # none of the learner's lines is in it: the check itself is at fault
    return Ended(number, raised=note)


@contextlib.contextmanager
def _ends_in_time(file: Any, number: int, longest: float) -> Iterator[None]:
    """Ends the process when a case goes on for too long, after noting in which line it is."""
    main = threading.main_thread().ident
    done = threading.Event()

    def watch(own: list[int]) -> None:
        if not done.wait(longest):
            frames = {thread: frame for thread, frame in sys._current_frames().items() if thread != own[0]}
            ordered = sorted(frames, key=lambda thread: thread == main)  # what the main thread waits for says more
            where = next((place for one in ordered if (place := caller(frames[one])) is not None), None)
            file.write(pickle.dumps(Endless(number, f"{longest:g} s", where)))
            os._exit(1)

    own: list[int] = []
    own.append(_thread.start_new_thread(watch, (own,)))  # no threading.Thread: it runs under no mode, and is no daemon
    try:
        yield
    finally:
        done.set()


def _last(notes: Sequence[Any]) -> int:
    return max((note.case for note in notes if isinstance(note, Begun)), default=0)


def _stopped(exercise: str, cases: Sequence[Case], notes: Sequence[Any], error: LaunchError) -> CheckFailed:
    """The process did not come to its end: it hangs, goes on and on, or died."""
    if not any(isinstance(note, Begun) for note in notes):
        raise error
    case = cases[_last(notes)]
    endless = [note for note in notes if isinstance(note, Endless)]
    if endless:
        said, look = f"{case.name}: {endless[0].what} and still not done", line_at(endless[0].where)
        return CheckFailed(exercise, "hang", said, "a function that ends", look)
    standing = next((one for one in error.ranks if one.source), None)
    look = f"{standing.place}: {standing.source}" if standing else ""
    if error.kind == "timeout":
        said = f"{case.name}: for {observe.TIMEOUT:g} s nothing has moved, no operation on a tensor"
        return CheckFailed(
            exercise, "hang", said, "a function that returns: threads that end, and no wait for what never comes", look
        )
    if error.kind == "raised":
        raise error
    return CheckFailed(exercise, "crash", f"{case.name}: {error.report.splitlines()[0]}", "", look)


_DEVICES = (
    "one of the list, such as devices[i]; device_of(tensor) tells where a tensor lives: not numbers, not tensor.device"
)
_ON_HOST = "one is on the host: new tensors on a device are made `with on(device):`; for others move(tensor, device)"
_EXPECTED = {
    "two devices, cpu and": _ON_HOST,
    " and cpu!": _ON_HOST,
    "Expected all tensors to be on the same device": "move(tensor, device) first: operations work within one device",
    "LogicalDevice": "new tensors on a device: `with on(device): torch.zeros(...)`; others: move(tensor, device)",
    "expected one of the devices": _DEVICES,
    "Cannot access accelerator": _DEVICES,
    "only Tensors created explicitly": "parameters of a copy are new leaves: nn.Parameter(move(old.detach(), device))",
    "non-empty list of Tensors": "there is at least one piece; pieces can be empty, even all of them",
}


def _raised(exercise: str, case: Case, raised: Raised) -> CheckFailed:
    if raised.type == "NotImplementedError" and raised.own:
        said = f"{raised.where.function} raises NotImplementedError" if raised.where else ""
        return CheckFailed(exercise, "not written", said, look=line_at(raised.where))
    text = (raised.message.strip().splitlines() or [""])[0][:MOST_CHARACTERS]
    if raised.type == "SystemExit":
        text = "sys.exit() ends the whole program"
    expected = next((hint for words, hint in _EXPECTED.items() if words in raised.message), "")
    look = line_at(raised.where)
    if raised.caller and (raised.where is None or raised.caller.line != raised.where.line):  # no comprehension
        look += f"; called in {line_at(raised.caller)}"
    return CheckFailed(exercise, "crash", f"{case.name}: {raised.type}: {text}", expected, look)


def _noted(exercise: str, failed: CheckFailed, printed: Sequence[Printout], case: int) -> CheckFailed:
    text = in_words([printed[case]])
    if text:
        failed.add_note(text.replace("  [rank 0] ", "  "))
    return failed
