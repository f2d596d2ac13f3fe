"""The checks of lab 03 against the zoo: every wrong one is rejected for the right reason, every right one passes."""

from __future__ import annotations

import re

import pytest

from shardlab.checks import check, observe
from shardlab.errors import CheckFailed
from zoo import Specimen, specimens

ZOO = specimens("03")
MOST_LINES = 5
MOST_COLUMNS = 400

wrong = [specimen for specimen in ZOO if specimen.wrong]
right = [specimen for specimen in ZOO if not specimen.wrong]


def named(specimen: Specimen) -> str:
    return f"{specimen.exercise.partition('.')[2]}-{specimen.name}"


@pytest.mark.parametrize("specimen", wrong, ids=named)
def test_wrong_is_rejected_for_its_reason(
    specimen: Specimen, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe, "TIMEOUT", specimen.patience or observe.TIMEOUT)
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
    for name in ("broadcast_parameters", "average_gradients", "average_gradients_flat", "shard_indices"):
        assert sum(specimen.exercise == f"03.{name}" for specimen in wrong) >= 15
        assert sum(specimen.exercise == f"03.{name}" for specimen in right) >= 7
