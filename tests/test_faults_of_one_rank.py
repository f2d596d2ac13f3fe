"""One rank ends early: it raises, exits, is killed. The cause is named, nothing is left, the next launch is right."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from launching import fault, line_of, nothing_left
from shardlab import launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])


# One rank ends early


def raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("seen")
    dist.barrier()


def test_a_raise_is_blamed_not_those_who_wait() -> None:
    error = fault("raised", raises)
    assert (error.rank, error.exception_type, error.exception_message) == (1, "ValueError", "seen")
    assert error.report.startswith("Rank 1 raised ValueError: seen")
    assert line_of(raises, 'ValueError("seen")') in error.report
    assert "ranks 0 and 2 were waiting in barrier for rank 1" in error.report
    assert line_of(raises, "barrier") in error.report


def raises_from() -> None:
    try:
        {}["key"]
    except KeyError as error:
        raise RuntimeError("no such thing") from error


def test_the_exception_behind_an_exception_is_named() -> None:
    assert "caused by KeyError: 'key'" in fault("raised", raises_from, 2).report


class Loud(BaseException):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def raises_unprintable() -> None:
    raise Loud


def test_an_exception_without_a_text() -> None:
    assert fault("raised", raises_unprintable, 2).exception_type == "Loud"


def exits(code: object) -> None:
    if dist.get_rank() == 1:
        sys.exit(code)  # type: ignore[arg-type]
    dist.barrier()


@pytest.mark.parametrize(("code", "said"), [(0, "0"), (3, "3"), (None, "0"), ("stop", "stop")])
def test_sys_exit(code: object, said: str) -> None:
    error = fault("exited", exits, 3, code)
    assert error.rank == 1 and f"sys.exit({said})" in error.report
    assert line_of(exits, "sys.exit") in error.report and "Return from the function" in error.report


def leaves(code: int) -> None:
    if dist.get_rank() == 1:
        os._exit(code)
    dist.barrier()


@pytest.mark.parametrize("code", [0, 7])
def test_os_exit(code: int) -> None:
    error = fault("died", leaves, 3, code)
    assert error.rank == 1 and f"exit code {code}" in error.report and "os._exit" in error.report


def dies(number: int) -> None:
    dist.all_reduce(torch.ones(5))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), number)
        time.sleep(100)
    dist.barrier()


@pytest.mark.parametrize(
    ("number", "meaning"),
    [
        (signal.SIGKILL, "memory ran out"),
        (signal.SIGSEGV, "native code"),
        (signal.SIGABRT, "different sizes"),
        (signal.SIGBUS, "/dev/shm"),
        (signal.SIGTERM, "asked it to stop"),
    ],
)
def test_death_by_signal(number: signal.Signals, meaning: str) -> None:
    error = fault("died", dies, 3, number)
    assert (
        error.rank == 1 and error.report.startswith(f"Rank 1 was ended by {number.name}.") and meaning in error.report
    )
    assert "its last call was all_reduce (5 float32)" in error.report
    assert [standing.doing for standing in error.ranks][1] == "died"


def test_all_ranks_die_at_once() -> None:
    def all_die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    assert "SIGKILL" in fault("died", all_die).report


def dies_with_children() -> None:
    subprocess.Popen(["sleep", "1000"])
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_what_a_dead_rank_had_started_ends_too() -> None:
    fault("died", dies_with_children, 2)


def test_what_a_finished_rank_had_started_ends_too() -> None:
    with nothing_left():
        launch(lambda: subprocess.Popen(["sleep", "1000"]).pid, 2)


# Data loaders


class Squares(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index * index


def loads(method: str | None) -> list[int]:
    loader = torch.utils.data.DataLoader(
        Squares(), batch_size=4, num_workers=2, multiprocessing_context=method, persistent_workers=True
    )
    total = [int(batch.sum()) for batch in loader]
    dist.all_reduce(torch.ones(2))
    return total


@pytest.mark.parametrize("method", [None, "fork"])
def test_data_loader_with_workers(method: str | None) -> None:
    with nothing_left():
        assert launch(loads, 2, (method,)).results == [[14, 126]] * 2


def test_data_loader_workers_end_with_their_rank() -> None:
    def loads_and_dies() -> None:
        iterator = iter(torch.utils.data.DataLoader(Squares(), num_workers=2, persistent_workers=True))
        next(iterator)
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    fault("died", loads_and_dies, 2)
