"""`slow_ranks`: collectives complete as late as they may, so that a missing wait shows every time."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from shardlab.runtime import launch


def run(fn, world_size=2, **options):
    return launch(fn, world_size, device="cpu", timeout=30, slow_ranks=range(world_size), **options).results


def reduced(wait):
    """Two asynchronous all-reduces. wait: which of their handles are waited for."""
    tensors = [torch.full((4,), float(dist.get_rank() + 1)) for _ in range(2)]
    handles = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for index in wait:
        handles[index].wait()
    return [tensor.tolist() for tensor in tensors]


def test_a_wait_brings_the_result():
    assert run(reduced, args=((0, 1),)) == [[[3.0] * 4] * 2] * 2
    assert run(reduced, args=((1, 0),)) == [[[3.0] * 4] * 2] * 2


@pytest.mark.parametrize("waited", [(), (0,), (1,)])
def test_what_nobody_waited_for_is_unusable(waited):
    for tensors in run(reduced, args=(waited,)):
        assert [not any(map(math.isnan, tensor)) for tensor in tensors] == [index in waited for index in (0, 1)]


def test_blocking_calls_are_as_ever():
    def every_operation():
        rank, n = dist.get_rank(), dist.get_world_size()
        mine = torch.tensor([float(rank), 1.0, 2.0])
        total = mine.clone()
        dist.all_reduce(total)
        copied = mine.clone()
        dist.broadcast(copied, src=1)
        parts = [torch.empty(3) for _ in range(n)]
        dist.all_gather(parts, mine)
        whole = torch.empty(3 * n)
        dist.all_gather_into_tensor(whole, mine)
        shard = torch.empty(1)
        dist.reduce_scatter_tensor(shard, mine)
        gathered = [torch.empty(3) for _ in range(n)] if rank == 0 else None
        dist.gather(mine, gathered, dst=0)
        got = torch.empty(1)
        dist.scatter(got, list(mine.split(1)) if rank == 2 else None, src=2)
        swapped = torch.empty(3)
        dist.all_to_all_single(swapped, mine)
        dist.reduce(root := mine.clone(), dst=0)
        counts = torch.tensor([rank], dtype=torch.int64)
        dist.all_reduce(counts, op=dist.ReduceOp.MAX)
        dist.barrier()
        values = [total, copied, torch.stack(parts), whole, shard, got, swapped, counts]
        return [v.tolist() for v in values + ([torch.stack(gathered), root] if rank == 0 else [])]

    plain = launch(every_operation, 3, device="cpu").results
    assert run(every_operation, 3) == plain
    assert plain[0][0] == [3.0, 3.0, 6.0]


def changed(when):
    tensor = torch.ones(4)
    handle = dist.all_reduce(tensor, async_op=True)
    if when == "before":
        tensor.zero_()
    handle.wait()
    if when == "after":
        tensor.zero_()
    return tensor.tolist()


def test_writing_to_a_tensor_on_its_way_spoils_the_result():
    assert run(changed, args=("after",)) == [[0.0] * 4] * 2
    assert all(math.isnan(value) for value in run(changed, args=("before",))[0])


def test_an_input_that_is_changed_on_its_way_spoils_the_result():
    def gather(change):
        mine, whole = torch.ones(2), torch.empty(4)
        handle = dist.all_gather_into_tensor(whole, mine, async_op=True)
        if change:
            mine.mul_(2)
        handle.wait()
        return whole.tolist()

    assert run(gather, args=(False,)) == [[1.0] * 4] * 2
    assert all(math.isnan(value) for value in run(gather, args=(True,))[0])


def test_an_input_that_is_a_view_of_the_output():
    def gather():
        whole = torch.zeros(4)
        mine = whole.chunk(2)[dist.get_rank()]
        mine.fill_(dist.get_rank() + 1.0)
        dist.all_gather_into_tensor(whole, mine)
        return whole.tolist()

    assert run(gather) == [[1.0, 1.0, 2.0, 2.0]] * 2


def test_a_root_may_read_what_it_broadcasts():
    def broadcast():
        tensor = torch.full((2,), float(dist.get_rank()))
        handle = dist.broadcast(tensor, src=1, async_op=True)
        before = tensor.tolist()
        handle.wait()
        return before, tensor.tolist()

    (early, late), (root, root_after) = run(broadcast)
    assert all(map(math.isnan, early)) and late == root == root_after == [1.0, 1.0]


def test_a_storage_freed_on_its_way_is_no_crash():
    def freed():
        tensor = torch.ones(4)
        handle = dist.all_reduce(tensor, async_op=True)
        tensor.untyped_storage().resize_(0)
        handle.wait()
        return tensor.untyped_storage().nbytes()

    assert run(freed) == [0, 0]


@pytest.mark.parametrize("how", ["wait", "then", "value", "polling"])
def test_futures_and_polling(how):
    def ask(how):
        tensor = torch.ones(2)
        handle = dist.all_reduce(tensor, async_op=True)
        if how == "polling":
            while not handle.is_completed():
                pass
            return tensor.tolist()
        future = handle.get_future()
        if how == "then":
            return future.then(lambda done: done.value()[0] / 2).wait().tolist()
        future.wait()
        return (future.value()[0] if how == "value" else tensor).tolist()

    record = launch(ask, 2, args=(how,), device="cpu", slow_ranks={0, 1})
    assert record.results == [[1.0 if how == "then" else 2.0] * 2] * 2
    assert all(calls[0].completed is not None for calls in record.calls)


def test_copies_are_not_the_learners_memory():
    def held():
        tensor = torch.ones(1000)
        dist.all_reduce(tensor)
        return tensor.sum().item()

    record = launch(held, 2, device="cpu", slow_ranks={0, 1})
    assert record.memory[0].peak < 4000 + 200
    assert record.traffic[0].by_operation["all_reduce"].sent == 4000
