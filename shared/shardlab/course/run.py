"""Runs labs with papermill at chosen numbers of ranks and tells how each went, as one table.

A solution must run to its end. A fresh lab (`unsolved`) must stop at its first exercise, saying "not written yet".
"""

from __future__ import annotations

import ast
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardlab.course.build import read_source_of
from shardlab.course.execute import TimeLimit, failure
from shardlab.course.find import Lab, need
from shardlab.course.kernel import this_interpreter
from shardlab.course.source import read_notebook, tags
from shardlab.errors import UsageError

NOT_WRITTEN = "not written yet"


@dataclass(frozen=True)
class Result:
    """How one notebook went. `world_size` is None for a lab that has no such parameter."""

    lab: str
    world_size: int | None
    device: str
    seconds: float
    ok: bool
    note: str
    output: Path


def run(lab: Lab, world_size: int, device: str, out: Path, *, timeout: float = 600, unsolved: bool = False) -> Result:
    """Runs a lab's solution, from its source, or its unsolved notebook; the executed notebook is kept in `out`."""
    papermill = need("papermill", "run")
    if unsolved and not lab.notebook.exists():
        raise UsageError(f"labs/{lab.notebook.name} does not exist; try: python -m shardlab build {lab.name}")
    notebook = read_notebook(lab.notebook) if unsolved else read_source_of(lab)
    known = parameters_of(notebook)
    parameters = {name: value for name, value in {"WORLD_SIZE": world_size, "DEVICE": device}.items() if name in known}
    ranks = world_size if "WORLD_SIZE" in known else None
    out.mkdir(parents=True, exist_ok=True)
    output = out / f"{lab.name}{'-unsolved' if unsolved else ''}{f'-ws{ranks}' if ranks else ''}.ipynb"

    began = time.monotonic()
    problem: Any = None
    limit = TimeLimit(timeout)
    with this_interpreter(lab.home, out / "ledger.json") as manager:
        try:
            papermill.execute_notebook(
                notebook,
                output,
                parameters=parameters,
                cwd=lab.notebook.parent if unsolved else lab.source.parent,
                progress_bar=False,
                kernel_manager_class=manager,
                timeout_func=limit,
            )
        except Exception as error:
            problem = failure(read_notebook(output) if output.exists() else notebook, error, limit)
    seconds = time.monotonic() - began
    if unsolved:
        ok, note = _stops_cleanly(problem)
    else:
        ok, note = problem is None, "ok" if problem is None else f"failed: {problem}"
    return Result(lab.name, ranks, str(parameters.get("DEVICE", "-")), seconds, ok, note, output)


def parameters_of(notebook: Any) -> set[str]:
    """The names that a notebook's cell tagged `parameters` assigns; empty when there is none."""
    for cell in notebook.cells:
        if cell.cell_type == "code" and "parameters" in tags(cell):
            nodes = ast.walk(ast.parse(cell.source))
            return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return set()


def table(results: list[Result]) -> str:
    """Lab, world size, device, seconds and result, one line each."""
    rows = [["lab", "world size", "device", "seconds", "result"]]
    for result in results:
        ranks = "-" if result.world_size is None else str(result.world_size)
        rows.append([result.lab, ranks, result.device, f"{result.seconds:.1f}", result.note.split(":")[0]])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    sides = [str.ljust, str.rjust, str.ljust, str.rjust, str.ljust]
    lines = []
    for row in rows:
        cells = [side(text, width) for side, text, width in zip(sides, row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _stops_cleanly(problem: Any) -> tuple[bool, str]:
    """Whether an unsolved lab stopped for the right reason, and the words for it."""
    if problem is None:
        return False, "failed: ran to its end, although nothing is solved"
    if NOT_WRITTEN in problem.error:
        return True, f"stops at {problem.cell}, {NOT_WRITTEN}"
    return False, f"failed: {problem}"
