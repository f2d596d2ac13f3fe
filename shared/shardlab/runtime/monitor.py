"""Watches a launch until every rank has finished or one thing has gone wrong, and says which."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from . import disagreement, history, processes
from .board import FINISHED, STARTING, WAITING, Board, RankStatus
from .deadlock import Deadlock, find_deadlock, missing
from .disagreement import Disagreement
from .door import Door
from .job import Failure, Position
from .relay import Relay

POLL_SECONDS = 0.1
STABLE_SECONDS = 1.0  # how long nothing may move before waits count as a deadlock
START_SECONDS = 120.0  # without progress while ranks start: how fast they do is not the learner's affair
PATIENCE_SECONDS = 1.0  # how long a suspected deadlock may grow to its full extent before it is reported
SEARCH_SECONDS = 0.3  # between two searches for a deadlock
RECENT = 500  # calls of each rank that are compared while they run; all that are remembered at the end
GRACE_SECONDS = 0.3  # how long others may still report after a first fault: who died is told only by the kernel
ANSWER_SECONDS = 0.5  # how long a rank may take to say where it is


@dataclass(frozen=True)
class Death:
    """A rank's process ended by itself. code: its exit code, negative for a signal."""

    rank: int
    code: int
    time: float


@dataclass
class Faults:
    """All that went wrong, and what each rank was doing then. found: seconds since the launch began."""

    failures: list[Failure] = field(default_factory=list)
    deaths: list[Death] = field(default_factory=list)
    deadlock: Deadlock | None = None
    disagreement: Disagreement | None = None
    timed_out: bool = False
    interrupted: bool = False
    statuses: list[RankStatus] = field(default_factory=list)
    positions: dict[int, Position] = field(default_factory=dict)
    waits: dict[int, tuple[int, ...]] = field(default_factory=dict)  # waiting rank -> those whose call it needs
    stood_still: float = 0.0  # seconds from the last movement of a stuck rank to the discovery

    def __bool__(self) -> bool:
        return bool(self.failures or self.deaths or self.waits_in_vain or self.interrupted)

    @property
    def waits_in_vain(self) -> bool:
        return bool(self.deadlock or self.disagreement or self.timed_out)


