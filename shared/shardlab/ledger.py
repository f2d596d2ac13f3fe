"""The ledger: one table that runs through all labs, a row per strategy, measured on the learner's own code.

Every lab trains the same small GPT on the same batch with the same number of ranks and records its row; the rows are
kept in a file from lab to lab.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .errors import UsageError

VARIABLE = "SHARDLAB_LEDGER"  # where the file is; without it, ledger.json beside the notebook
COLUMNS = ("lab", "strategy", "held", "held, formula", "sent", "sent, formula", "calls", "limited by")


@dataclass(frozen=True)
class LedgerRow:
    """What one training step costs on the rank that is worst off, measured, and what the formulas say.

    held: bytes of model states between two steps. sent: payload bytes that the busiest rank sends in a step; messages:
    the calls that takes, shown as "calls": a send is one, and so is a collective of the library, whatever it sends
    inside. limited_by: a few words.
    """

    lab: str  # "03"
    strategy: str  # "DDP, per parameter"
    world_size: int
    held: int
    held_formula: float
    sent: float
    sent_formula: float
    messages: int
    limited_by: str = ""


@dataclass(frozen=True)
class Ledger:
    """The rows for one world size, up to one lab, in the order of the labs. Shows itself as a table."""

    rows: tuple[LedgerRow, ...]

    def _table(self) -> Any:
        from .widgets import table

        rows = [
            {
                "lab": row.lab,
                "strategy": row.strategy,
                "held": row.held,
                "held, formula": row.held_formula,
                "sent": round(row.sent),  # a mean over steps, or a part of an all-reduce, need not be whole
                "sent, formula": round(row.sent_formula),
                "calls": row.messages,
                "limited by": row.limited_by,
            }
            for row in self.rows
        ]
        return table(rows, COLUMNS, title=f"The ledger, N = {self.rows[0].world_size}; bytes of one rank, per step")

    def __repr__(self) -> str:
        return str(self._table())

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()


def record(*rows: LedgerRow) -> Ledger:
    """Keeps the rows of one lab, in place of what it had recorded for this world size; returns the ledger up to it.

    All rows have the same lab and world size. UsageError when they do not, or when the file cannot be read.
    """
    if len({(row.lab, row.world_size) for row in rows}) != 1:
        raise UsageError("record: expected the rows of one lab at one world size")
    lab, world_size = rows[0].lab, rows[0].world_size
    path = Path(os.environ.get(VARIABLE) or "ledger.json")
    others = [row for row in _read(path) if (row.lab, row.world_size) != (lab, world_size)]
    kept = sorted([*others, *rows], key=lambda row: (row.lab, row.world_size))  # stable: a lab's rows stay in order
    _write(path, kept)
    return Ledger(tuple(row for row in kept if row.world_size == world_size and row.lab <= lab))


def _read(path: Path) -> list[LedgerRow]:
    if not path.exists():
        return []
    try:
        return [LedgerRow(**row) for row in json.loads(path.read_text(encoding="utf-8"))]
    except (ValueError, TypeError) as error:
        names = ", ".join(field.name for field in fields(LedgerRow))
        raise UsageError(
            f"{path} is not a ledger (a JSON list of rows with {names}). Delete or move it; labs record their rows anew"
        ) from error


def _write(path: Path, rows: list[LedgerRow]) -> None:
    """Whole or not at all: a kernel that is killed halfway leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_text("[\n" + ",\n".join(json.dumps(asdict(row)) for row in rows) + "\n]\n", encoding="utf-8")
    fresh.replace(path)
