"""Nothing moves, or ranks wait for each other in vain. No test compares wall times on a busy machine."""

from __future__ import annotations

import re
import signal
import sys
import threading
import time
from collections.abc import Callable

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from launching import fault, line_of
from shardlab import launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])


# Nothing moves


def spins() -> None:
    while dist.get_rank() == 0:
        pass
    dist.barrier()


def sleeps() -> None:
    if dist.get_rank() == 0:
        time.sleep(1000)
    dist.barrier()


def ignores_signals() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if dist.get_rank() == 0:
        time.sleep(1000)
    dist.barrier()


@pytest.mark.parametrize(
    ("fn", "line"),
    [(spins, "pass"), (sleeps, "time.sleep"), (ignores_signals, "time.sleep")],
)
def test_nothing_moves(fn: Callable, line: str) -> None:
    error = fault("timeout", fn, timeout=1.5)
    assert error.rank == 0 and "Nothing moved for 1.5 s" in error.report and "larger timeout" in error.report
    number = int(line_of(fn, line).rpartition(" ")[2])
    assert any(f"line {near}:" in error.report for near in (number, number - 1)), error.report
    assert "ranks 1 and 2 were waiting in barrier for rank 0" in error.report


def test_progress_is_never_cut_off() -> None:
    def slow(seconds: float) -> str:
        end = time.monotonic() + seconds
        x = torch.ones(4)
        while time.monotonic() < end and dist.get_rank() == 0:
            x = x * 1.0  # an operation of torch is progress
            time.sleep(0.05)
        dist.barrier()
        return "done"

    assert launch(slow, 2, (3.0,), timeout=1).results == ["done"] * 2


def test_output_is_progress() -> None:
    def prints() -> str:
        for _ in range(10):
            print(".", flush=True)
            time.sleep(0.25)
        return "done"

    assert launch(prints, 1, timeout=1, meter=False).results == ["done"]


def test_waiting_for_a_slow_rank_is_no_deadlock() -> None:
    def late() -> float:
        x = torch.ones(2)
        if dist.get_rank() == 0:
            time.sleep(2.5)
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
        dist.barrier()
        return x.sum().item()

    assert launch(late, 2).results == [2.0, 2.0]


def test_a_rank_whose_other_thread_will_send_is_no_deadlock() -> None:
    def threaded() -> float:
        x = torch.zeros(1)
        if dist.get_rank() == 1:
            dist.recv(x, 0)
            dist.send(x + 1, 0)
            return x.item()

        def feed() -> None:
            time.sleep(2.5)
            dist.send(torch.ones(1), 1)

        feeder = threading.Thread(target=feed)
        feeder.start()
        dist.recv(x, 1)
        feeder.join()
        return x.item()

    assert launch(threaded, 2).results == [2.0, 1.0]


# Deadlocks


def send_first() -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    dist.send(torch.ones(8), (rank + 1) % n)
    dist.recv(torch.ones(8), (rank - 1) % n)


def receive_first() -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    dist.recv(torch.ones(8), (rank - 1) % n)
    dist.send(torch.ones(8), (rank + 1) % n)


def wrong_peer() -> None:
    rank = dist.get_rank()
    if rank == 0:
        dist.send(torch.ones(2), 1)
    elif rank == 1:
        dist.recv(torch.ones(2), 2)


def one_skips() -> None:
    if dist.get_rank() != 1:
        dist.barrier()


def only_root() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(2))


def early_return() -> None:
    if dist.get_rank() == 0:
        return
    dist.recv(torch.ones(3), 0)


def in_hooks() -> None:
    weight = torch.nn.Parameter(torch.ones(3))

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 0:
            dist.all_reduce(gradient)
        else:
            dist.broadcast(gradient, 0)
            dist.barrier()
        return gradient

    weight.register_hook(hook)
    if dist.get_rank() < 2:
        (weight * 2).sum().backward()
    else:
        dist.recv(torch.ones(1), 0)


def skips_in_hooks() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    if dist.get_rank() == 0:
        weight.register_hook(lambda gradient: (dist.all_reduce(gradient), gradient)[1])
    (weight * 2).sum().backward()


def in_a_thread() -> None:
    thread = threading.Thread(target=send_first)
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    ("fn", "kind", "says", "line"),
    [
        (send_first, "deadlock", "rank 0 -> rank 1 -> rank 2 -> rank 0", "dist.send"),
        (receive_first, "deadlock", "every rank receives first", "dist.recv"),
        (wrong_peer, "deadlock", "rank 1 waits for rank 2, but it has finished|waits in vain", "dist.recv"),
        (one_skips, "deadlock", "not every rank made this collective call", "dist.barrier"),
        (only_root, "deadlock", "rank 0 waits for ranks 1 and 2, but they have finished", "dist.all_reduce"),
        (early_return, "deadlock", "rank 1 waits for rank 0, but it has finished", "dist.recv"),
        (skips_in_hooks, "deadlock", "for ranks 1 and 2", "dist.all_reduce"),
        (in_hooks, "disagree", "all_reduce", "dist.all_reduce"),
    ],
)
def test_deadlock(fn: Callable, kind: str, says: str, line: str) -> None:
    error = fault(kind, fn, timeout=100)
    assert re.search(says, error.report), error.report
    assert line_of(fn, line) in error.report
    if kind == "deadlock":
        assert any(standing.waits_for for standing in error.ranks)
        assert 0 < error.stood_still < 3


@pytest.mark.parametrize("fn", [send_first, only_root, skips_in_hooks])
def test_deadlock_without_meter(fn: Callable) -> None:
    fault("deadlock", fn, meter=False, timeout=100)


def test_deadlock_of_threads() -> None:
    error = fault("deadlock", in_a_thread, timeout=100)
    assert "rank 0 -> rank 1 -> rank 2 -> rank 0" in error.report and line_of(send_first, "dist.send") in error.report


def test_64_ranks_share_lines() -> None:
    error = fault("deadlock", lambda: None if dist.get_rank() == 3 else dist.barrier(), 64, timeout=100)
    assert len(error.report.splitlines()) <= 8 and "rank 3 had finished" in error.report