class Monitor:
    """ranks: their processes. timeout: seconds that may pass without progress of any rank."""

    def __init__(
        self,
        board: Board,
        ranks: Sequence[Any],
        door: Door,
        relay: Relay,
        timeout: float,
        began: float,
        interrupted: Callable[[], bool],
    ) -> None:
        self.board, self.ranks, self.door, self.relay = board, ranks, door, relay
        self.timeout, self.began, self.interrupted = timeout, began, interrupted
        self.controls: dict[int, Connection] = {}
        self.outputs: dict[Connection, tuple[int, bool]] = {}  # -> rank, whether it is stderr
        self.faults = Faults()
        self._settled: set[int] = set()
        self._positions: dict[int, Position] = {}
        self._progress: dict[int, tuple[int, int]] = {}
        self._moved: dict[int, float] = {}
        self._suspected: float | None = None
        self._last_heard = self._last_search = time.monotonic()

    def watch(self) -> Faults:
        """Returns when all ranks have finished alike (no faults) or shortly after the first fault."""
        while len(self._settled) < len(self.ranks) and not self.faults:
            self._listen(POLL_SECONDS)
            self.faults.interrupted = self.interrupted()
            if not self.faults:
                self._look_for_standstill()
        if not self.faults:
            self.faults.disagreement = self._difference_at_the_end()
        if self.faults:
            self._ask_around()
        return self.faults

    def let_go(self) -> None:
        """Tells the ranks, which have all finished, that they may leave, and waits for it."""
        for control in self.controls.values():
            with contextlib.suppress(OSError):
                control.send("go")
        for process in self.ranks:
            process.join(5)

    def close(self) -> None:
        for connection in [*self.controls.values(), *self.outputs]:
            connection.close()

    def drain(self) -> None:
        """Reads output that is already there."""
        while self.outputs and wait(list(self.outputs), 0):
            self._listen(0)

    def _ask_around(self) -> None:
        """Notes what everyone does at a fault, and gives others a moment to report theirs."""
        self.faults.statuses = self.board.statuses()
        self.faults.positions = self._ask(range(len(self.ranks)))
        if not (self.faults.deadlock or self.faults.timed_out or self.faults.interrupted):
            deadline = time.monotonic() + GRACE_SECONDS
            while time.monotonic() < deadline and len(self._settled) < len(self.ranks):
                self._listen(POLL_SECONDS)
            if not self.faults.deaths:  # by now the others wait for the one that failed; after a death they raise
                self.faults.statuses = self.board.statuses()
            difference = disagreement.first_difference(self._histories(), self.faults.statuses)
            self.faults.disagreement = difference or self.faults.disagreement
        self.faults.waits = {
            status.rank: missing(status, self.faults.statuses, partial(history.posted, self.board))
            for status in self.faults.statuses
            if status.state == WAITING
        }

    def _ask(self, ranks: Iterable[int]) -> dict[int, Position]:
        """Where the learner's threads are, of those ranks that answer in time."""
        asked = {rank for rank in ranks if rank in self.controls and rank not in self._settled}
        self._positions = {}
        for rank in asked:
            with contextlib.suppress(OSError):
                self.controls[rank].send("where")
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline and asked - self._settled - self._positions.keys():
            self._listen(0.05)
        return self._positions

    def _histories(self, most: int = history.HISTORY) -> list[list[history.Record]]:
        return [history.read(self.board, rank, most) for rank in range(self.board.world_size)]

    def _listen(self, seconds: float) -> None:
        sentinels = {process.sentinel: rank for rank, process in enumerate(self.ranks) if rank not in self._settled}
        controls = {control: rank for rank, control in self.controls.items() if rank not in self._settled}
        ready: list[Any] = wait([self.door, *self.outputs, *controls, *sentinels], seconds)  # type: ignore[list-item]
        if self.door in ready:
            self._let_in()
        for item in ready:
            if item in self.outputs:
                self._read_output(item)
        for item in ready:
            if item in controls:
                self._read_control(controls[item])
        for item in ready:
            if item in sentinels and sentinels[item] not in self._settled:
                self._died(sentinels[item])

    def _let_in(self) -> None:
        self._last_heard = time.monotonic()
        connection = self.door.accept()
        with contextlib.suppress(EOFError, OSError):  # the rank may have died on the doorstep
            rank, channel = connection.recv()
            if channel == "control":
                self.controls[rank] = connection
            else:
                self.outputs[connection] = (rank, channel == "stderr")

    def _read_output(self, connection: Connection) -> None:
        rank, is_stderr = self.outputs[connection]
        try:
            data = os.read(connection.fileno(), 1 << 16)
        except OSError:
            data = b""
        if not data:
            del self.outputs[connection]
            connection.close()
            return
        self._last_heard = time.monotonic()
        (self.relay.stderr if is_stderr else self.relay.stdout)(rank, data)

    def _read_control(self, rank: int) -> None:
        try:
            message = self.controls[rank].recv()
        except (EOFError, OSError):
            self.controls.pop(rank).close()
            self._died(rank)
            return
        if isinstance(message, Position):
            self._positions[rank] = message
            return
        self._settled.add(rank)
        if isinstance(message, Failure):
            self.faults.failures.append(message)

    def _died(self, rank: int) -> None:
        while (control := self.controls.get(rank)) is not None and control.poll(0):
            self._read_control(rank)  # it may have reported before it ended
            if rank in self._settled:
                return
        process = self.ranks[rank]
        processes.end_descendants(process.pid)
        process.join(5)
        self._settled.add(rank)
        self.faults.deaths.append(Death(rank, process.exitcode or 0, time.monotonic() - self.began))

    def _look_for_standstill(self) -> None:
        statuses = self.board.statuses()
        now = time.monotonic()
        for status in statuses:
            if self._progress.get(status.rank) != (status.progress, status.state):
                self._progress[status.rank] = (status.progress, status.state)
                self._moved[status.rank] = now
        still = {rank for rank, moved in self._moved.items() if now - moved >= STABLE_SECONDS}
        stuck = any(statuses[rank].state == WAITING for rank in still)
        if now - self._last_search >= SEARCH_SECONDS and (stuck or disagreement.may_differ(statuses)):
            self._last_search = now
            self.faults.disagreement = disagreement.first_difference(self._histories(RECENT), statuses)
            if stuck and not self.faults:
                self.faults.deadlock = self._deadlock(statuses, still)
            if self.faults.deadlock is not None:
                began = max(self._moved[rank] for rank in self.faults.deadlock.stuck)
                self.faults.stood_still = time.monotonic() - began
        starting = any(status.state == STARTING for status in statuses)
        limit = max(self.timeout, START_SECONDS) if starting else self.timeout
        if not self.faults and now - max(self._last_heard, *self._moved.values()) >= limit:
            self.faults.timed_out = any(status.state != FINISHED for status in statuses)

    def _deadlock(self, statuses: list[RankStatus], still: set[int]) -> Deadlock | None:
        posted = partial(history.posted, self.board)
        found = find_deadlock(statuses, still, posted)
        if found is None:
            self._suspected = None
            return None
        now = time.monotonic()
        self._suspected = self._suspected or now
        patient = now - self._suspected < PATIENCE_SECONDS
        if patient and any(status.state == WAITING and status.rank not in still for status in statuses):
            return None  # who has just begun to wait is about to be part of it
        # A thread that waits for nobody may yet send what the others wait for. Who does not answer may have one.
        answers = self._ask(found.stuck)
        if patient and len(answers) < len(found.stuck):
            return None
        idle = {rank for rank, position in answers.items() if position.busy == 0}
        moved = {status.rank for status in self.board.statuses() if status.progress != statuses[status.rank].progress}
        return find_deadlock(statuses, (still & idle) - moved, posted)

    def _difference_at_the_end(self) -> Disagreement | None:
        statuses = self.board.statuses()
        if disagreement.all_match(statuses):
            return None
        histories = self._histories()
        found = disagreement.first_difference(histories, statuses) or disagreement.first_unmatched(histories, statuses)
        forgotten = any(self.board.recorded(rank) > history.HISTORY for rank in range(self.board.world_size))
        return found or (Disagreement() if forgotten else None)
