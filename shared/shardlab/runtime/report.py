"""Turns faults into a report that names the cause first, then where every other rank was."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import torch

from ..errors import LaunchError
from ..meters import is_library
from .board import FINISHED, STARTING
from .deadlock import Deadlock
from .disagreement import Disagreement
from .history import Record
from .job import Failure, Frame
from .monitor import START_SECONDS, Death, Faults
from .places import place, source
from .relay import Relay
from .standing import at, call, everyone, nobody_moved, ranks_in_words, sentence, standings

_OWN_FOLDER = os.path.dirname(os.path.dirname(__file__))
_COMMUNICATION = os.path.join(torch.__path__[0], "distributed")

_SIGNALS = {
    "SIGABRT": "A C++ library gave up. The usual cause: ranks called the same collective with different sizes.",
    "SIGKILL": "Something killed it, usually the system when memory ran out.",
    "SIGSEGV": "It touched memory that is not its own: a fault in native code.",
    "SIGBUS": "It touched memory that could not be had, usually because /dev/shm is full.",
    "SIGFPE": "Native code divided an integer by zero.",
    "SIGILL": "Native code used an instruction that this processor does not know.",
    "SIGTERM": "Something asked it to stop.",
}
_HINTS = {
    "default process group twice": "launch has called init_process_group for this rank already: leave it out.",
}


def error_of(faults: Faults, relay: Relay, timeout: float, meter: bool) -> LaunchError:
    """The error for the most telling fault: a disagreement that explains the others; a death before an exception (the
    others raise because it died); then waits."""
    if faults.interrupted:
        lines = ["Interrupted. All ranks have been ended. When it happened:", *everyone(faults)]
        return _error(faults, lines, "interrupted")
    if faults.disagreement is not None and _explained_by_disagreement(faults):
        return _disagreement(faults.disagreement, faults)
    if faults.deaths:
        return _death(min(faults.deaths, key=lambda death: death.time), faults, relay)
    if faults.failures:
        return _failure(min(faults.failures, key=lambda failure: failure.time), faults)
    if faults.deadlock is not None:
        return _deadlock(faults.deadlock, faults)
    return _timeout(faults, timeout, meter)


def interrupted_early() -> LaunchError:
    return LaunchError("Interrupted while the first launch was getting ready. No rank had started.", "interrupted")


def _error(
    faults: Faults, lines: Sequence[str], kind: str, rank: int | None = None, failure: Failure | None = None
) -> LaunchError:
    exception = (failure.exception_type, failure.message) if failure is not None else ("", "")
    ranks = standings(faults, rank)
    return LaunchError("\n".join(lines), kind, rank, *exception, ranks=ranks, stood_still=faults.stood_still)


def _explained_by_disagreement(faults: Faults) -> bool:
    """Whether all that went wrong is what a mismatch leads to: a crash, or an exception, inside the communication."""
    crashed = all(death.code == -signal.SIGABRT for death in faults.deaths)
    inside = all(
        failure.kind == "raised"
        and (last := _last_outside_shardlab(failure.frames)) is not None
        and last.filename.startswith(_COMMUNICATION)
        for failure in faults.failures
    )
    return crashed and inside


def _last_outside_shardlab(frames: Sequence[Frame]) -> Frame | None:
    """Where an exception was raised; the tap's own frames lie between torch's functions and its backend."""
    return next((frame for frame in reversed(frames) if not frame.filename.startswith(_OWN_FOLDER)), None)


def _disagreement(found: Disagreement, faults: Faults) -> LaunchError:
    lines = disagreement_lines(found, faults)
    for death in faults.deaths:
        lines += [f"  rank {death.rank} was ended by {signal.Signals(-death.code).name} because of it"]
    return _error(faults, lines, "disagree", found.odd)


def disagreement_lines(found: Disagreement, faults: Faults) -> list[str]:
    if not found.records:
        return ["The ranks disagree: their calls differ, but so long ago that it is not known any more in which call."]
    record = found.records[0]
    if record.point_to_point:
        source_rank, target = (record.rank, record.peer) if record.op == "send" else (record.peer, record.rank)
        message = f"message {record.number} from rank {source_rank} to rank {target}"
        if found.absent:
            what = "was sent but never received" if record.op == "send" else "was awaited but never sent"
            lines = [f"The ranks disagree: {message} {what}."]
        else:
            lines = [f"The ranks disagree on {message}: it is not received as it was sent."]
        advice = "A message is received with as many elements as were sent, of the same type."
    else:
        counts = [each.groups[record.path] for each in faults.statuses if record.path in each.groups]
        members = counts[0].members if counts else ()
        everybody = len(members) in (0, len(faults.statuses))
        among = "" if everybody else f" of the group of {ranks_in_words(members)}"
        lines = [f"The ranks disagree at call {record.number}{among}:"]
        advice = (
            "All ranks of a group make the same collective calls in the same order, with the same size, type and root."
        )
    lines += _side_by_side(found.records)
    if found.absent:
        lines += [f"  {ranks_in_words(found.absent)} had finished without this call"]
    return [*lines, advice]


def _side_by_side(records: Sequence[Record]) -> list[str]:
    """Each rank's call; ranks with the same call on the same line of code stand together."""
    alike: dict[str, list[int]] = {}
    for record in records:
        text = call(record.op, record.peer, record.numel, record.dtype) + at(record.where)
        alike.setdefault(text, []).append(record.rank)
    return [f"  {ranks_in_words(ranks)}: {text}" for text, ranks in alike.items()]


