"""Every fault ends within bounds, names its cause, leaves no process, and the next launch is right.

`fault` checks the last two. No test compares wall times on a busy machine: bounds are generous, or the report's own.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist

from launching import descendants, fault, nothing_left, sum_of_ranks
from shardlab import launch
from shardlab.errors import LaunchError, UsageError

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def line_of(fn: Callable, text: str) -> str:
    """ "test_launch_faults.py, line 31" """
    lines, first = inspect.getsourcelines(fn)
    return f"test_launch_faults.py, line {first + next(n for n, line in enumerate(lines) if text in line)}"


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


# Silent disagreement


def all_reduce_sizes() -> None:
    dist.all_reduce(torch.ones(2))
    dist.all_reduce(torch.ones(3 + dist.get_rank()))


def broadcast_sizes() -> None:
    dist.broadcast(torch.ones(4 if dist.get_rank() else 3), 0)


def gather_sizes() -> None:
    n = 3 + dist.get_rank()
    dist.all_gather_into_tensor(torch.ones(3 * n), torch.ones(n))


def other_order() -> None:
    calls = [lambda: dist.all_reduce(torch.ones(4)), lambda: dist.broadcast(torch.ones(4), 0)]
    for call in calls if dist.get_rank() else reversed(calls):
        call()


def other_operation() -> None:
    x = torch.ones(4)
    dist.all_reduce(x)
    dist.reduce(x, 0) if dist.get_rank() == 1 else dist.all_reduce(x)


def other_type() -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.int32 if dist.get_rank() else torch.float32))


def other_root() -> None:
    dist.broadcast(torch.ones(4), 0 if dist.get_rank() < 2 else 1, async_op=True)


def one_more_async() -> None:
    dist.barrier()
    if dist.get_rank() == 2:
        dist.all_reduce(torch.ones(4), async_op=True)


def in_a_subgroup() -> None:
    group = dist.new_group([0, 2])
    if dist.get_rank() != 1:
        dist.all_reduce(torch.ones(4 + dist.get_rank()), group=group)


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (all_reduce_sizes, r"at call 2:\n  rank 0: all_reduce \(3 float32\)\n.*\n  rank 1: all_reduce \(4 float32\)"),
        (broadcast_sizes, r"at call 1:\n  rank 0: broadcast with root 0 \(3 float32\)\n.*\n  ranks 1 and 2: broadcast"),
        (gather_sizes, r"at call 1:\n  rank 0: all_gather \(3 float32\)"),
        (other_order, r"at call 1:\n  rank 0: broadcast with root 0 \(4 float32\)\n.*\n  ranks 1 and 2: all_reduce"),
        (other_operation, r"at call 2:\n  ranks 0 and 2: all_reduce \(4 float32\)\n.*\n  rank 1: reduce with root 0"),
        (other_type, r"rank 0: all_reduce \(4 float32\)\n.*\n  ranks 1 and 2: all_reduce \(4 int32\)"),
        (other_root, r"ranks 0 and 1: broadcast with root 0 .*\n.*\n  rank 2: broadcast with root 1"),
        (one_more_async, r"at call 2:\n  rank 2: all_reduce .*\n.*\n  ranks 0 and 1 had finished without this call"),
        (in_a_subgroup, r"at call 1 of the group of ranks 0 and 2:\n  rank 0: all_reduce \(4 float32\)"),
    ],
)
@pytest.mark.parametrize("meter", [True, False])
def test_ranks_disagree(fn: Callable, says: str, meter: bool) -> None:
    error = fault("disagree", fn, meter=meter)
    assert error.report.startswith("The ranks disagree") and re.search(says, error.report), error.report
    assert "test_launch_faults.py, line " in error.report
    assert error.rank is not None


def message(sent: torch.Tensor | None, received: torch.Tensor | None) -> None:
    for _ in range(2):
        dist.barrier()
    if dist.get_rank() == 0 and sent is not None:
        dist.isend(sent, 1)
    if dist.get_rank() == 1 and received is not None:
        dist.irecv(received, 0)
    if sent is not None and received is not None:
        dist.barrier()


@pytest.mark.parametrize(
    ("sent", "received", "says"),
    [
        (torch.ones(8), torch.ones(4), "not received as it was sent"),
        (torch.ones(4), torch.ones(8), "not received as it was sent"),
        (torch.ones(4), torch.ones(4, dtype=torch.int32), "not received as it was sent"),
        (torch.ones(4), None, "was sent but never received"),
        (None, torch.ones(4), "was awaited but never sent"),
    ],
)
def test_messages_disagree(sent: torch.Tensor | None, received: torch.Tensor | None, says: str) -> None:
    error = fault("disagree", message, 2, sent, received)
    assert f"message 1 from rank 0 to rank 1 {says}" in error.report.replace(":", "") or says in error.report


def test_a_difference_long_ago_is_still_found() -> None:
    def long() -> None:
        x = torch.ones(2, dtype=torch.float32 if dist.get_rank() else torch.int32)
        dist.all_reduce(x)
        for _ in range(2100):
            dist.all_reduce(torch.ones(1))

    fault("disagree", long, 2, meter=False)


# What is legal raises no alarm


def objects() -> list:
    rank, n = dist.get_rank(), dist.get_world_size()
    everyone: list = [None] * n
    dist.all_gather_object(everyone, "x" * (10**rank))
    at_root = [None] * n if rank == 0 else None
    dist.gather_object({"rank": rank}, at_root, dst=0)
    told = ["y" * 100, 3] if rank == 0 else [None, None]
    dist.broadcast_object_list(told, src=0)
    given: list = [None]
    dist.scatter_object_list(given, ["a", "bb", "ccc"] if rank == 0 else None, src=0)
    if rank == 0:
        dist.send_object_list(["z" * 50], dst=1)
    elif rank == 1:
        dist.recv_object_list(given, src=0)
    return [len(everyone[-1]), told[1]]


def roots_and_others() -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    dist.gather(torch.ones(2), [torch.ones(2) for _ in range(n)] if rank == 0 else None, dst=0)
    dist.scatter(torch.ones(2), [torch.ones(2) for _ in range(n)] if rank == 1 else None, src=1)
    dist.reduce(torch.ones(3), 2)
    dist.barrier()
    dist.monitored_barrier()


def shapes_and_sizes() -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    dist.all_reduce(torch.ones(2, 3) if rank else torch.ones(6))
    parts = [torch.ones(size + 1) for size in range(n)]
    dist.reduce_scatter(torch.ones(rank + 1), parts)
    sizes = [[1, 2, 3], [2, 2, 2], [3, 2, 1]]
    received = [sizes[other][rank] for other in range(n)]
    dist.all_to_all_single(torch.ones(sum(received)), torch.ones(6), received, sizes[rank])
    dist.all_reduce(torch.ones(0))


def tags_out_of_order() -> list:
    rank = dist.get_rank()
    if rank == 0:
        for work in [dist.isend(torch.full((size,), float(size)), 1, tag=size) for size in (1, 2, 3)]:
            work.wait()
    if rank == 1:
        got = [torch.zeros(size) for size in (3, 1, 2)]
        for x in got:
            dist.recv(x, 0, tag=x.numel())
        return [x[0].item() for x in got]
    return []


def from_anybody() -> float:
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(torch.full((rank,), 1.0) if rank == 2 else torch.ones(1), 0)
        return 0.0
    first, second = torch.zeros(2), torch.zeros(1)
    dist.recv(first, 2)
    dist.recv(second)
    return float(first.sum() + second.sum()) + n


def groups_of_the_same_ranks() -> None:
    first, second = dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2])
    order = [(first, 3), (second, 5)]
    works = [
        dist.all_reduce(torch.ones(size), group=group, async_op=True)
        for group, size in (order if dist.get_rank() else reversed(order))
    ]
    for work in works:
        work.wait()
    halves = [dist.new_group([0, 1]), dist.new_group([2])]
    dist.all_reduce(torch.ones(1 + dist.get_rank() // 2), group=halves[dist.get_rank() // 2])


def a_refused_call_counts_for_nothing() -> None:
    if dist.get_rank() == 0:
        with contextlib.suppress(RuntimeError, ValueError):
            dist.send(torch.ones(4, 4).t()[:2], 1)
        dist.send(torch.ones(4), 1)
    if dist.get_rank() == 1:
        dist.recv(torch.ones(4), 0)


def batched() -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    ops = [dist.P2POp(dist.isend, torch.ones(3), (rank + 1) % n), dist.P2POp(dist.irecv, torch.ones(3), (rank - 1) % n)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def unlike_threads() -> None:
    def exchange(tag: int) -> None:
        rank, n = dist.get_rank(), dist.get_world_size()
        sent = dist.isend(torch.ones(tag), (rank + 1) % n, tag=tag)
        time.sleep(0.01 * ((rank + tag) % 3))
        dist.recv(torch.ones(tag), (rank - 1) % n, tag=tag)
        sent.wait()

    threads = [threading.Thread(target=exchange, args=(tag,)) for tag in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def ddp() -> None:
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)),
        bucket_cap_mb=0.00001,
        find_unused_parameters=True,
    )
    for step in range(3):
        model(torch.ones(5, 3) * dist.get_rank() + step).sum().backward()
    with model.no_sync():
        model(torch.ones(5, 3)).sum().backward()


def ddp_with_uneven_inputs() -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    with model.join():
        for _ in range(2 + dist.get_rank()):
            model(torch.ones(2, 3)).sum().backward()


def fsdp2() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(2, 5) * dist.get_rank()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for parameter in model.parameters():
        parameter.full_tensor()  # type: ignore[attr-defined]


def zero_redundancy_optimizer() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(5)])
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    optimizer.consolidate_state_dict(0)


LEGAL = (
    *(objects, roots_and_others, shapes_and_sizes, tags_out_of_order, from_anybody, groups_of_the_same_ranks),
    *(a_refused_call_counts_for_nothing, batched, unlike_threads, ddp, ddp_with_uneven_inputs, fsdp2),
    zero_redundancy_optimizer,
)


@pytest.mark.parametrize("fn", LEGAL)
@pytest.mark.parametrize("meter", [True, False])
def test_no_false_alarm(fn: Callable, meter: bool) -> None:
    with nothing_left():
        launch(fn, 3, meter=meter)


def test_a_wait_for_tag_3_is_met_by_tag_3_alone() -> None:
    def other_tags() -> None:
        if dist.get_rank() == 0:
            dist.isend(torch.ones(1), 1, tag=5).is_completed()
            dist.barrier()
        else:
            dist.recv(torch.ones(1), 0, tag=3)

    error = fault("deadlock", other_tags, 2, timeout=100)
    assert "rank 0 -> rank 1 -> rank 0" in error.report


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


# A script's process stands for a kernel: what matters is what happens around it

SCRIPT = """
import os, signal, sys, time, threading
import torch, torch.distributed as dist
from shardlab import launch
from shardlab.errors import LaunchError

