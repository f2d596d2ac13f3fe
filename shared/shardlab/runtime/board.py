"""The board: what each rank is doing now, written by the ranks and read by the launcher, without a message.

One memory-mapped file, one slot a rank. A rank that is stuck, killed or spinning in a loop cannot answer a question,
but what it wrote last can still be read.
"""

from __future__ import annotations

import ctypes
import mmap
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from ..records import Call, Where

STARTING, RUNNING, WAITING, FINISHED = range(4)
MOST_GROUPS = 16


@dataclass(frozen=True)
class RankStatus:
    """One rank's slot, read at one moment.

    sends[p] and receives[p]: messages to and from rank p issued so far. groups: for each process group (its global
    ranks) the number of collectives issued on it. `number` is the waiting call's number on its path: the n-th send to
    this peer, the n-th collective of this group.
    """

    rank: int
    state: int
    progress: int
    op: str = ""
    peer: int | None = None
    numel: int = 0
    dtype: str = ""
    index: int = -1
    number: int = 0
    where: Where | None = None
    group: tuple[int, ...] = ()
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()
    groups: dict[tuple[int, ...], int] = field(default_factory=dict)

    @property
    def in_call(self) -> bool:
        return self.index >= 0


def _slot_type(world_size: int) -> type[ctypes.Structure]:
    class Group(ctypes.Structure):
        _fields_ = (
            ("key", ctypes.c_uint32),
            ("calls", ctypes.c_uint32),
            ("members", ctypes.c_uint8 * world_size),
        )

    class Slot(ctypes.Structure):
        _fields_ = (
            ("version", ctypes.c_uint32),  # odd while being written
            ("state", ctypes.c_int32),
            ("progress", ctypes.c_uint64),
            ("peer", ctypes.c_int32),
            ("line", ctypes.c_int32),
            ("numel", ctypes.c_int64),
            ("index", ctypes.c_int64),
            ("number", ctypes.c_int64),
            ("op", ctypes.c_char * 24),
            ("dtype", ctypes.c_char * 16),
            ("function", ctypes.c_char * 64),
            ("filename", ctypes.c_char * 320),
            ("group", ctypes.c_int32),  # index into groups, -1 for a send or recv
            ("sends", ctypes.c_uint32 * world_size),
            ("receives", ctypes.c_uint32 * world_size),
            ("groups", Group * MOST_GROUPS),
        )

    return Slot


class Board:
    """All slots of a launch. The launcher makes the file with `create`; every rank opens it."""

    def __init__(self, path: Path, world_size: int) -> None:
        self._type = _slot_type(world_size)
        self.world_size = world_size
        self._file = open(path, "r+b")  # noqa: SIM115 - lives as long as the map
        self._map = mmap.mmap(self._file.fileno(), ctypes.sizeof(self._type) * world_size)

    @classmethod
    def create(cls, path: Path, world_size: int) -> Board:
        path.write_bytes(bytes(ctypes.sizeof(_slot_type(world_size)) * world_size))
        return cls(path, world_size)

    def slot(self, rank: int) -> ctypes.Structure:
        return self._type.from_buffer(self._map, ctypes.sizeof(self._type) * rank)

    def read(self, rank: int) -> RankStatus:
        """A consistent copy of one slot; tries again while the rank is writing."""
        size = ctypes.sizeof(self._type)
        for _ in range(100):
            copy = self._type.from_buffer_copy(self._map, size * rank)
            again = self._type.from_buffer_copy(self._map, size * rank)
            if copy.version == again.version and copy.version % 2 == 0:
                break
        return _status(rank, copy, self.world_size)

    def close(self) -> None:
        self._map.close()
        self._file.close()


def _status(rank: int, slot: ctypes.Structure, world_size: int) -> RankStatus:
    groups = {
        tuple(member for member in range(world_size) if entry.members[member]): entry.calls
        for entry in slot.groups
        if entry.key
    }
    where = Where(_text(slot.filename), slot.line, _text(slot.function)) if slot.line else None
    return RankStatus(
        rank=rank,
        state=slot.state,
        progress=slot.progress,
        op=_text(slot.op),
        peer=slot.peer if slot.op and slot.peer >= 0 else None,
        numel=slot.numel,
        dtype=_text(slot.dtype),
        index=slot.index if slot.op else -1,
        number=slot.number,
        where=where,
        group=list(groups)[slot.group] if slot.op and slot.group >= 0 else (),
        sends=tuple(slot.sends),
        receives=tuple(slot.receives),
        groups=groups,
    )


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


class Writer:
    """One rank's pen on the board (the `Status` that meters/tap.py asks for)."""

    def __init__(self, board: Board, rank: int) -> None:
        self._slot = board.slot(rank)
        self._groups: dict[tuple[int, ...], int] = {}

    def issued(self, call: Call, group_call: int) -> None:
        slot = self._slot
        slot.version += 1
        self._write_call(call, group_call)
        if call.op == "send" and call.peer is not None:
            slot.sends[call.peer] = group_call
        elif call.op == "recv" and call.peer is not None:
            slot.receives[call.peer] = group_call
        elif slot.group >= 0:
            slot.groups[slot.group].calls = group_call
        slot.version += 1

    def waiting(self, call: Call, group_call: int) -> None:
        slot = self._slot
        slot.version += 1
        self._write_call(call, group_call)
        slot.state = WAITING
        slot.version += 1

    def running(self) -> None:
        self._slot.progress += 1
        self._slot.state = RUNNING

    def finished(self) -> None:
        self._slot.state = FINISHED

    def progressed(self) -> None:
        self._slot.progress += 1

    def _write_call(self, call: Call, group_call: int) -> None:
        slot = self._slot
        slot.progress += 1
        slot.op = call.op.encode()
        slot.dtype = call.dtype.encode()[:15]
        slot.peer = -1 if call.peer is None else call.peer
        slot.numel, slot.index, slot.number = call.numel, call.index, group_call
        slot.group = -1 if call.point_to_point else self._group(call.group)
        if call.where is not None:
            slot.line = call.where.line
            slot.function = call.where.function.encode()[:63]
            slot.filename = call.where.filename.encode()[:319]

    def _group(self, ranks: tuple[int, ...]) -> int:
        position = self._groups.get(ranks)
        if position is None:
            if len(self._groups) == MOST_GROUPS:
                return -1  # too many groups to follow: this call is not part of the deadlock search
            position = self._groups[ranks] = len(self._groups)
            entry = self._slot.groups[position]
            for rank in ranks:
                entry.members[rank] = 1
            entry.key = zlib.crc32(repr(ranks).encode()) | 1
        return position
