"""Turns faults into a report that names the cause first, then where every other rank was."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import torch

from ..errors import LaunchError
from .board import FINISHED, RUNNING, STARTING, WAITING, RankStatus
from .deadlock import Deadlock
from .job import Failure, Frame
from .monitor import Death, Faults
from .places import place, source
from .relay import Relay

_OWN_FOLDERS = (os.path.dirname(os.path.dirname(__file__)), torch.__path__[0])

_SIGNALS = {
    "SIGABRT": "A C++ library gave up. The usual cause: ranks called the same collective with different sizes.",
    "SIGKILL": "Something killed it, usually the system when memory ran out.",
    "SIGSEGV": "It touched memory that is not its own: a fault in native code.",
    "SIGTERM": "Something asked it to stop.",
}


def error_of(faults: Faults, relay: Relay, timeout: float) -> LaunchError:
    """The error for the most telling fault: a death before an exception (others raise because it died), then waits."""
    if faults.deaths:
        return _death(min(faults.deaths, key=lambda death: death.time), faults, relay)
    if faults.failures:
        return _failure(min(faults.failures, key=lambda failure: failure.time), faults)
    if faults.deadlock is not None:
        return _deadlock(faults.deadlock, faults.statuses)
    return _timeout(faults.statuses, timeout)


def interrupted(statuses: Sequence[RankStatus]) -> LaunchError:
    lines = ["Interrupted. All ranks have been ended. When it happened:", *where_everyone_was(statuses)]
    return LaunchError("\n".join(lines), "interrupted")


def where_everyone_was(statuses: Sequence[RankStatus], without: int | None = None) -> list[str]:
    return [f"  {sentence(status)}" for status in statuses if status.rank != without]


def sentence(status: RankStatus) -> str:
    """What a rank was doing, in one line."""
    who = f"rank {status.rank}"
    if status.state == FINISHED:
        return f"{who} had finished its function"
    if status.state == STARTING:
        return f"{who} was starting"
    if status.state == WAITING:
        return f"{who} was waiting in {call(status)}{_at(status)}"
    if status.in_call:
        return f"{who} was computing; its last call was {call(status)}{_at(status)}"
    return f"{who} was computing"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """ "rank 1", "ranks 1 and 2", "ranks 0, 1 and 2" """
    *first, last = [str(rank) for rank in ranks]
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def call(status: RankStatus) -> str:
    """ "send to rank 1 (1,024 float32)" """
    size = f" ({status.numel:,} {status.dtype})" if status.dtype else ""
    if status.op == "send":
        return f"send to rank {status.peer}{size}"
    if status.op == "recv":
        return f"recv from rank {status.peer}{size}" if status.peer is not None else f"recv from any rank{size}"
    root = f" with root {status.peer}" if status.peer is not None else ""
    return f"{status.op}{root}{size}"


def _at(status: RankStatus) -> str:
    if status.where is None:
        return ""
    text = source(status.where.filename, status.where.line)
    return f"\n      {place(status.where.filename, status.where.line)}" + (f":  {text}" if text else "")


def _failure(failure: Failure, faults: Faults) -> LaunchError:
    if failure.kind == "exited":
        lines = [
            f"Rank {failure.rank} called sys.exit({failure.message}) before its function had returned.",
            "A rank that leaves early leaves the others waiting. Return from the function instead.",
        ]
    else:
        lines = [f"Rank {failure.rank} raised {failure.exception_type}: {failure.message}"]
    lines += traceback_lines(failure.frames)
    if failure.causes:
        lines += [f"  caused by {failure.causes}"]
    lines += _others(faults, failure.rank)
    return LaunchError("\n".join(lines), failure.kind, failure.rank, failure.exception_type, failure.message)


def _others(faults: Faults, blamed: int) -> list[str]:
    """One line for each other rank; an exception that came later, often because of the first, is only named."""
    later = {failure.rank: failure for failure in faults.failures}
    lines = []
    for status in faults.statuses:
        if status.rank == blamed:
            continue
        lines.append(f"  {sentence(status)}")
        if status.rank in later:
            lines.append(f"      then it raised {later[status.rank].exception_type}")
    return ["Meanwhile:", *lines] if lines else []


def traceback_lines(frames: Sequence[Frame]) -> list[str]:
    """The learner's own lines of a traceback, outermost first. Frames of torch and ShardLab only name the last call."""
    lines = []
    own = [frame for frame in frames if not frame.filename.startswith(_OWN_FOLDERS)]
    for frame in own:
        lines.append(f"  {place(frame.filename, frame.line)}, in {frame.function}")
        text = source(frame.filename, frame.line)
        if text:
            lines.append(f"      {text}")
    if frames and own and frames[-1] is not own[-1]:
        last = frames[-1]
        lines.append(f"  (raised inside {os.path.basename(last.filename)}, in {last.function})")
    return lines


