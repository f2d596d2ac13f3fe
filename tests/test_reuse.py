"""`reuse`: an earlier lab's code, for a later one."""

from __future__ import annotations

import inspect
import subprocess
import sys
import traceback
from pathlib import Path

import cloudpickle
import pytest

from conftest import LAB
from shardlab.course import reuse
from shardlab.course.build import build
from shardlab.course.find import find_lab
from shardlab.errors import UsageError


def add_cell(course: Path, text: str) -> None:
    """Appends a cell tagged `export` to the source."""
    source = course / "solutions" / f"{LAB}.py"
    source.write_text(source.read_text() + f'\n# %% tags=["export"]\n{text}\n')


def test_solution_by_name_and_number(course: Path) -> None:
    for name in (LAB, "90", f"solutions/{LAB}.py"):
        ring = reuse(name)
        assert ring.add(1, 2) == 3 and ring.add_scaled(1, 2) == 30
        assert sorted(vars(ring)) == ["SCALE", "add", "add_scaled"], "what the cells define, not what they import"


def test_only_exported_cells_run(course: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reuse(LAB)
    assert capsys.readouterr().out == ""


def test_each_call_gives_a_fresh_copy(course: Path) -> None:
    assert reuse(LAB).add is not reuse(LAB).add


def test_own_notebook_raises_only_when_called(course: Path) -> None:
    assert not build(find_lab(LAB)).problem
    ring = reuse(LAB, own=True)
    with pytest.raises(NotImplementedError, match="not written yet"):
        ring.add_scaled(1, 2)
    mine = course / "mine.ipynb"
    text = find_lab(LAB).notebook.read_text().replace(r"raise NotImplementedError(\"not written yet\")", "return 7")
    mine.write_text(text)
    assert reuse(LAB, own=mine).add_scaled(1, 2) == reuse(LAB, own=str(mine)).add_scaled(1, 2) == 70


def test_a_learners_copy_without_solutions(course: Path) -> None:
    assert not build(find_lab(LAB)).problem
    find_lab(LAB).source.unlink()
    assert reuse(LAB).add(1, 2) == 3, "the executed solution will do"
    find_lab(LAB).solution.unlink()
    with pytest.raises(UsageError, match=r"has no solution here; .*own=True"):
        reuse(LAB)
    assert reuse(LAB, own=True).SCALE == 10


def test_traceback_and_getsource_show_the_cell(course: Path) -> None:
    ring = reuse(LAB)
    try:
        ring.add_scaled(1, "two")
    except TypeError:
        text = traceback.format_exc()
    assert f'File "<{LAB} export cell 2>", line 5, in add_scaled\n    return SCALE * add(a, b)' in text
    assert f'File "<{LAB} export cell 1>"' in text and "total_of_both = math.fsum([a, b])" in text
    assert inspect.getsource(ring.add_scaled) == "def add_scaled(a, b):\n    return SCALE * add(a, b)"


DATACLASS = """
from __future__ import annotations

from dataclasses import dataclass


class Base:
    def value(self):
        return 1


@dataclass
class Derived(Base):
    extra: int = 2

    def value(self):
        return super().value() + self.extra
"""


def test_functions_and_classes_travel_by_value(course: Path, tmp_path: Path) -> None:
    """To a process that has no course and no shardlab."""
    add_cell(course, DATACLASS)
    ring = reuse(LAB)
    assert ring.Derived(3).value() == 4
    file = tmp_path / "pickled"
    file.write_bytes(cloudpickle.dumps((ring.add_scaled, ring.Derived)))
    code = "import pickle, sys; f, c = pickle.load(open(sys.argv[1], 'rb')); print(f(1, 2), c(5).value(), c(extra=1))"
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, timeout=60, env={})
    assert done.stdout == "30.0 6 Derived(extra=1)\n", done.stderr
    assert f"{LAB} exports" not in sys.modules


def test_unknown_lab_names_the_closest(course: Path) -> None:
    with pytest.raises(UsageError, match="did you mean '90_tiny'"):
        reuse("90_teeny")


def test_nothing_exported(course: Path) -> None:
    source = find_lab(LAB).source
    source.write_text(source.read_text().replace('tags=["export"]', ""))
    with pytest.raises(UsageError, match="exports nothing: tag the cells"):
        reuse(LAB)


def test_no_notebook_of_ones_own(course: Path) -> None:
    with pytest.raises(UsageError, match="does not exist; give the path of your own notebook"):
        reuse(LAB, own=True)
    with pytest.raises(UsageError, match="nowhere.ipynb does not exist"):
        reuse(LAB, own="nowhere.ipynb")
    (course / "broken.ipynb").write_text("{")
    with pytest.raises(UsageError, match="cannot be read as a notebook"):
        reuse(LAB, own=course / "broken.ipynb")


def test_magic_in_an_exported_cell(course: Path) -> None:
    add_cell(course, "# %matplotlib inline")
    with pytest.raises(UsageError, match="<90_tiny export cell 3> is not plain Python, line 1"):
        reuse(LAB)


def test_an_exported_cell_that_raises_keeps_its_own_error(course: Path) -> None:
    add_cell(course, "WORLD_SIZE + 1")
    with pytest.raises(NameError, match="WORLD_SIZE"):
        reuse(LAB)
    assert f"{LAB} exports" not in sys.modules
