"""Checks of lab 02 beside the zoo: what is printed, loops without end, and waiting for other replicas."""

from __future__ import annotations

import pytest

from shardlab.checks import check, device_trial, device_watch
from shardlab.errors import CheckFailed


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
