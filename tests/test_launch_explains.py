"""Misunderstandings are explained; large and odd output is borne."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from launching import fault, nothing_left, sum_of_ranks
from shardlab import launch
from shardlab.errors import UsageError

cloudpickle.register_pickle_by_value(sys.modules[__name__])


# Misunderstandings are explained


def test_launch_inside_a_rank_is_refused() -> None:
    error = fault("raised", lambda: launch(sum_of_ranks, 2), 2)
    assert error.exception_type == "UsageError" and "inside a rank" in error.report


def test_init_process_group_inside_a_rank() -> None:
    error = fault("raised", lambda: dist.init_process_group("gloo"), 2)
    assert "launch has called init_process_group" in error.report


@pytest.fixture
def group_in_the_notebook(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_init_process_group_in_the_notebook(group_in_the_notebook: None) -> None:
    with pytest.raises(UsageError, match="destroy_process_group"):
        launch(sum_of_ranks)
    dist.destroy_process_group()
    assert launch(sum_of_ranks).results == [1.0, 1.0]


def test_a_captured_group_or_wrapped_model(group_in_the_notebook: None) -> None:
    group = dist.group.WORLD
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    holder = {"deep": [model]}
    dist.destroy_process_group()
    for fn, says in (
        (lambda: dist.all_reduce(torch.ones(1), group=group), "process group belongs to one process"),
        (lambda: model(torch.ones(1, 2)), "Wrap the model inside the function"),
        (lambda: holder["deep"][0](torch.ones(1, 2)), "Wrap the model inside the function"),
    ):
        with nothing_left(), pytest.raises(UsageError, match=says) as caught:
            launch(fn)
        assert len(str(caught.value).splitlines()) == 1


def generator() -> object:
    return (i for i in range(3))


@pytest.mark.parametrize("make", [generator, socket.socket, sys._getframe])
def test_what_cannot_travel_is_named(make: Callable) -> None:
    thing = make()
    with nothing_left(), pytest.raises(UsageError, match="'thing'.*cannot be sent to the ranks.*reate it inside"):
        launch(lambda: thing)
    with nothing_left(), pytest.raises(UsageError, match="argument 0.*cannot be sent to the ranks"):
        launch(lambda it: it, 2, (make(),))


def test_a_result_that_cannot_travel() -> None:
    error = fault("raised", lambda: (i for i in range(3)), 2)
    assert "returned a generator, which cannot be sent back" in error.report


# Large and odd output


def test_500_mb_result() -> None:
    with nothing_left():
        result = launch(lambda: torch.full((125_000_000,), 3.0), 1, meter=False).results[0]
    assert result.numel() == 125_000_000 and result[0] == result[-1] == 3


def test_100_mb_of_output_is_kept_bounded_and_said_so(capfd: pytest.CaptureFixture) -> None:
    def floods() -> str:
        line = "x" * 999 + "\n"
        for _ in range(100):
            sys.stdout.write(line * 1000)
        return "done"

    with nothing_left():
        assert launch(floods, 1).results == ["done"]
    out = capfd.readouterr().out
    assert len(out) < 300_000 and "more bytes of output are not shown" in out


def test_1_mib_without_a_line_end(capfd: pytest.CaptureFixture) -> None:
    def one_line() -> None:
        os.write(1, b"y" * (1 << 20))
        os.write(2, b"z" * (1 << 20))

    with nothing_left():
        launch(one_line, 1)
    out, err = capfd.readouterr()
    assert 100_000 < len(out) < 300_000 and "more bytes of output are not shown" in out
    assert "z" not in out and err == ""


def test_progress_bars_show_their_last_state(capfd: pytest.CaptureFixture) -> None:
    def bar() -> None:
        for percent in range(101):
            sys.stderr.write(f"\r{percent}%")
        sys.stderr.write("\n")

    launch(bar, 1)
    assert capfd.readouterr().out.splitlines()[-1] == "[rank 0] 100%"


def test_bytes_that_are_no_text(capfd: pytest.CaptureFixture) -> None:
    launch(lambda: os.write(1, b"\xff\xfe\n") and None, 1)
    assert "[rank 0] \ufffd\ufffd" in capfd.readouterr().out
