"""Names a place in code as the learner sees it: a notebook's cell by its number, with the line's text."""

from __future__ import annotations

import linecache
import os
import sys


def place(filename: str, line: int) -> str:
    """ "cell In[5], line 3" for a notebook cell, "file.py, line 3" otherwise."""
    cell = _cell_name(filename)
    if cell:
        return f"cell {cell}, line {line}"
    return f"{os.path.basename(filename)}, line {line}"


def source(filename: str, line: int) -> str:
    """The text of the line, without indentation; "" when it is not to be had."""
    return linecache.getline(filename, line).strip()


def _cell_name(filename: str) -> str:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None  # type: ignore[attr-defined]
    compiler = getattr(shell, "compile", None)
    if compiler is None or not hasattr(compiler, "format_code_name"):
        return ""
    described = compiler.format_code_name(filename)
    return described[1] if described else ""
