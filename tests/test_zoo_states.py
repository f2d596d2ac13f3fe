"""The checks of lab 01 against the zoo: wrong counts and engines are rejected for the right reason, right ones pass."""

from __future__ import annotations

import re

import pytest

from shardlab.checks import check
from shardlab.errors import CheckFailed
from zoo import Specimen, specimens
from zoo.states_engine import Engine

ZOO = specimens("01")
MOST_LINES = 5
MOST_COLUMNS = 400

wrong = [specimen for specimen in ZOO if specimen.wrong]
right = [specimen for specimen in ZOO if not specimen.wrong]


def named(specimen: Specimen) -> str:
    return f"{specimen.exercise.partition('.')[2]}-{specimen.name}"


@pytest.mark.parametrize("specimen", wrong, ids=named)
def test_wrong_is_rejected_for_its_reason(specimen: Specimen, capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(CheckFailed) as failed:
        check(specimen.exercise, specimen.solution)
    message = str(failed.value)
    assert re.fullmatch(specimen.reason, failed.value.reason), f"{specimen.about}\n{message}"
    assert re.search(specimen.says, message), f"{specimen.about}\n{message}"
    assert len(message.splitlines()) <= MOST_LINES, message
    assert all(len(line) <= MOST_COLUMNS for line in message.splitlines()), message
    out, err = capfd.readouterr()
    assert "right" not in out
    assert err == ""


@pytest.mark.parametrize("specimen", right, ids=named)
def test_right_passes(specimen: Specimen, capfd: pytest.CaptureFixture) -> None:
    check(specimen.exercise, specimen.solution)
    out, err = capfd.readouterr()
    assert out.startswith(f"{specimen.exercise}: right\n")
    assert err == ""


def test_an_engine_instead_of_its_class() -> None:
    with pytest.raises(CheckFailed, match=r"(?s)signature.*object of type Engine.*the class itself"):
        check("01.MixedPrecisionAdam", Engine([]))  # type: ignore[arg-type]


def test_the_zoo_is_large_enough() -> None:
    for exercise, least_wrong, least_right in (("01.model_state_bytes", 20, 5), ("01.MixedPrecisionAdam", 60, 15)):
        assert sum(specimen.exercise == exercise for specimen in wrong) >= least_wrong
        assert sum(specimen.exercise == exercise for specimen in right) >= least_right
