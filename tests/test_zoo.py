"""The checks of all labs against the zoo: each wrong solution is rejected for its reason, each right one passes."""

from __future__ import annotations

import re

import pytest

from shardlab.checks import check, exercises, observe
from shardlab.errors import CheckFailed
from zoo import MODULES, Specimen, specimens

ZOO = [specimen for lab in sorted(MODULES) for specimen in specimens(lab)]
MOST_LINES = 5
MOST_COLUMNS = 400
LEAST = {  # of wrong and of right ones
    "00.pass_the_token": (40, 10),
    "00.broadcast": (40, 10),
    "01.model_state_bytes": (20, 5),
    "01.MixedPrecisionAdam": (60, 15),
    "02.scatter": (12, 6),
    "02.gather": (12, 5),
    "02.DataParallel": (50, 15),
    "03.broadcast_parameters": (15, 7),
    "03.average_gradients": (15, 7),
    "03.average_gradients_flat": (15, 7),
    "03.shard_indices": (15, 7),
    "04.ring_reduce_scatter": (30, 14),
    "04.ring_all_gather": (30, 14),
    "04.ring_all_reduce": (30, 14),
    "05.plan_buckets": (15, 7),
    "05.DistributedDataParallel": (15, 7),
    "06.partition": (10, 5),
    "06.Zero1": (20, 8),
    "07.Zero2": (20, 8),
    "08.Zero3": (20, 8),
}

wrong = [specimen for specimen in ZOO if specimen.wrong]
right = [specimen for specimen in ZOO if not specimen.wrong]


def named(specimen: Specimen) -> str:
    return f"{specimen.exercise}-{specimen.name}"


def marked(specimens: list[Specimen]) -> list:
    return [pytest.param(each, marks=[pytest.mark.thorough] if each.thorough else []) for each in specimens]


@pytest.mark.parametrize("specimen", marked(wrong), ids=named)
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


@pytest.mark.parametrize("specimen", marked(right), ids=named)
def test_right_passes(specimen: Specimen, capfd: pytest.CaptureFixture) -> None:
    check(specimen.exercise, specimen.solution)
    out, err = capfd.readouterr()
    assert out.startswith(f"{specimen.exercise}: right\n")
    assert err == ""


def test_the_zoo_is_large_enough() -> None:
    assert set(LEAST) == {exercise.id for exercise in exercises()}
    for exercise, (bad, good) in LEAST.items():
        assert sum(specimen.exercise == exercise for specimen in wrong) >= bad, exercise
        assert sum(specimen.exercise == exercise for specimen in right) >= good, exercise
