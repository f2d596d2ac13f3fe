"""The checks of lab 02 against the zoo: each wrong solution is rejected for its reason, each right one passes."""

from __future__ import annotations

import re

import pytest

from shardlab.checks import check, device_trial, device_watch, observe
from shardlab.errors import CheckFailed
from zoo import Specimen, specimens

ZOO = specimens("02")
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
    least = {"02.scatter": (12, 6), "02.gather": (12, 5), "02.DataParallel": (50, 15)}
    for exercise, (bad, good) in least.items():
        assert sum(specimen.exercise == exercise for specimen in wrong) >= bad
        assert sum(specimen.exercise == exercise for specimen in right) >= good


def test_what_a_solution_prints_is_shown_with_its_failure_only(capfd: pytest.CaptureFixture) -> None:
    def talks(pieces, device):
        print("pieces:", len(pieces))
        return pieces

    with pytest.raises(CheckFailed) as failed:
        check("02.gather", talks)
    assert failed.value.__notes__ == ["your function printed:\n  pieces: 2"]
    assert capfd.readouterr().out == ""


def test_a_loop_that_goes_on_working_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(pieces, device):
        whole = pieces[0]
        while len(whole):
            whole = whole + 1

    monkeypatch.setattr(device_trial, "LONGEST", 1.0)
    with pytest.raises(CheckFailed, match="1 s and still not done(.|\n)*whole") as failed:
        check("02.gather", endless)
    assert failed.value.reason == "hang"


def test_a_replica_that_waits_for_the_others_gives_up_once() -> None:
    meeting = device_watch.Meeting(2)
    device_watch.PATIENCE, before = 0.01, device_watch.PATIENCE
    try:
        meeting.arrive()
        meeting.arrive()
    finally:
        device_watch.PATIENCE = before
    assert (meeting.met, meeting.given_up, meeting.most) == (False, True, 1)
