"""Every notebook of the course: nbval, papermill, fresh labs stop at their first exercise, no answer given away."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import LAB
from shardlab.course import cli, run
from shardlab.course.build import build
from shardlab.course.find import Lab, find_lab, find_labs
from shardlab.course.kernel import kernel_environment
from shardlab.course.source import read_notebook, read_source, tags
from shardlab.errors import UsageError

HOME = Path(__file__).resolve().parents[1]
LABS = find_labs(HOME) if (HOME / "solutions").is_dir() else []
WORLD_SIZE = 2  # nbval runs every notebook at its own default; CI's matrix runs 2 and 4

each_lab = pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.name)
# `make run` puts every lab through papermill, at more world sizes; here a few show that it works.
QUICK = ("04_ring_all_reduce", "08_zero3")
by_papermill = [pytest.param(lab, marks=[] if lab.name in QUICK else [pytest.mark.thorough]) for lab in LABS]


def nbval(notebook: Path, home: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """nbval as its own pytest, on this interpreter, without this project's configuration."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    options = ["--nbval-lax", "--nbval-current-env", "--nbval-cell-timeout", "300", "-p", "no:cacheprovider"]
    environment = {**os.environ, **kernel_environment(home, str(folder / "ipython"), folder / "ledger.json")}
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(folder / "pytest.ini"), *options, str(notebook)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=600)


def answers(lab: Lab) -> Iterator[str]:
    """Lines that only a solution holds: of solution regions, hidden tests and answers in words."""
    inside, outside = [], ""
    for cell in read_source(lab.source).cells:
        grading = cell.metadata.get("nbgrader", {})
        whole = grading.get("solution") and "BEGIN SOLUTION" not in cell.source
        hidden = False
        for line in cell.source.splitlines():
            if re.search(r"BEGIN (SOLUTION|HIDDEN TESTS)", line):
                hidden = True
            elif re.search(r"END (SOLUTION|HIDDEN TESTS)", line):
                hidden = False
            elif whole or hidden:
                inside.append(line.strip())
            else:
                outside += line + "\n"
    return (line for line in inside if len(line) > 12 and line not in outside)


