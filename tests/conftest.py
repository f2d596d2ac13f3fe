"""A small course of one lab, so that tests of the pipeline depend on no real lab."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardlab.course import build
from shardlab.course.find import Lab, find_lab

LAB = "90_tiny"
SOURCE = '''# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A tiny lab
#
# A formula: $\\\\frac{2(N-1)}{N} n$, and a list:
#
# - one
# - `two`

# %% tags=["parameters"]
WORLD_SIZE = 2
DEVICE = "auto"

# %%
# %matplotlib inline
print("ranks:", WORLD_SIZE)

# %% nbgrader={"grade": false, "grade_id": "add", "locked": false, "schema_version": 3, "solution": true, "task": false} tags=["export"]
import math


def add(a, b):
    """The sum."""
    ### BEGIN SOLUTION
    total_of_both = math.fsum([a, b])
    return total_of_both
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "add-check", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
assert add(1, 2) == 3
### BEGIN HIDDEN TESTS
assert add(10, -7) == 3
### END HIDDEN TESTS

# %% [markdown] nbgrader={"grade": true, "grade_id": "why", "locked": false, "points": 1, "schema_version": 3, "solution": true, "task": false}
# Because the secret answer is forty-two.

# %% tags=["export"]
SCALE = 10


def add_scaled(a, b):
    return SCALE * add(a, b)


# %%
add_scaled(1, 2)
'''.replace("\\\\", "\\")


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a course whose one lab has a source and no notebooks yet."""
    (tmp_path / "solutions").mkdir()
    (tmp_path / "labs").mkdir()
    (tmp_path / "solutions" / f"{LAB}.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.setenv("SHARDLAB_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="session")
def built_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A built course; tests copy it rather than execute a notebook each."""
    home = tmp_path_factory.mktemp("course")
    (home / "solutions").mkdir()
    (home / "solutions" / f"{LAB}.py").write_text(SOURCE, encoding="utf-8")
    assert not build.build(Lab(LAB, home)).problem
    return home


@pytest.fixture
def lab(course: Path, built_once: Path) -> Lab:
    """A lab whose notebooks are in step with its source."""
    found = find_lab(LAB)
    for name in ("source", "solution", "notebook"):
        getattr(found, name).write_bytes(getattr(Lab(LAB, built_once), name).read_bytes())
    return found


def rewrite(lab: Lab, old: str, new: str) -> None:
    """Changes the source as an editor would."""
    text = lab.source.read_text(encoding="utf-8")
    assert old in text
    lab.source.write_text(text.replace(old, new), encoding="utf-8")
