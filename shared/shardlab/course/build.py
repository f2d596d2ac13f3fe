"""From solutions/NN_name.py to solutions/NN_name.ipynb (executed) and labs/NN_name.ipynb (solutions cut).

What is compared, and what cannot be:
- A lab has no outputs, so a rebuild gives the same bytes, and `check` compares bytes.
- A solution has outputs with measured times, so two executions differ. `check`
  compares its cells (id, type, text, metadata) and the notebook's own metadata with the source, and asks that every
  cell was executed, in order, with no error and nothing on stderr.

Nothing an author or a learner wrote is lost: a generated notebook carries a hash of the cells it was built with, so
an edit made in it is told from an edit made in the source, and is never overwritten without being asked.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardlab.course.execute import execute
from shardlab.course.find import Lab
from shardlab.course.picture import picture_of
from shardlab.course.release import release
from shardlab.course.source import (
    as_node,
    fingerprint,
    in_normal_form,
    notebook_text,
    read_notebook,
    read_source,
    stamp,
    stamped,
    write_source,
)
from shardlab.errors import UsageError
from shardlab.widgets.saved import without_views


@dataclass(frozen=True)
class Built:
    """What `build` did for a lab: a few words, and what went wrong, if anything."""

    lab: Lab
    done: str
    problem: str = ""


def build(lab: Lab, *, force: bool = False, timeout: float = 600) -> Built:
    """Brings both notebooks of a lab in step with its source; executes only if the cells changed, or with `force`.

    Raises UsageError if the source is broken, or a notebook was edited by hand (see the module's text).
    """
    source = read_source_of(lab)
    existing = read_notebook(lab.solution) if lab.solution.exists() else None
    if existing is not None:
        refuse_lost_edit(lab, source, existing)
    released = notebook_text(release(source, lab.source.name))
    if not force:
        refuse_lost_work(lab)

    done = []
    if not in_normal_form(source, lab.source):
        write(lab.source, write_source(source, lab.source))
        done.append("source put in jupytext's own form")
    if force or existing is None or differences(source, existing) or execution_problems(existing):
        notebook = expected_solution(source)
        failed = execute(notebook, lab.home, lab.source.parent, timeout)
        if failed:
            return Built(lab, "", f"its solution does not run: {failed}")
        notebook.metadata = expected_solution(source).metadata
        without_views(notebook)  # a saved notebook has no kernel behind its widgets: their pictures stay
        problems = execution_problems(notebook)
        if problems:
            return Built(lab, "", problems[0])
        write(lab.solution, notebook_text(notebook))
        picture = picture_of(notebook)
        if picture is not None:
            write(lab.picture, picture)
        done.append("solution executed")
    if not lab.notebook.exists() or lab.notebook.read_text(encoding="utf-8") != released:
        write(lab.notebook, released)
        done.append("lab written")
    return Built(lab, ", ".join(done) or "unchanged")


def check(lab: Lab) -> list[str]:
    """What is not in step, one line each; writes and executes nothing."""
    source = read_source_of(lab)
    problems = []
    if not in_normal_form(source, lab.source):
        problems.append(f"solutions/{lab.source.name}: not in the form that jupytext writes")
    if not lab.solution.exists():
        problems.append(f"solutions/{lab.solution.name} is missing")
    else:
        notebook = read_notebook(lab.solution)
        found = differences(source, notebook) + execution_problems(notebook)
        problems += [f"solutions/{lab.solution.name}: {problem}" for problem in found]
        picture = picture_of(notebook)
        if picture is not None and (not lab.picture.exists() or lab.picture.read_text(encoding="utf-8") != picture):
            problems.append(f"shared/pictures/{lab.picture.name}: not what the solution shows")
    released = notebook_text(release(source, lab.source.name))
    if not lab.notebook.exists():
        problems.append(f"labs/{lab.notebook.name} is missing")
    elif lab.notebook.read_bytes() != released.encode():
        problems.append(f"labs/{lab.notebook.name}: not what the source gives")
    return problems


def take_from_notebook(lab: Lab) -> bool:
    """Writes the cells of solutions/NN_name.ipynb into the source. Returns whether that changed it."""
    if not lab.solution.exists():
        raise UsageError(f"solutions/{lab.solution.name} does not exist, so there is nothing to take from it")
    text = write_source(read_notebook(lab.solution), lab.source)
    if lab.source.exists() and lab.source.read_text(encoding="utf-8") == text:
        return False
    write(lab.source, text)
    return True


def take_from_source(lab: Lab) -> None:
    """Gives up edits made in solutions/NN_name.ipynb: the next `build` writes it anew from the source."""
    read_source_of(lab)
    lab.solution.unlink(missing_ok=True)


def read_source_of(lab: Lab) -> Any:
    """The lab's source as a notebook; UsageError when the lab has none."""
    if not lab.source.exists():
        raise UsageError(f"{lab.name} has no source: solutions/{lab.source.name} does not exist")
    return read_source(lab.source)


def expected_solution(source: Any) -> Any:
    """The solution notebook as it is before execution."""
    notebook = as_node(source)
    stamp(notebook)
    return notebook


def refuse_lost_edit(lab: Lab, source: Any, notebook: Any) -> None:
    """Raises UsageError if building would overwrite an edit that only the solution notebook has."""
    built, here, there = stamped(notebook), fingerprint(notebook), fingerprint(source)
    if here in (there, built):
        return
    take = f"run `python -m shardlab build --from-notebook {lab.name}` to take the notebook's cells into the .py"
    if built == there:
        raise UsageError(f"solutions/{lab.solution.name} was edited in the notebook; {take}")
    raise UsageError(
        f"solutions/{lab.name} was edited both in the .py and in the notebook; merge one into the other by hand, "
        f"or {take} (losing what only the .py has), or use --from-source to do the opposite"
    )


def refuse_lost_work(lab: Lab) -> None:
    """Raises UsageError if building would overwrite what somebody wrote into labs/NN_name.ipynb."""
    if not lab.notebook.exists():
        return
    notebook = read_notebook(lab.notebook)
    if stamped(notebook) != fingerprint(notebook):
        raise UsageError(
            f"labs/{lab.notebook.name} was edited by hand and would be overwritten; move it away, or use --force"
        )


def differences(source: Any, notebook: Any) -> list[str]:
    """How a solution notebook differs from its source, outputs aside; at most one line."""
    expected = expected_solution(source)
    for want, have in zip(expected.cells, notebook.cells, strict=False):
        for part in ("cell_type", "source", "metadata", "id"):
            if want.get(part) != have.get(part):
                return [f"cell {want.id}: its {part} differs from the source"]
    if len(expected.cells) != len(notebook.cells):
        return [f"{len(notebook.cells)} cells, the source has {len(expected.cells)}"]
    for key in sorted(set(expected.metadata) | set(notebook.metadata)):
        if expected.metadata.get(key) != notebook.metadata.get(key):
            return [f"the notebook's metadata {key!r} differs from what the source gives"]
    return []


def execution_problems(notebook: Any) -> list[str]:
    """Cells that were not executed, or out of order, or raised, or wrote to stderr. Empty cells do not count."""
    problems, count = [], 0
    for cell in notebook.cells:
        if cell.cell_type != "code" or not cell.source.strip():
            continue
        count += 1
        if cell.execution_count != count:
            problems.append(f"cell {cell.id}: execution count {cell.execution_count}, expected {count}")
        for output in cell.outputs:
            if output.output_type == "error":
                problems.append(f"cell {cell.id}: raised {output.ename}")
            elif output.output_type == "stream" and output.name == "stderr":
                problems.append(f"cell {cell.id}: wrote to stderr: {output.text.strip().splitlines()[-1:]}")
    return problems


def write(path: Path, text: str) -> None:
    """Writes a whole file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8", newline="\n")
    os.replace(new, path)
