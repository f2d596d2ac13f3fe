"""Watches a launch until every rank has finished or one thing has gone wrong, and says which."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from .board import FINISHED, Board, RankStatus
from .deadlock import Deadlock, find_deadlock
from .door import Door
from .job import Failure
from .relay import Relay

POLL_SECONDS = 0.1
STABLE_SECONDS = 1.0  # how long nothing may move before waits count as a deadlock
GRACE_SECONDS = 0.3  # how long others may still report after a first fault: who died is told only by the kernel


@dataclass(frozen=True)
class Death:
    """A rank's process ended by itself. code: its exit code, negative for a signal."""

    rank: int
    code: int
    time: float


@dataclass
class Faults:
    """All that went wrong, and what each rank was doing then."""

    failures: list[Failure] = field(default_factory=list)
    deaths: list[Death] = field(default_factory=list)
    deadlock: Deadlock | None = None
    timed_out: bool = False
    statuses: list[RankStatus] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.failures or self.deaths or self.deadlock or self.timed_out)


class Monitor:
    """processes: one per rank. timeout: seconds that may pass without progress of any rank."""

    def __init__(
        self, board: Board, processes: Sequence[Any], door: Door, relay: Relay, timeout: float, began: float
    ) -> None:
        self.board, self.processes, self.door, self.relay = board, processes, door, relay
        self.timeout, self.began = timeout, began
        self.controls: dict[int, Connection] = {}
        self.outputs: dict[Connection, tuple[int, bool]] = {}  # -> rank, whether it is stderr
        self.finished: set[int] = set()
        self.faults = Faults()
        self._settled: set[int] = set()
        self._progress: dict[int, tuple[int, int]] = {}
        self._moved: dict[int, float] = {}
        self._last_output = time.monotonic()

    def watch(self) -> Faults:
        """Returns when all ranks have finished (no faults) or shortly after the first fault."""
        deadline = None
        while len(self._settled) < len(self.processes):
            self._listen(POLL_SECONDS)
            if not self.faults:
                self._look_for_standstill()
            if self.faults and deadline is None:
                self.faults.statuses = self.statuses()
                deadline = time.monotonic() + (0 if self.faults.deadlock or self.faults.timed_out else GRACE_SECONDS)
            if deadline is not None and time.monotonic() >= deadline:
                if not self.faults.deaths:  # by now the others wait for the one that failed; after a death they raise
                    self.faults.statuses = self.statuses()
                break
        return self.faults

    def let_go(self) -> None:
        """Tells the ranks, which have all finished, that they may leave, and waits for it."""
        for control in self.controls.values():
            with contextlib.suppress(OSError):
                control.send("go")
        for process in self.processes:
            process.join(5)

    def close(self) -> None:
        for connection in [*self.controls.values(), *self.outputs]:
            connection.close()

    def drain(self) -> None:
        """Reads output that is already there."""
        while self.outputs and wait(list(self.outputs), 0):
            self._listen(0)

    def statuses(self) -> list[RankStatus]:
        return [self.board.read(rank) for rank in range(self.board.world_size)]

    def _listen(self, seconds: float) -> None:
        sentinels = {process.sentinel: rank for rank, process in enumerate(self.processes) if rank not in self._settled}
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
        self._last_output = time.monotonic()
        (self.relay.stderr if is_stderr else self.relay.stdout)(rank, data)

    def _read_control(self, rank: int) -> None:
        try:
            message = self.controls[rank].recv()
        except (EOFError, OSError):
            self.controls.pop(rank).close()
            self._died(rank)
            return
        self._settled.add(rank)
        if isinstance(message, Failure):
            self.faults.failures.append(message)
        else:
            self.finished.add(rank)

    def _died(self, rank: int) -> None:
        process = self.processes[rank]
        control = self.controls.get(rank)
        if control is not None and control.poll(0):  # it may have reported before it ended
            self._read_control(rank)
            return
        process.join(5)
        self._settled.add(rank)
        self.faults.deaths.append(Death(rank, process.exitcode or 0, time.monotonic() - self.began))

    def _look_for_standstill(self) -> None:
        statuses = self.statuses()
        now = time.monotonic()
        for status in statuses:
            if self._progress.get(status.rank) != (status.progress, status.state):
                self._progress[status.rank] = (status.progress, status.state)
                self._moved[status.rank] = now
        still = [rank for rank, moved in self._moved.items() if now - moved >= STABLE_SECONDS]
        if still:
            self.faults.deadlock = find_deadlock(statuses, still)
        if self.faults.deadlock is None and now - max(self._last_output, *self._moved.values()) >= self.timeout:
            self.faults.timed_out = any(status.state != FINISHED for status in statuses)
