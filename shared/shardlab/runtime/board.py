"""The board: what each rank is doing now, written by the ranks and read by the launcher, without a message.

One memory-mapped file. A rank that is stuck, killed or spinning in a loop cannot answer a question, but what it wrote
last can still be read. Each rank has a slot (this file) and a history of its last calls (history.py).
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..records import Where

STARTING, RUNNING, WAITING, FINISHED = range(4)
MOST_GROUPS = 32
MOST_FILES = 16
HISTORY = 2048  # calls of a rank that are remembered
RECORD_BYTES = 48  # see history.py

FileName = ctypes.c_char * 320


@dataclass(frozen=True)
class GroupCount:
    """Collectives that a rank has issued in one process group. digest: a sum over what they were, in their order."""

    calls: int
    digest: int = 0
    members: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankStatus:
    """One rank's slot, read at one moment.

    op ... where: the call that it issued or waits for (the last one, when there was any: index >= 0). path and number
    say which calls of other ranks match it (see history.py). sends[p], receives[p]: messages to and from rank p
    issued so far; their digests are sums over what those were. groups: by path.
    """

    rank: int
    state: int
    progress: int = 0
    op: str = ""
    peer: int | None = None
    numel: int = 0
    dtype: str = ""
    index: int = -1
    path: int = 0
    number: int = 0
    where: Where | None = None
    members: tuple[int, ...] = ()
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()
    send_digests: tuple[int, ...] = ()
    receive_digests: tuple[int, ...] = ()
    from_anybody: int = 0
    groups: dict[int, GroupCount] = field(default_factory=dict)

    @property
    def in_call(self) -> bool:
        return self.index >= 0


def slot_type(world_size: int) -> type[ctypes.Structure]:
    per_rank = ctypes.c_uint32 * world_size

    class Group(ctypes.Structure):
        _fields_ = (
            ("path", ctypes.c_uint32),
            ("calls", ctypes.c_uint32),
            ("digest", ctypes.c_uint32),
            ("members", ctypes.c_uint8 * world_size),
        )

    class Slot(ctypes.Structure):
        _fields_ = (
            ("version", ctypes.c_uint32),  # odd while being written
            ("state", ctypes.c_int32),
            ("progress", ctypes.c_uint64),
            ("peer", ctypes.c_int32),
            ("line", ctypes.c_int32),
            ("file", ctypes.c_uint32),
            ("path", ctypes.c_uint32),
            ("numel", ctypes.c_int64),
            ("index", ctypes.c_int64),
            ("number", ctypes.c_int64),
            ("recorded", ctypes.c_uint64),  # calls written to the history, ever
            ("op", ctypes.c_char * 24),
            ("dtype", ctypes.c_char * 16),
            ("sends", per_rank),
            ("receives", per_rank),
            ("send_digests", per_rank),
            ("receive_digests", per_rank),
            ("from_anybody", ctypes.c_uint32),  # receives without a named source
            ("groups", Group * MOST_GROUPS),
        )

    return Slot


class Board:
    """All slots and histories of a launch. The launcher makes the file with `create`; every rank opens it."""

    def __init__(self, path: Path, world_size: int) -> None:
        self._type = slot_type(world_size)
        self.world_size = world_size
        self._stride = ctypes.sizeof(self._type) + ctypes.sizeof(FileName) * MOST_FILES + RECORD_BYTES * HISTORY
        with open(path, "r+b") as file:
            self.map = mmap.mmap(file.fileno(), self._stride * world_size)

    @classmethod
    def create(cls, path: Path, world_size: int) -> Board:
        size = ctypes.sizeof(slot_type(world_size)) + ctypes.sizeof(FileName) * MOST_FILES + RECORD_BYTES * HISTORY
        with path.open("wb") as file:
            file.truncate(size * world_size)
            if hasattr(os, "posix_fallocate"):  # writing to a map when there is no room left would end the process
                os.posix_fallocate(file.fileno(), 0, size * world_size)
        return cls(path, world_size)

    def slot(self, rank: int) -> ctypes.Structure:
        return self._type.from_buffer(self.map, self._stride * rank)

    def file_names(self, rank: int) -> ctypes.Array:
        return (FileName * MOST_FILES).from_buffer(self.map, self._stride * rank + ctypes.sizeof(self._type))

    def history_offset(self, rank: int) -> int:
        return self._stride * (rank + 1) - RECORD_BYTES * HISTORY

    def read(self, rank: int) -> RankStatus:
        """A consistent copy of one slot; tries again while the rank is writing."""
        offset = self._stride * rank
        for _ in range(100):
            copy = self._type.from_buffer_copy(self.map, offset)
            if copy.version % 2 == 0 and copy.version == self._type.from_buffer_copy(self.map, offset).version:
                break
        return self._status(rank, copy)

    def statuses(self) -> list[RankStatus]:
        return [self.read(rank) for rank in range(self.world_size)]

    def recorded(self, rank: int) -> int:
        return self._type.from_buffer_copy(self.map, self._stride * rank).recorded

    def names(self, rank: int) -> list[str]:
        start = self._stride * rank + ctypes.sizeof(self._type)
        names = (FileName * MOST_FILES).from_buffer_copy(self.map, start)
        return [name.value.decode("utf-8", "replace") for name in names]

    def close(self) -> None:
        self.map.close()

    def _status(self, rank: int, slot: ctypes.Structure) -> RankStatus:
        groups = {
            entry.path: GroupCount(entry.calls, entry.digest, _ranks(entry.members))
            for entry in slot.groups
            if entry.path
        }
        return RankStatus(
            rank=rank,
            state=slot.state,
            progress=slot.progress,
            op=slot.op.decode(),
            peer=slot.peer if slot.op and slot.peer >= 0 else None,
            numel=slot.numel,
            dtype=slot.dtype.decode(),
            index=slot.index if slot.op else -1,
            path=slot.path,
            number=slot.number,
            where=Where(self.names(rank)[slot.file], slot.line, "") if slot.line else None,
            members=groups[slot.path].members if slot.path in groups else (),
            sends=tuple(slot.sends),
            receives=tuple(slot.receives),
            send_digests=tuple(slot.send_digests),
            receive_digests=tuple(slot.receive_digests),
            from_anybody=slot.from_anybody,
            groups=groups,
        )


def _ranks(flags: Sequence[int]) -> tuple[int, ...]:
    return tuple(rank for rank, flag in enumerate(flags) if flag)
