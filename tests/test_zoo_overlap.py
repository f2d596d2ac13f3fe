"""The checks of lab 05 against the zoo: wrong engines and plans are rejected for their reason, right ones pass."""

from __future__ import annotations

import re

import pytest

from shardlab.checks import check
from shardlab.errors import CheckFailed
from zoo import Specimen, specimens

ZOO = specimens("05")
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


def test_the_zoo_is_large_enough() -> None:
    for name in ("plan_buckets", "DistributedDataParallel"):
        assert sum(specimen.exercise == f"05.{name}" for specimen in wrong) >= 15
        assert sum(specimen.exercise == f"05.{name}" for specimen in right) >= 7
