"""What each rank called lately: a ring of records in the board's file, which outlives the rank.

A path is what calls of different ranks share when they belong together: a process group for collectives; a group, a
direction and a tag for messages. The n-th call on a path meets the n-th call of the other ranks on the same path.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..meters import Turn
from ..records import Call, Where
from .board import HISTORY, RECORD_BYTES, Board

OPERATIONS = (
    *("", "send", "recv", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter"),
    *("all_to_all", "barrier"),
)
_FORMAT = "<IIqdiiHBB12s"  # as _RECORD
_RECORD = np.dtype(
    [
        *(("path", "<u4"), ("number", "<u4"), ("numel", "<i8"), ("time", "<f8"), ("peer", "<i4"), ("line", "<i4")),
        *(("file", "<u2"), ("op", "u1"), ("uneven", "u1"), ("dtype", "S12")),
    ]
)
assert _RECORD.itemsize == struct.calcsize(_FORMAT) == RECORD_BYTES


@dataclass(frozen=True)
class Record:
    """One call of a rank. time: seconds since the launch began."""

    rank: int
    path: int
    number: int
    op: str
    numel: int
    dtype: str
    peer: int | None = None
    uneven: bool = False
    time: float = 0.0
    where: Where | None = None

    @property
    def point_to_point(self) -> bool:
        return self.op in ("send", "recv")


def path_of(call: Call, turn: Turn) -> int:
    """The number of the call's path, never 0."""
    if not call.point_to_point:
        return _path(turn.group, 0, -1, -1)
    peer = -1 if call.peer is None else call.peer
    source, destination = (call.rank, peer) if call.op == "send" else (peer, call.rank)
    return _path(turn.group, turn.tag, source, destination)


@lru_cache(maxsize=4096)
def _path(group: str, tag: int, source: int, destination: int) -> int:
    return zlib.crc32(f"{group} {tag} {source} {destination}".encode()) | 1


def digest_of(call: Call, turn: Turn) -> int:
    """The same number on all ranks for calls that belong together."""
    collective = "" if call.point_to_point else f"{call.op} {call.peer}"
    numel = 0 if turn.uneven else call.numel
    return zlib.crc32(f"{path_of(call, turn)} {turn.number} {collective} {numel} {call.dtype}".encode())


def write(target: mmap.mmap, offset: int, call: Call, turn: Turn, file: int) -> None:
    struct.pack_into(
        _FORMAT,
        target,
        offset,
        path_of(call, turn),
        turn.number,
        call.numel,
        call.issued,
        -1 if call.peer is None else call.peer,
        0 if call.where is None else call.where.line,
        file,
        OPERATIONS.index(call.op),
        turn.uneven,
        call.dtype.encode()[:12],
    )


def posted(board: Board, rank: int, path: int) -> int | None:
    """How many calls the rank has issued on the path; None when they may have been forgotten."""
    recorded, rows = _rows(board, rank)
    numbers = rows["number"][rows["path"] == path]
    if len(numbers):
        return int(numbers.max())
    return 0 if recorded <= HISTORY else None


def read(board: Board, rank: int, most: int = HISTORY) -> list[Record]:
    """The rank's last calls, oldest first: as many as are remembered, or the last `most`."""
    recorded, rows = _rows(board, rank)
    if recorded > HISTORY:
        rows = np.roll(rows, -(recorded % HISTORY))
    rows = rows[-most:]
    names = board.names(rank)
    return [
        Record(
            rank=rank,
            path=int(row["path"]),
            number=int(row["number"]),
            op=OPERATIONS[row["op"]],
            numel=int(row["numel"]),
            dtype=row["dtype"].decode(),
            peer=int(row["peer"]) if row["peer"] >= 0 else None,
            uneven=bool(row["uneven"]),
            time=float(row["time"]),
            where=Where(names[row["file"]], int(row["line"]), "") if row["line"] else None,
        )
        for row in rows
    ]


def _rows(board: Board, rank: int) -> tuple[int, np.ndarray]:
    recorded = board.recorded(rank)
    start = board.history_offset(rank)
    return recorded, np.frombuffer(board.map[start : start + min(recorded, HISTORY) * RECORD_BYTES], _RECORD)
