"""From solution to lab: nbgrader's own preprocessors, used as a library, cut what a learner is to write."""

from __future__ import annotations

import logging
from typing import Any

from shardlab.course.find import need
from shardlab.course.source import KERNEL, LANGUAGE, NOISE, as_node, stamp
from shardlab.errors import UsageError

CODE_STUB = 'raise NotImplementedError("not written yet")'
TEXT_STUB = "*Your answer here.*"


def release(source: Any, where: str) -> Any:
    """The lab for a learner: solutions cut, hidden tests out, no outputs, graded and given cells locked.

    `source` is what `read_source` returned and is left as it is. The result depends on it alone.
    """
    tools = need("nbgrader.preprocessors", "build")
    traitlets = need("traitlets.config", "build")
    config = traitlets.Config()
    config.ClearSolutions.code_stub = {"python": CODE_STUB}
    config.ClearSolutions.text_stub = TEXT_STUB

    notebook = as_node(source)
    steps = [
        tools.CheckCellMetadata,
        tools.LockCells,
        tools.ClearSolutions,
        tools.ClearOutput,
        tools.ClearHiddenTests,
        tools.ClearMarkScheme,
        tools.ComputeChecksums,
        tools.CheckCellMetadata,
    ]
    quiet = logging.getLogger("shardlab.nbgrader")
    quiet.disabled = True  # what a preprocessor logs it also raises, and the person reads it once
    for step in steps:
        try:
            notebook, _ = step(config=config, log=quiet).preprocess(notebook, {})
        except Exception as error:
            raise UsageError(f"{where}: {_reason(source, error)}") from error
    for cell in notebook.cells:
        for key in NOISE:
            cell.metadata.pop(key, None)
    notebook.metadata = as_node({"kernelspec": KERNEL, "language_info": LANGUAGE})
    stamp(notebook)
    return notebook


def _reason(source: Any, error: Exception) -> str:
    """nbgrader's own words, and the first cell whose grading metadata is incomplete if that is the cause."""
    wanted = {"grade", "grade_id", "locked", "schema_version", "solution"}
    for cell in source.cells:
        missing = wanted - set(cell.metadata.get("nbgrader", wanted))
        if missing:
            return f"cell {cell.id}: its nbgrader metadata lacks {', '.join(sorted(missing))}"
    text = str(error.__context__ or error).strip()  # CheckCellMetadata hides what is wrong behind "may be corrupted"
    return text.splitlines()[0] if text else type(error).__name__
