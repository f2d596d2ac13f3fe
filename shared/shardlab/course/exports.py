"""`reuse("04_ring_all_reduce")`: the code of an earlier lab, for a later one.

Only the cells tagged `export` are run, in order, in a module of their own, so they must need nothing else.
"""

from __future__ import annotations

import json
import linecache
import os
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace

from shardlab.course.find import Lab, find_lab
from shardlab.errors import UsageError


def reuse(name: str, own: bool | str | os.PathLike[str] | None = None) -> SimpleNamespace:
    """What the exported cells of a lab define, as attributes of one object.

    `own=None` takes the course's solution, `own=True` your own labs/NN_name.ipynb, and a path any notebook of yours.
    An exercise you have not solved raises NotImplementedError when it is called, not before.
    Raises UsageError for an unknown lab, a notebook that is not there, or one that exports nothing.
    """
    lab = find_lab(name)
    path, cells = _exported(lab, own)
    if not cells:
        raise UsageError(f"{path.name} exports nothing: tag the cells that other labs may use with 'export'")
    # Not importable, so that cloudpickle sends functions and classes to the ranks by value. Known to sys.modules only
    # while the cells run, because dataclasses look their module up.
    module = ModuleType(f"{lab.name} exports")
    codes = [_compile(cell, f"<{lab.name} export cell {number}>") for number, cell in enumerate(cells, start=1)]
    sys.modules[module.__name__] = module
    try:
        for code in codes:
            exec(code, module.__dict__)
    finally:
        del sys.modules[module.__name__]
    names = {key: value for key, value in vars(module).items() if not key.startswith("__")}
    return SimpleNamespace(**{key: value for key, value in names.items() if not isinstance(value, ModuleType)})


def _exported(lab: Lab, own: bool | str | os.PathLike[str] | None) -> tuple[Path, list[str]]:
    """The file that was read, and the texts of its code cells tagged `export`."""
    if own:
        path = lab.notebook if own is True else Path(own).expanduser()
        if not path.exists():
            raise UsageError(f"{path} does not exist; give the path of your own notebook: reuse({lab.name!r}, own=...)")
        return path, _tagged(path)
    if lab.source.exists():
        return lab.source, list(_tagged_in_source(lab.source, lab.source.stat().st_mtime_ns))
    if lab.solution.exists():
        return lab.solution, _tagged(lab.solution)
    raise UsageError(f"{lab.name} has no solution here; use your own notebook's code: reuse({lab.name!r}, own=True)")


@lru_cache
def _tagged_in_source(path: Path, changed: int) -> tuple[str, ...]:
    """Later labs ask for the same earlier ones again, and a source takes long to read. changed: when it was."""
    from shardlab.course.source import read_source, tags

    return tuple(c.source for c in read_source(path).cells if c.cell_type == "code" and "export" in tags(c))


def _tagged(path: Path) -> list[str]:
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        return [
            "".join(cell["source"])
            for cell in cells
            if cell["cell_type"] == "code" and "export" in cell["metadata"].get("tags", [])
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} cannot be read as a notebook") from error


def _compile(source: str, filename: str):  # type: ignore[no-untyped-def]
    """Compiled under a name that tracebacks and `inspect.getsource` find the text by."""
    # A modification time of None keeps linecache from looking for such a file and dropping the entry.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    try:
        return compile(source, filename, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise UsageError(f"{filename} is not plain Python, line {error.lineno}: {error.msg}") from error