def waits():
    print("running", flush=True)
    if dist.get_rank() == 0:
        time.sleep(1000)
    dist.barrier()

def total():
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()
"""


def script(body: str, prefix: tuple[str, ...] = (), cwd: str | None = None, **environment: str) -> subprocess.Popen:
    """A Python process in a process group of its own, with ShardLab on its path. Its output is one pipe."""
    shared = os.path.dirname(os.path.dirname(os.path.dirname(sys.modules["shardlab.runtime"].__file__ or "")))
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", SCRIPT + textwrap.dedent(body)],
        env={**os.environ, "PYTHONPATH": shared, "PYTHONUNBUFFERED": "1", **environment},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ends_right(process: subprocess.Popen, says: str = "right") -> str:
    """Waits for the process; its output."""
    assert process.stdout is not None
    with process.stdout:
        out = process.stdout.read()
    assert process.wait(90) == 0 and says in out, out
    assert "Traceback" not in out, out
    return out


def wait_for(process: subprocess.Popen, text: str) -> str:
    """Reads lines until one contains `text`; that line."""
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return line
    raise AssertionError(f"{text!r} never came")


def gone(mark: str) -> None:
    deadline = time.monotonic() + 5
    while left := descendants(mark, servers=True):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)


def test_interrupt() -> None:
    """SIGINT to the whole process group, as Jupyter does, again and again while the ranks are being ended."""
    mark = f"interrupt {os.getpid()}"
    body = """
    signal.signal(signal.SIGINT, lambda number, frame: None)  # or what comes after the launch would end the script
    try:
        launch(waits, 3, timeout=600)
    except LaunchError as error:
        print(error.kind, error)
    time.sleep(1)
    print(launch(total).results, "right")
    """
    process = script(body, SHARDLAB_TEST_PROCESS=mark)
    wait_for(process, "running")
    time.sleep(0.5)
    began = time.monotonic()
    for _ in range(5):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.02)
    wait_for(process, "interrupted")
    assert time.monotonic() - began < 5
    out = ends_right(process)
    assert "rank 0 was computing" in out and "<string>, line" in out
    assert "[2.0, 2.0] right" in out
    gone(mark)


@pytest.mark.parametrize("after", [0.0, 0.5])
def test_interrupt_while_starting(after: float) -> None:
    mark = f"starting {os.getpid()} {after}"
    body = """
    print("starting")
    try:
        launch(waits, 16, timeout=600)
    except LaunchError as error:
        print(error.kind, "so")
    except KeyboardInterrupt:
        print("interrupted so")
    print(launch(total).results, "right")
    """
    process = script(body, SHARDLAB_TEST_PROCESS=mark)
    wait_for(process, "starting")
    time.sleep(after)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    wait_for(process, "interrupted so")
    assert time.monotonic() - began < 5
    ends_right(process)
    gone(mark)


def test_a_killed_notebook_takes_everything_with_it(tmp_path) -> None:
    """Also what a rank has started, and although a process forked from the notebook holds copies of its pipes."""
    mark = f"killed {os.getpid()}"
    body = """
    def with_children():
        import subprocess
        subprocess.Popen(["sleep", "1000"])
        open(f"begun-{dist.get_rank()}", "w").close()
        waits()
    threading.Thread(target=lambda: launch(with_children, 3, timeout=600)).start()
    while len(os.listdir()) < 3:
        time.sleep(0.05)
    forked = os.fork()
    if forked == 0:
        time.sleep(60)
        os._exit(0)
    print("forked", forked, "end", flush=True)
    """
    process = script(body, cwd=str(tmp_path), SHARDLAB_TEST_PROCESS=mark)
    forked = int(wait_for(process, "forked").split()[1])
    own = {forked, process.pid, *(child.pid for child in psutil.Process(process.pid).children())}
    ranks = [each for each in descendants(mark, servers=True) if each.pid not in own]
    assert len(ranks) >= 6  # three ranks and what they started
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(ranks, timeout=5)
    os.kill(forked, signal.SIGKILL)  # the forkserver's pipe is one of those that it holds
    assert not alive
    gone(mark)


def test_a_notebook_that_exits_while_a_thread_launches() -> None:
    mark = f"exit {os.getpid()}"
    process = script(
        "threading.Thread(target=lambda: launch(waits, 2), daemon=True).start(); time.sleep(6); print('right')",
        SHARDLAB_TEST_PROCESS=mark,
    )
    process.communicate(timeout=60)
    gone(mark)


def test_two_notebooks_at_the_same_time() -> None:
    body = "for _ in range(5): assert launch(total, 3).results == [3.0] * 3\nprint('right')"
    processes = [script(body) for _ in range(2)]
    for process in processes:
        ends_right(process)


# Hostile surroundings


def test_stray_files_beside_the_notebook(tmp_path) -> None:
    for name in ("socket", "random", "select", "pickle", "queue", "signal", "types", "typing", "copy"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('a stray file')\n")
    (tmp_path / "mine.py").write_text("VALUE = 7\n")
    body = f"""
    os.chdir({str(tmp_path)!r})  # only now, for this script has sys.path[0] == "", as a notebook has
    def own():
        import mine, sched, wave
        return mine.VALUE
    print(launch(own).results, launch(total).results, "right")
    """
    assert "[7, 7] [2.0, 2.0] right" in ends_right(script(body))


def unshared(*options: str) -> tuple[str, ...]:
    command = ("unshare", *options)
    try:
        works = subprocess.run([*command, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        works = False
    if not works:
        pytest.skip(f"this machine does not allow {' '.join(command)}")
    return command


def test_only_loopback_is_up_and_the_host_name_does_not_resolve() -> None:
    prefix = (*unshared("-nu"), "sh", "-c", 'ip link set lo up && hostname nowhere.invalid && exec "$@"', "sh")
    body = 'import socket\nprint(socket.gethostname(), launch(total, 3).results, "right")'
    assert "nowhere.invalid [3.0, 3.0, 3.0] right" in ends_right(script(body, prefix))


def test_ranks_talk_over_loopback_whatever_the_host_name_means(tmp_path) -> None:
    (tmp_path / "hosts").write_text("10.9.9.9 elsewhere\n127.0.0.1 localhost\n")
    setting = (
        "ip link set lo up && ip addr add 10.9.9.9/32 dev lo && hostname elsewhere && "
        'mount --bind "$1" /etc/hosts && shift && exec "$@"'
    )
    prefix = (*unshared("-num"), "sh", "-c", setting, "sh", str(tmp_path / "hosts"))
    body = """
    import psutil, socket
    def addresses():
        total()
        return sorted({link.laddr.ip for link in psutil.Process().net_connections("inet")})
    print(socket.gethostbyname(socket.gethostname()), launch(addresses).results, "right")
    """
    assert "10.9.9.9 [['127.0.0.1'], ['127.0.0.1']] right" in ends_right(script(body, prefix))


def test_read_only_folder_and_small_dev_shm(tmp_path) -> None:
    mounts = (
        'mount -t tmpfs -o size=64m none /dev/shm && mount -t tmpfs -o ro none "$1" && cd "$1" && shift && exec "$@"'
    )
    prefix = (*unshared("-m"), "sh", "-c", mounts, "sh", str(tmp_path))
    body = """
    try:
        open("file", "w")
    except OSError:
        print([x.numel() for x in launch(lambda: torch.ones(50_000_000)).results], launch(total).results, "right")
    """
    ends_right(script(body, prefix), "[50000000, 50000000] [2.0, 2.0] right")


def test_no_room_in_the_temporary_folder_and_no_working_directory(tmp_path) -> None:
    prefix = (*unshared("-m"), "sh", "-c", 'mount -t tmpfs -o size=8m none /tmp && exec "$@"', "sh")
    body = """
    def tried(*arguments):
        try:
            launch(*arguments)
        except (LaunchError, ValueError) as error:
            print(type(error).__name__, error)
    os.mkdir("/tmp/gone")
    tried(lambda: torch.ones(50_000_000))
    tried(total, 400)
    tried(lambda x: None, 2, (torch.ones(5_000_000),))
    os.chdir("/tmp/gone")
    os.rmdir("/tmp/gone")
    tried(total)
    os.chdir("/")
    print(launch(total).results, "right")
    """
    out = ends_right(script(body, prefix, TMPDIR="/tmp"), "[2.0, 2.0] right")
    assert re.search(r"LaunchError Rank \d raised OSError: the result could not be written", out)
    assert out.count("UsageError A launch needs room for temporary files") == 2
    assert "UsageError The folder that this notebook runs in has been deleted or moved" in out


def test_a_forkserver_that_was_killed_is_replaced() -> None:
    launch(sum_of_ranks)
    for process in psutil.Process().children():
        if "multiprocessing.forkserver" in " ".join(process.cmdline()):
            process.kill()
            while process.status() != psutil.STATUS_ZOMBIE:  # multiprocessing itself waits for it
                time.sleep(0.01)
    assert launch(sum_of_ranks).results == [1.0, 1.0]  # its folder is a new one, and stays
    with nothing_left():
        assert launch(sum_of_ranks).results == [1.0, 1.0]


# Again and again


def test_300_launches_in_a_row() -> None:
    def rank() -> int:
        return dist.get_rank()

    this = psutil.Process()

    def measured() -> tuple[int, int, int, int]:
        return this.num_fds(), this.num_threads(), len(this.children(recursive=True)), this.memory_info().rss

    with nothing_left():
        for _ in range(20):
            launch(rank, 2)
        before = measured()
        for _ in range(280):
            assert launch(rank, 2).results == [0, 1]
        after = measured()
    assert after[0] <= before[0] and after[1] <= before[1] and after[2] <= before[2]
    assert after[3] - before[3] < 8 << 20, "memory grew"


def test_failing_launches_leave_nothing_either() -> None:
    this = psutil.Process()

    def fails() -> None:
        raise ValueError

    def once() -> None:
        with pytest.raises(LaunchError):
            launch(fails, 2)

    with nothing_left():
        once()
        before = this.num_fds()
        for _ in range(10):
            once()
        assert this.num_fds() <= before
