"""One rank's pen on the board (the `Status` that meters/tap.py asks for)."""

from __future__ import annotations

import threading

from ..meters import Turn
from ..records import Call
from . import history
from .board import FINISHED, HISTORY, MOST_FILES, MOST_GROUPS, RECORD_BYTES, RUNNING, WAITING, Board


class Writer:
    """Threads of the learner may call it at the same time. `waits`: which call each waiting thread is in."""

    def __init__(self, board: Board, rank: int) -> None:
        self._rank, self._board = rank, board
        self._slot = board.slot(rank)
        self._files = board.file_names(rank)
        self._file_numbers: dict[str, int] = {}
        self._groups: dict[int, int] = {}
        self._lock = threading.RLock()
        self.waits: dict[int, tuple[Call, Turn]] = {}

    def issued(self, call: Call, turn: Turn) -> None:
        with self._lock:
            self._slot.version += 1
            self._write_call(call, turn)
            self._count(call, turn, 1)
            self._record(call, turn)
            self._slot.version += 1

    def withdrawn(self, call: Call, turn: Turn) -> None:
        """The backend refused the call that was just issued."""
        with self._lock:
            self._slot.version += 1
            self._count(call, turn, -1)
            self._slot.recorded -= 1
            self._slot.version += 1

    def waiting(self, call: Call, turn: Turn) -> None:
        with self._lock:
            self.waits[threading.get_ident()] = (call, turn)
            self._show_wait(call, turn)

    def running(self) -> None:
        """The calling thread waits no longer; another one still may."""
        with self._lock:
            self.waits.pop(threading.get_ident(), None)
            if self.waits:
                self._show_wait(*next(iter(self.waits.values())))
            else:
                self._slot.progress += 1
                self._slot.state = RUNNING

    def finished(self) -> None:
        self._slot.state = FINISHED

    def progressed(self) -> None:
        self._slot.progress += 1

    def _show_wait(self, call: Call, turn: Turn) -> None:
        self._slot.version += 1
        self._write_call(call, turn)
        self._slot.state = WAITING
        self._slot.version += 1

    def _write_call(self, call: Call, turn: Turn) -> None:
        slot = self._slot
        slot.progress += 1
        slot.op = call.op.encode()
        slot.dtype = call.dtype.encode()[:15]
        slot.peer = -1 if call.peer is None else call.peer
        slot.numel, slot.index = call.numel, call.index
        slot.path, slot.number = history.path_of(call, turn), turn.number
        if call.where is not None:
            slot.line, slot.file = call.where.line, self._file_number(call.where.filename)

    def _count(self, call: Call, turn: Turn, step: int) -> None:
        """Adds the call to (or takes it from) its counter and digest."""
        slot, digest = self._slot, step * history.digest_of(call, turn)
        if not call.point_to_point:
            position = self._group(history.path_of(call, turn), call.group)
            if position is not None:
                group = slot.groups[position]
                group.calls += step
                group.digest = (group.digest + digest) % 2**32
        elif call.peer is None:
            slot.from_anybody += step
        else:
            counts, digests = (
                (slot.sends, slot.send_digests) if call.op == "send" else (slot.receives, slot.receive_digests)
            )
            counts[call.peer] += step
            digests[call.peer] = (digests[call.peer] + digest) % 2**32

    def _record(self, call: Call, turn: Turn) -> None:
        file = self._file_number(call.where.filename) if call.where is not None else 0
        position = self._slot.recorded % HISTORY
        offset = self._board.history_offset(self._rank) + position * RECORD_BYTES
        history.write(self._board.map, offset, call, turn, file)
        self._slot.recorded += 1

    def _file_number(self, name: str) -> int:
        number = self._file_numbers.get(name)
        if number is None:
            number = self._file_numbers[name] = min(len(self._file_numbers), MOST_FILES - 1)
            self._files[number].value = name.encode()[:319]
        return number

    def _group(self, path: int, ranks: tuple[int, ...]) -> int | None:
        """The place of a group's counter; None when there are too many groups to follow."""
        position = self._groups.get(path)
        if position is None and len(self._groups) < MOST_GROUPS:
            position = self._groups[path] = len(self._groups)
            entry = self._slot.groups[position]
            for rank in ranks:
                entry.members[rank] = 1
            entry.path = path
        return position
