"""What a solution prints: kept case by case while it runs, in files that survive a rank that hangs or dies."""

from __future__ import annotations

import io
import pickle
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_LINES = 20  # shown of a failed case
MOST_COLUMNS = 200  # of one line


@dataclass(frozen=True)
class Printout:
    """What one rank printed in one case. total: lines in all. last: the last of them, each with its time."""

    total: int
    last: tuple[tuple[float, str], ...]


class Listener(io.TextIOBase):
    """Stands in for stdout and stderr of one rank. However much is printed, a case takes up a few kilobytes."""

    def __init__(self, folder: str, rank: int) -> None:
        self._path = Path(folder) / f"{rank}.printed"
        self._lock = threading.Lock()
        self._file: Any = None
        self.begin(0)

    def begin(self, case: int) -> None:
        """What comes from now on belongs to this case."""
        with self._lock:
            self._case, self._total, self._partial = case, 0, ""
            self._last: deque[tuple[float, str]] = deque(maxlen=MOST_LINES)

    def write(self, text: str) -> int:
        with self._lock:
            *lines, rest = (self._partial + text).split("\n")
            for line in lines:
                self._total += 1
                self._last.append((time.monotonic(), _shortened(line)))
            # A rewritten line (a progress bar) counts with its last state; one without an end must not grow for ever.
            self._partial = rest.rsplit("\r", 1)[-1][-10 * MOST_COLUMNS :]
            self._save()
        return len(text)

    def writable(self) -> bool:
        return True

    def _save(self) -> None:
        last, total = tuple(self._last), self._total
        if self._partial:
            last, total = (*last, (time.monotonic(), _shortened(self._partial))), total + 1
        if total:
            path = self._path.with_suffix(f".{self._case}.printed")
            # Replaced in one go: the rank may be ended at any moment.
            path.with_suffix(".new").write_bytes(pickle.dumps(Printout(total, last)))
            path.with_suffix(".new").replace(path)


def _shortened(line: str) -> str:
    return line if len(line) <= MOST_COLUMNS else f"{line[: MOST_COLUMNS - 3]}..."


def read_printed(folder: str, rank: int, case: int) -> Printout:
    path = Path(folder) / f"{rank}.{case}.printed"
    return pickle.loads(path.read_bytes()) if path.exists() else Printout(0, ())


def in_words(printouts: Sequence[Printout]) -> str:
    """All ranks' lines of one case in the order in which they were printed, or "" when there are none."""
    total = sum(one.total for one in printouts)
    if not total:
        return ""
    lines = sorted((when, rank, line) for rank, one in enumerate(printouts) for when, line in one.last)[-MOST_LINES:]
    counted = f" (last {len(lines)} of {total:,} lines)" if len(lines) < total else ""
    return "\n".join([f"your function printed{counted}:", *(f"  [rank {rank}] {line}" for _, rank, line in lines)])
