"""Executing a notebook, and saying what came of it: the first cell that failed, and why."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardlab.course.find import need
from shardlab.course.kernel import this_interpreter


@dataclass(frozen=True)
class Failure:
    """Why a notebook did not run to its end: the cell's id, its first line of code, and one line of the error."""

    cell: str
    code: str
    error: str

    def __str__(self) -> str:
        return f"cell {self.cell} ({self.code}): {self.error}" if self.cell else self.error


class TimeLimit:
    """nbclient limits each cell, this limits them all: a cell gets what the notebook's `seconds` have left, at least 1.

    To be given to nbclient as `timeout_func`; it knows the cell that was begun last.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.end = seconds, time.monotonic() + seconds
        self.cell: Any = None

    def __call__(self, cell: Any) -> int:
        self.cell = cell
        return max(1, round(self.end - time.monotonic()))


def execute(notebook: Any, home: Path, folder: Path, timeout: float) -> Failure | None:
    """Runs all cells in place, in `folder`, on this interpreter; returns what went wrong, if anything.

    Execution times are not recorded. Everything else of the outputs is left as it came.
    """
    nbclient = need("nbclient", "executing a notebook")
    limit = TimeLimit(timeout)
    with this_interpreter(home, folder / "ledger.json") as manager:
        client = nbclient.NotebookClient(
            notebook,
            kernel_manager_class=manager,
            timeout_func=limit,
            record_timing=False,
            store_widget_state=False,
            resources={"metadata": {"path": str(folder)}},
        )
        try:
            client.execute()
        except Exception as error:
            return failure(notebook, error, limit)
    return None


def failure(notebook: Any, error: Exception, limit: TimeLimit) -> Failure:
    """The cell that failed and one line about it, from an exception of nbclient or papermill."""
    kind = type(error).__name__
    cell_id, code = (limit.cell.id, _first_line(limit.cell.source)) if limit.cell else ("", "")
    if kind == "CellTimeoutError":
        return Failure(cell_id, code, f"not done after {limit.seconds:g} s")
    if kind == "DeadKernelError":
        return Failure(cell_id, code, "the kernel died")
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                return Failure(cell.id, _first_line(cell.source), f"{output.ename}: {_first_line(output.evalue)}")
    return Failure("", "", f"{kind}: {_first_line(str(error))}")


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0][:100]
