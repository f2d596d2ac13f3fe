"""A lab's source as a notebook, and back: what a cell is, what it is called, and when two notebooks say the same.

Cell ids are a function of the source: a cell's nbgrader `grade_id`, else its type and a hash of its text. So a rebuild
gives the same bytes, and a changed cell changes its own id alone.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from shardlab.course.find import need
from shardlab.errors import UsageError

CELL_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # nbformat 4.5
PAIRED = {"formats": "ipynb,py:percent"}
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
LANGUAGE = {"file_extension": ".py", "mimetype": "text/x-python", "name": "python", "pygments_lexer": "ipython3"}

# What editors and runners leave in a cell's metadata; none of it is part of what the author wrote.
NOISE = {
    "ExecuteTime",
    "autoscroll",
    "collapsed",
    "execution",
    "lines_to_end_of_cell_marker",
    "lines_to_next_cell",
    "papermill",
    "scrolled",
    "trusted",
}


def read_source(path: Path) -> Any:
    """The notebook a py:percent source describes, with this course's ids and metadata. Raises UsageError if broken."""
    jupytext = need("jupytext", "reading a lab's source")
    try:
        notebook = jupytext.reads(path.read_text(encoding="utf-8"), fmt="py:percent")
    except Exception as error:
        raise UsageError(f"{path.name} cannot be read as py:percent: {_first_line(error)}") from error
    if not notebook.cells:
        raise UsageError(f"{path.name} has no cells: a cell starts with a line '# %%'")
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    notebook.metadata = as_node({"jupytext": PAIRED, "kernelspec": KERNEL, "language_info": LANGUAGE})
    name_cells(notebook, path.name)
    check_code(notebook, path.name)
    return notebook


def write_source(notebook: Any, path: Path) -> str:
    """The py:percent text of a notebook, under the header the source at `path` already has, pairing added."""
    jupytext = need("jupytext", "writing a lab's source")
    metadata: dict[str, Any] = {"jupytext": {}, "kernelspec": KERNEL}
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    if _split(old)[0]:  # without a header, jupytext would note to write none
        metadata |= jupytext.reads(old, fmt="py:percent").metadata
    metadata["jupytext"] = {**metadata["jupytext"], **PAIRED}
    copy = as_node({"nbformat": 4, "nbformat_minor": 5, "metadata": metadata, "cells": notebook.cells})
    return jupytext.writes(copy, fmt="py:percent")


def in_normal_form(notebook: Any, path: Path) -> bool:
    """Whether the source is written as jupytext itself would write it, and its header pairs it with its notebook.

    If it is not, jupytext refuses to open the pair in JupyterLab when the .ipynb is the newer file.
    """
    header, body = _split(path.read_text(encoding="utf-8"))
    return body == _split(write_source(notebook, path))[1] and f"formats: {PAIRED['formats']}" in header


def read_notebook(path: Path) -> Any:
    """An .ipynb file as a notebook. Raises UsageError when it is none."""
    nbformat = need("nbformat", "reading a notebook")
    try:
        return nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)
    except Exception as error:
        raise UsageError(f"{path.name} cannot be read as a notebook: {_first_line(error)}") from error


def notebook_text(notebook: Any) -> str:
    """The bytes of an .ipynb file: sorted keys, one newline at the end. Raises UsageError for an invalid notebook."""
    nbformat = need("nbformat", "writing a notebook")
    try:
        nbformat.validate(notebook)
    except nbformat.ValidationError as error:
        raise UsageError(f"not a valid notebook: {_first_line(error)}") from error
    return nbformat.writes(notebook, version=4).rstrip("\n") + "\n"


def name_cells(notebook: Any, where: str) -> None:
    """Gives every cell its id. Raises UsageError for a grade_id that is used twice or is no valid id."""
    taken: set[str] = set()
    for cell in notebook.cells:
        grade_id = cell.metadata.get("nbgrader", {}).get("grade_id")
        if grade_id is None:
            continue
        if not isinstance(grade_id, str) or not CELL_ID.fullmatch(grade_id):
            raise UsageError(f"{where}: grade_id {grade_id!r} must be 1 to 64 letters, digits, '-' or '_'")
        if grade_id in taken:
            raise UsageError(f"{where}: grade_id {grade_id!r} is used by two cells")
        taken.add(grade_id)
        cell.id = grade_id
    for cell in notebook.cells:
        if "grade_id" in cell.metadata.get("nbgrader", {}):
            continue
        base = f"{cell.cell_type}-{hashlib.sha256(cell.source.encode()).hexdigest()[:8]}"
        cell.id, count = base, 1
        while cell.id in taken:
            count += 1
            cell.id = f"{base}-{count}"
        taken.add(cell.id)


def check_code(notebook: Any, where: str) -> None:
    """Raises UsageError, naming the cell and the line, when a code cell is not Python (magics allowed)."""
    transformer = need("IPython.core.inputtransformer2", "reading a lab's source").TransformerManager()
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        try:
            compile(transformer.transform_cell(cell.source), where, "exec", flags=0x2000, dont_inherit=True)
        except SyntaxError as error:
            line = (error.text or "").strip()
            raise UsageError(f"{where}: cell {cell.id} is not valid Python: {error.msg}: {line}") from error


def tags(cell: Any) -> list[str]:
    """A cell's tags."""
    return list(cell.metadata.get("tags", []))


def fingerprint(notebook: Any) -> str:
    """A hash of what the author wrote: types, texts, tags and grading of all cells. Ids and outputs do not count."""
    told = [
        [
            cell.cell_type,
            cell.source.strip("\n"),
            {key: value for key, value in cell.metadata.items() if key not in NOISE},
        ]
        for cell in notebook.cells
    ]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def stamp(notebook: Any) -> None:
    """Notes in a generated notebook what its cells were, so that an edit by hand can be told later."""
    notebook.metadata["shardlab"] = {"cells": fingerprint(notebook)}


def stamped(notebook: Any) -> str | None:
    """What `stamp` noted, None if it never did."""
    return notebook.metadata.get("shardlab", {}).get("cells")


def as_node(value: dict[str, Any]) -> Any:
    """A deep copy of plain data as a notebook node, keys sorted as in a file."""
    return need("nbformat", "reading a notebook").from_dict(json.loads(json.dumps(value, sort_keys=True)))


def _split(text: str) -> tuple[str, str]:
    """The header of a py:percent text, which names the version of jupytext that wrote it, and the rest."""
    header = re.match(r"# ---\n(#.*\n)*?# ---\n", text)
    end = header.end() if header else 0
    return text[:end], text[end:].lstrip("\n")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
