"""What is legal raises no alarm: libraries, sub-groups, tags, uneven sizes, threads."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from launching import fault, nothing_left
from shardlab import launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])


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
