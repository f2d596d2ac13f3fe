"""Prints what the ranks print: whole lines, each with its rank in front, and no more than a page can bear."""

from __future__ import annotations

import sys

MOST_BYTES = 200_000  # of one rank's output shown in a launch
KEPT_ERRORS = 64_000  # bytes of descriptor 2 kept for a report


class Relay:
    """Takes raw bytes of the ranks' descriptors 1 and 2."""

    def __init__(self, world_size: int) -> None:
        self._partial = [b""] * world_size
        self._shown = [0] * world_size
        self._hidden = [0] * world_size
        self._errors = [b""] * world_size

    def stdout(self, rank: int, data: bytes) -> None:
        if self._shown[rank] >= MOST_BYTES:
            self._hidden[rank] += len(data)
            return
        *lines, rest = (self._partial[rank] + data).split(b"\n")
        self._partial[rank] = rest[-MOST_BYTES:]
        self._hidden[rank] += max(0, len(rest) - MOST_BYTES)
        for line in lines:
            self._print(rank, line)

    def stderr(self, rank: int, data: bytes) -> None:
        self._errors[rank] = (self._errors[rank] + data)[-KEPT_ERRORS:]

    def errors(self, rank: int) -> str:
        """The end of what the rank (or a C++ library in it) wrote to descriptor 2."""
        return self._errors[rank].decode("utf-8", "replace")

    def close(self) -> None:
        """Prints lines without an end, and says what was left out."""
        for rank, rest in enumerate(self._partial):
            if rest:
                self._print(rank, rest)
            if self._hidden[rank]:
                print(f"[rank {rank}] ... {self._hidden[rank]:,} more bytes of output are not shown")
        self._partial = [b""] * len(self._partial)
        sys.stdout.flush()

    def _print(self, rank: int, line: bytes) -> None:
        room = MOST_BYTES - self._shown[rank]
        if room <= 0:
            self._hidden[rank] += len(line) + 1
            return
        self._shown[rank] += len(line) + 1
        self._hidden[rank] += max(0, len(line) - room)
        # A progress bar rewrites its line with carriage returns; only its last state is worth a line.
        text = line[:room].decode("utf-8", "replace").rstrip("\r").rsplit("\r", 1)[-1]
        print(f"[rank {rank}] {text}")