@each_lab
@pytest.mark.timeout(600)
def test_solution_under_nbval(lab: Lab, tmp_path: Path) -> None:
    done = nbval(lab.solution, HOME, tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.parametrize("lab", by_papermill, ids=lambda lab: lab.name)
@pytest.mark.timeout(600)
def test_solution_under_papermill(lab: Lab, tmp_path: Path) -> None:
    result = run.run(lab, WORLD_SIZE, "auto", tmp_path)
    assert result.ok, result.note
    assert result.world_size == WORLD_SIZE, "a lab has a parameters cell with WORLD_SIZE"
    assert {"WORLD_SIZE", "DEVICE", "SEED"} <= run.parameters_of(read_source(lab.source))


@each_lab
@pytest.mark.timeout(600)
def test_fresh_lab_stops_at_its_first_exercise(lab: Lab, tmp_path: Path) -> None:
    result = run.run(lab, WORLD_SIZE, "auto", tmp_path, unsolved=True)
    assert result.ok, result.note
    cells = read_notebook(lab.notebook).cells
    graded = [cell for cell in cells if cell.cell_type == "code" and cell.metadata.get("nbgrader", {}).get("grade")]
    assert result.note == f"stops at {graded[0].id}, not written yet"


@each_lab
def test_lab_gives_no_answer_away(lab: Lab) -> None:
    text = "\n".join(cell.source for cell in read_notebook(lab.notebook).cells)
    found = list(answers(lab))
    assert found, "a lab has something to solve"
    assert [line for line in found if line in text] == []
    raw = json.loads(lab.notebook.read_text())
    assert set(raw["metadata"]) == {"kernelspec", "language_info", "shardlab"}
    assert not [cell for cell in raw["cells"] if cell.get("outputs") or cell.get("attachments")]


@each_lab
def test_lab_cells_are_locked_and_graded(lab: Lab) -> None:
    """What a learner writes can be edited and not deleted; what grades it can be neither; every check has points."""
    for cell in read_notebook(lab.notebook).cells:
        grading = cell.metadata.get("nbgrader")
        if grading is None:
            assert cell.cell_type != "code" or "check(" not in cell.source, f"{cell.id} checks, but is not graded"
            continue
        assert cell.id == grading["grade_id"]
        assert cell.metadata.get("deletable") is False, cell.id
        assert cell.metadata.get("editable", True) == grading["solution"], cell.id
        assert not grading["grade"] or grading["points"] > 0, cell.id


@each_lab
def test_exports_need_nothing_else(lab: Lab, tmp_path: Path) -> None:
    """In a fresh interpreter, as a later lab would."""
    if not any("export" in tags(cell) for cell in read_source(lab.source).cells):
        pytest.skip("exports nothing")
    code = f"from shardlab import reuse; assert vars(reuse({lab.name!r}))"
    environment = {**os.environ, **kernel_environment(HOME, "", tmp_path / "ledger.json")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")


# That these instruments can fail, on the tiny course.


def test_nbval_sees_a_changed_output_and_a_failing_cell(course: Path, tmp_path: Path) -> None:
    lab = find_lab(LAB)
    lab.source.write_text(lab.source.read_text() + "\n# %%\n# NBVAL_CHECK_OUTPUT\nprint(add(1, 1))\n")
    assert not build(lab).problem
    assert nbval(lab.solution, course, tmp_path).returncode == 0
    good = lab.solution.read_text()
    lab.solution.write_text(good.replace('"2.0\\n"', '"3.0\\n"'))
    done = nbval(lab.solution, course, tmp_path)
    assert done.returncode == 1 and "1 failed" in done.stdout
    lab.solution.write_text(good.replace("print(add(1, 1))", "print(add(1, None))"))
    assert nbval(lab.solution, course, tmp_path).returncode == 1


def test_run_ends_in_a_table(course: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--world-size", "2", "3", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()[-4:]
    assert lines[0].split() == ["lab", "world", "size", "device", "seconds", "result"]
    assert [line.split()[:3] + line.split()[4:] for line in lines[2:]] == [
        [LAB, "2", "cpu", "ok"],
        [LAB, "3", "cpu", "ok"],
    ]
    kept = read_notebook(course / "out" / f"{LAB}-ws3.ipynb")
    assert "ranks: 3\n" in [
        output.text for cell in kept.cells for output in cell.get("outputs", []) if "text" in output
    ]


def test_run_runs_this_interpreter(course: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever kernel called python3 the person has installed."""
    spec = tmp_path / "share" / "kernels" / "python3"
    spec.mkdir(parents=True)
    (spec / "kernel.json").write_text(json.dumps({"argv": ["/bin/false"], "display_name": "x", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share"))
    lab = find_lab(LAB)
    lab.source.write_text(lab.source.read_text() + "\n# %%\nimport sys\n\nprint(sys.executable)\n")
    assert run.run(lab, 2, "cpu", tmp_path / "out").ok
    assert sys.executable in (tmp_path / "out" / f"{LAB}-ws2.ipynb").read_text()


def test_run_tells_the_cell_and_the_error(course: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab = find_lab(LAB)
    lab.source.write_text(lab.source.read_text().replace("add(1, 2) == 3", "add(1, 2) == 4"))
    assert cli.main(["run", "--world-size", "2"]) == 1
    out = capsys.readouterr().out
    assert "failed: cell add-check (assert add(1, 2) == 4): AssertionError" in out
    assert f"kept in {course / 'out' / f'{LAB}-ws2.ipynb'}" in out and out.splitlines()[-1].endswith("failed")


def test_run_stops_a_notebook_that_takes_too_long(course: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab = find_lab(LAB)
    lab.source.write_text(lab.source.read_text() + "\n# %%\nimport time\n\ntime.sleep(100)\n")
    assert cli.main(["run", "--timeout", "8"]) == 1
    assert "(import time): not done after 8 s" in capsys.readouterr().out


def test_run_without_a_world_size_runs_once(course: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab = find_lab(LAB)
    lab.source.write_text(lab.source.read_text().replace('tags=["parameters"]', ""))
    assert cli.main(["run", "--world-size", "2", "3"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[:3] == [LAB, "-", "-"]
    assert (course / "out" / f"{LAB}.ipynb").exists()


def test_unsolved_lab_must_stop_and_for_the_right_reason(course: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab = find_lab(LAB)
    assert not build(lab).problem
    assert cli.main(["run", "--unsolved"]) == 0
    assert "stops at add-check, not written yet" in capsys.readouterr().out
    fresh = lab.notebook.read_text()
    stub = r"raise NotImplementedError(\"not written yet\")"
    lab.notebook.write_text(fresh.replace(stub, "return 3"))
    assert cli.main(["run", "--unsolved"]) == 1
    assert "ran to its end, although nothing is solved" in capsys.readouterr().out
    lab.notebook.write_text(fresh.replace(stub, "return 4"))
    assert cli.main(["run", "--unsolved"]) == 1
    assert "failed: cell add-check (assert add(1, 2) == 3): AssertionError" in capsys.readouterr().out


def test_answers_are_found(course: Path) -> None:
    lab = find_lab(LAB)
    assert list(answers(lab)) == [
        "total_of_both = math.fsum([a, b])",
        "return total_of_both",
        "assert add(10, -7) == 3",
        "Because the secret answer is forty-two.",
    ]
    assert not build(lab).problem
    assert not [line for line in answers(lab) if line in lab.notebook.read_text()]
    assert [line for line in answers(lab) if line in lab.solution.read_text()]


def test_a_lab_without_a_source_cannot_be_run(course: Path) -> None:
    lab = find_lab(LAB)
    lab.source.rename(course / "elsewhere.py")
    with pytest.raises(UsageError, match="has no source"):
        run.run(lab, 2, "cpu", course / "out")
