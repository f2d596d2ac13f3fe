"""Executing a notebook, and saying what came of it: the first cell that failed, and why."""

from __future__ import annotations

import time
from collections.abc import Callable
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


def time_left(seconds: float) -> Callable[[Any], int]:
    """nbclient limits each cell, this limits them all: a cell gets what the notebook's `seconds` have left, at least 1.

    To be given to nbclient as `timeout_func`.
    """
    end = time.monotonic() + seconds
    return lambda cell: max(1, round(end - time.monotonic()))


def execute(notebook: Any, home: Path, folder: Path, timeout: float) -> Failure | None:
    """Runs all cells in place, in `folder`, on this interpreter; returns what went wrong, if anything.

    Widget state is kept in the notebook's metadata, so that pictures show in an exported page. Execution times are
    not recorded. Everything else of the outputs is left as it came.
    """
    nbclient = need("nbclient", "executing a notebook")
    with this_interpreter(home) as manager:
        client = nbclient.NotebookClient(
            notebook,
            kernel_manager_class=manager,
            timeout_func=time_left(timeout),
            record_timing=False,
            store_widget_state=True,
            resources={"metadata": {"path": str(folder)}},
        )
        try:
            client.execute()
        except Exception as error:
            return failure(notebook, error, timeout)
    return None


def failure(notebook: Any, error: Exception, timeout: float) -> Failure:
    """The cell that failed and one line about it, from an exception of nbclient or papermill."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                return Failure(cell.id, _first_line(cell.source), f"{output.ename}: {_first_line(output.evalue)}")
    kind = type(error).__name__
    if kind == "CellTimeoutError":
        ran = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.get("execution_count") is None]
        text = f"not done after {timeout:g} s"
        return Failure(ran[0].id, _first_line(ran[0].source), text) if ran else Failure("", "", text)
    if kind == "DeadKernelError":
        return Failure("", "", "the kernel died")
    return Failure("", "", f"{kind}: {_first_line(str(error))}")


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0][:100]
