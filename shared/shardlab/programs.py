"""Lays several ranks' events side by side: the same place of their program, not the same moment.

All ranks run the same program, so their lists of events are nearly equal. Where one has an event that another lacks
(the root of a broadcast, a wait that was not needed), it stands alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from difflib import SequenceMatcher

Row = list[int | None]  # of each rank, the number of its event, or None where it has none


def side_by_side(ranks: Sequence[Sequence[Hashable]]) -> list[Row]:
    """Rows of events that are equal. Every event of every rank is in one row, and each rank's are in its own order."""
    rows: list[Row] = []
    names: list[Hashable] = []
    for rank, events in enumerate(ranks):
        rows, names = _joined(rows, names, events, rank)
    return rows


def _joined(rows: list[Row], names: list[Hashable], events: Sequence[Hashable], rank: int) -> tuple[list[Row], list]:
    joined: list[Row] = []
    joined_names: list[Hashable] = []
    for tag, a, b, c, d in SequenceMatcher(None, names, list(events), autojunk=False).get_opcodes():
        equal = tag == "equal"
        for i in range(a, b):
            joined.append([*rows[i], c + i - a if equal else None])
            joined_names.append(names[i])
        for j in () if equal else range(c, d):
            joined.append([*[None] * rank, j])
            joined_names.append(events[j])
    return joined, joined_names
