"""`launch_devices`: run a function in one process that has several devices."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import LaunchError, UsageError
from ..meters.instruments import current
from ..records import Call, Event, RankMemory, Run
from ..runtime.api import launch
from ..runtime.arguments import MOST_RANKS, checked_call, explain_pickling
from ..runtime.job import why_not
from .device import Device
from .moving import to_moves
from .printing import DevicePrefix, WithoutRank
from .world import World, make_places

_said: list[str] = []  # choices of "auto" that were told already: each is told once


def launch_devices(
    fn: Callable[..., Any],
    devices: int = 4,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    device: str = "auto",
    timeout: float = 60.0,
) -> Run:
    """Runs `fn(devices, *args, **kwargs)` in ONE fresh process; `devices` is a list of that many devices there.

    They are GPUs ("cuda", or "auto" when the machine has enough), else logical devices on the CPU ("cpu") that behave
    like them. fn may start threads; what one of them raises and nobody catches ends the launch.

    The Run has one entry per device: `run.calls[d]` and `run.traffic[d]`, in which a transfer is a "send" of one device
    and a "recv" of the other; `run.memory[d]`; marks, by the device that the thread worked on. `run.results` is a list
    of one: what fn returned. timeout: seconds that may pass without any operation of torch.

    Raises UsageError and LaunchError as `launch` does.
    """
    chosen = _choose(devices, device)
    fn, args, named = checked_call(fn, args, kwargs, first=([],))
    try:
        with contextlib.redirect_stdout(WithoutRank(sys.stdout)):
            inside = (fn, devices, chosen, args, named)
            run = launch(_inside, 1, inside, device=chosen, timeout=timeout, meter=False)
    except LaunchError as error:
        raise _of_one_process(error) from None
    except UsageError:
        cause = why_not((fn, args, named))
        if cause is None:
            raise
        told = str(explain_pickling((fn, tuple(args), named), cause))
        for rank, process in _RANKS.items():
            told = told.replace(rank, process)
        raise UsageError(told) from None
    seen: _Seen = run.results[0]
    return Run(
        world_size=devices,
        device=chosen,
        backend="threads",
        seconds=run.seconds,
        results=[seen.result],
        calls=seen.calls,
        memory=seen.memory,
        marks=[[mark for mark in seen.marks if mark.rank == number] for number in range(devices)],
        noun="device",
    )


@dataclass(frozen=True)
class _Seen:
    """What the process brings back."""

    result: Any
    calls: list[list[Call]]
    memory: list[RankMemory]
    marks: list[Event]


def _inside(fn: Callable, count: int, device: str, args: tuple, kwargs: dict[str, Any]) -> _Seen:
    instruments = current()
    assert instruments is not None
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))  # a device's share of the cores
    world = World(make_places(count, device), instruments)
    stdout, stderr = sys.stdout, sys.stderr
    prefix = DevicePrefix(stdout)
    sys.stdout = sys.stderr = prefix
    try:
        with world.on(), to_moves() if device == "cpu" else contextlib.nullcontext():
            result = _called(world, fn, args, kwargs)
            memory = world.memory()
    finally:
        prefix.finish()
        sys.stdout, sys.stderr = stdout, stderr
    cause = why_not(result)
    if cause is not None:
        raise TypeError(
            f"the function returned a {type(result).__name__}, which cannot be sent back to the notebook ({cause}). "
            "Return numbers, strings, tensors, or lists and dictionaries of these."
        )
    return _Seen(result, world.calls, memory, instruments.marks)


def _called(world: World, fn: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What a thread raised comes first: what the function itself raises is often a consequence of it."""
    devices: list[Device] = list(world.devices)
    try:
        result = fn(devices, *args, **kwargs)
    except Exception:
        if world.failures:
            raise world.failures[0] from None
        raise
    if world.failures:
        raise world.failures[0]
    return result


def _choose(devices: Any, device: Any) -> str:
    if isinstance(devices, bool) or not isinstance(devices, int) or not 1 <= devices <= MOST_RANKS:
        raise UsageError(f"devices is a number of devices, from 1 to {MOST_RANKS}; got {devices!r:.60}.")
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f'device is "auto", "cpu" or "cuda"; got {device!r:.60}.')
    found = torch.cuda.device_count()
    if device == "cuda" and found < devices:
        raise UsageError(f'{devices} devices on device="cuda" need {devices} GPUs; this machine has {found}.')
    enough = device != "cpu" and found >= devices
    if device == "auto":
        text = f"ShardLab's devices are {'GPUs' if enough else 'logical devices on the CPU'} (GPUs found: {found})."
        if text not in _said:
            _said.append(text)
            print(text)
    return "cuda" if enough else "cpu"


def _of_one_process(error: LaunchError) -> LaunchError:
    """The same report, without a rank: there is only one."""
    report = re.sub(r"(?m)^Rank 0\b", "The process", error.report)
    report = re.sub(r"(?m)^(\s+)rank 0\b", r"\1the process", report)
    report = report.replace("If a rank computes for longer than that, give launch a larger timeout.", _LONGER)
    report = report.replace("\nA rank that leaves early leaves the others waiting. Return", "\nReturn")
    report = report.replace("All ranks have been ended", "The process has been ended")
    report = re.sub(r"\n  \(raised inside eval_frame\.py, in _fn\)", "", report)  # by which torch calls our mode
    report = report.replace("(no message, no output)", "(no operation of torch, no output)")
    return LaunchError(
        report,
        error.kind,
        error.rank,
        error.exception_type,
        error.exception_message,
        error.ranks,
        error.stood_still,
    )


_RANKS = {"sent to the ranks": "sent to the process", ", so that each rank makes its own": ""}
_LONGER = "If one operation takes longer than that, give launch_devices a larger timeout."