def _failure(failure: Failure, faults: Faults) -> LaunchError:
    if failure.kind == "exited":
        lines = [
            f"Rank {failure.rank} called sys.exit({failure.message}) before its function had returned.",
            "A rank that leaves early leaves the others waiting. Return from the function instead.",
        ]
    else:
        lines = [f"Rank {failure.rank} raised {failure.exception_type}: {failure.message}".rstrip(": ")]
    lines += traceback_lines(failure.frames)
    if failure.causes:
        lines += [f"  caused by {failure.causes}"]
    lines += [hint for words, hint in _HINTS.items() if words in failure.message]
    lines += _meanwhile(faults, failure.rank)
    return _error(faults, lines, failure.kind, failure.rank, failure)


def _meanwhile(faults: Faults, blamed: int) -> list[str]:
    """One line for each other rank; an exception that came later, often because of the first, is only named."""
    lines = everyone(faults, without=blamed)
    if faults.disagreement is not None:
        lines += [f"  {line}" for line in disagreement_lines(faults.disagreement, faults)]
    return ["Meanwhile:", *lines] if lines else []


def traceback_lines(frames: Sequence[Frame]) -> list[str]:
    """The learner's own lines of a traceback, outermost first; of libraries only the last call is named."""
    lines = []
    own = [frame for frame in frames if not is_library(frame.filename)]
    for frame in own:
        lines.append(f"  {place(frame.filename, frame.line)}, in {frame.function}")
        text = source(frame.filename, frame.line)
        if text:
            lines.append(f"      {text}")
    last = _last_outside_shardlab(frames)
    if last is not None and own and last is not own[-1]:
        lines.append(f"  (raised inside {os.path.basename(last.filename)}, in {last.function})")
    return lines


def _death(death: Death, faults: Faults, relay: Relay) -> LaunchError:
    if death.code < 0:
        name = signal.Signals(-death.code).name
        lines = [f"Rank {death.rank} was ended by {name}. {_SIGNALS.get(name, '')}".rstrip()]
    else:
        lines = [
            f"Rank {death.rank} left with exit code {death.code} before its function had returned.",
            "Something called os._exit. Return from the function instead.",
        ]
    lines += [f"  {sentence(faults, death.rank)}"]
    noise = [line for line in relay.errors(death.rank).splitlines() if line.strip()]
    if noise and death.code < 0:
        lines += [f"  its last words: {noise[-1].strip()[:300]}"]
    return _error(faults, lines + _meanwhile(faults, death.rank), "died", death.rank)


def _deadlock(deadlock: Deadlock, faults: Faults) -> LaunchError:
    stuck, statuses = deadlock.stuck, faults.statuses
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
    lines += everyone(faults)
    lines += [f"Usual cause: {_usual_cause(deadlock, faults)}"]
    return _error(faults, lines, "deadlock", next(iter(deadlock.cycle or stuck)))


def _usual_cause(deadlock: Deadlock, faults: Faults) -> str:
    operations = {faults.statuses[rank].op for rank in deadlock.cycle or deadlock.stuck}
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


def _timeout(faults: Faults, timeout: float, meter: bool) -> LaunchError:
    if any(status.state == STARTING for status in faults.statuses):
        timeout = max(timeout, START_SECONDS)
    seen = "no operation of torch, no message, no output" if meter else "no message, no output"
    lines = [f"Nothing moved for {timeout:g} s ({seen}), so the launch was ended.", *everyone(faults)]
    lines += ["If a rank computes for longer than that, give launch a larger timeout."]
    return _error(faults, lines, "timeout", nobody_moved(faults))