def _death(death: Death, faults: Faults, relay: Relay) -> LaunchError:
    status = faults.statuses[death.rank]
    if death.code < 0:
        name = signal.Signals(-death.code).name
        lines = [f"Rank {death.rank} was ended by {name}. {_SIGNALS.get(name, '')}".rstrip()]
    else:
        lines = [
            f"Rank {death.rank} left with exit code {death.code} before its function had returned.",
            "Something called os._exit. Return from the function instead.",
        ]
    lines += [f"  {sentence(status)}"]
    noise = [line for line in relay.errors(death.rank).splitlines() if line.strip()]
    if noise and death.code < 0:
        lines += [f"  its last words: {noise[-1].strip()[:300]}"]
    return LaunchError("\n".join(lines + _others(faults, death.rank)), "died", death.rank)


def _deadlock(deadlock: Deadlock, statuses: Sequence[RankStatus]) -> LaunchError:
    stuck = deadlock.stuck
    if deadlock.cycle:
        circle = " -> ".join(f"rank {rank}" for rank in (*deadlock.cycle, deadlock.cycle[0]))
        lines = [f"Deadlock: {circle}. Each waits for the next, so none can go on."]
    else:
        rank, others = next(iter(stuck.items()))
        finished = [other for other in others if statuses[other].state == FINISHED]
        if finished:
            reason = f"{'it has' if len(finished) == 1 else 'they have'} finished"
        else:
            reason = "that rank waits in vain itself" if len(others) == 1 else "they wait in vain themselves"
        lines = [f"Deadlock: rank {rank} waits for {ranks_in_words(finished or others)}, but {reason}."]
    lines += where_everyone_was(statuses)
    lines += [f"Usual cause: {_usual_cause(deadlock, statuses)}"]
    return LaunchError("\n".join(lines), "deadlock", next(iter(deadlock.cycle or stuck)))


def _usual_cause(deadlock: Deadlock, statuses: Sequence[RankStatus]) -> str:
    operations = {statuses[rank].op for rank in deadlock.stuck}
    if operations == {"send"} and deadlock.cycle:
        return (
            "every rank sends first. A blocking send returns only when its peer receives. "
            "Let one side receive first, or start the send with isend, receive, and then wait for it."
        )
    if operations == {"recv"} and deadlock.cycle:
        return "every rank receives first, so nobody sends. Start with a send (isend), then receive."
    if operations <= {"send", "recv"}:
        return "a send without a matching recv on the other side, or the other way round. Count both per step and rank."
    return "not every rank made this collective call, for example because it stands inside `if rank == 0`."


def _timeout(statuses: Sequence[RankStatus], timeout: float) -> LaunchError:
    lines = [
        f"Nothing moved for {timeout:g} s (no operation of torch, no message, no output), so the launch was ended.",
        *where_everyone_was(statuses),
        "If a rank computes for longer than that, give launch a larger timeout.",
    ]
    busy = [status.rank for status in statuses if status.state in (RUNNING, STARTING)]
    return LaunchError("\n".join(lines), "timeout", busy[0] if busy else 0)
