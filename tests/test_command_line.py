"""The command line: bad input, a broken source and a missing tool are one clear line on stderr and exit code 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import LAB, rewrite
from shardlab.course import cli
from shardlab.course.find import Lab


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("def add(a, b):", "def add(a, b:", "cell add is not valid Python"),
        ("    ### END SOLUTION\n", "", "no end solution statement found"),
        ("### END HIDDEN TESTS\n", "", "No end hidden tests statement found"),
        ('"grade_id": "add-check"', '"grade_id": "add"', "grade_id 'add' is used by two cells"),
        ('"grade_id": "add-check"', '"grade_id": "add check"', "must be 1 to 64 letters"),
        ('"locked": true, ', "", "lacks locked"),
        ('"points": 2, ', "", "does not have points"),
        ("SCALE = 10", "### BEGIN SOLUTION\nSCALE = 10\n### END SOLUTION", "non-solution cell"),
    ],
)
def test_a_broken_source_is_one_clear_line(
    lab: Lab, capsys: pytest.CaptureFixture[str], old: str, new: str, said: str
) -> None:
    rewrite(lab, old, new)
    for arguments in (["build"], ["build", "--check"]):
        assert cli.main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"shardlab: {LAB}.py: ") and said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["build", "90_tini"], "no lab called '90_tini'; did you mean '90_tiny'?"),
        (["run", "nothing_like_it"], "there are: 90_tiny"),
        (["run", "--world-size", "0"], "a world size is a whole number of ranks, 1 or more, not '0'"),
        (["run", "--world-size", "2", "x"], "not 'x'"),
        (["run", "--world-size"], "expected at least one argument"),
        (["run", "--timeout", "-1"], "not '-1'"),
        (["run", "--device", "tpu"], "invalid choice: 'tpu'"),
        (["build", "--from-notebook"], "--from-notebook needs the name of a lab"),
        (["build", "--check", "--from-source", "90"], "exclude each other"),
        (["build", "--from-notebook", "90"], "nothing to take from it"),
        (["run", "--unsolved", "90"], f"labs/{LAB}.ipynb does not exist"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        ([], "arguments are required: COMMAND"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    course: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert cli.main(arguments) == 2
    out, error = capsys.readouterr()
    assert error.startswith("shardlab: ") and said in error and error.count("\n") == 1


def test_from_a_shell_there_is_no_traceback(course: Path) -> None:
    command = [sys.executable, "-m", "shardlab", "run", "--world-size", "0"]
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("shardlab: ")


@pytest.mark.parametrize(("tool", "command"), [("nbgrader", "build"), ("papermill", "run"), ("jupytext", "build")])
def test_a_missing_tool_is_named(
    course: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tool: str, command: str
) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] == tool]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, tool, None)
    assert cli.main([command]) == 2
    error = capsys.readouterr().err
    assert f"needs {tool}, which is not installed; try: pip install -r requirements-dev.txt" in error


def test_no_course_and_a_wrong_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHARDLAB_HOME", str(tmp_path / "nowhere"))
    assert cli.main(["list"]) == 2
    assert "which has no solutions/ or labs/ folder" in capsys.readouterr().err


def test_list_names_labs_and_titles(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    assert capsys.readouterr().out == f"{LAB}  A tiny lab\n"
    lab.source.unlink()
    assert cli.main(["list"]) == 0
    assert capsys.readouterr().out == f"{LAB}  A tiny lab\n", "a learner's copy has labs/ alone"


def test_the_command_line_starts_fast() -> None:
    """`list` and `--help` must not import torch, jupytext or nbgrader."""
    code = "import sys, shardlab.course.cli as c; c.parser(); print(sorted({'torch', 'jupytext'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout == "[]\n", done.stderr
