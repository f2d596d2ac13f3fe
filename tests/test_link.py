"""`link`: operations take the time that a latency and a bandwidth say, one after the other on each rank's link."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shardlab.errors import LaunchError, UsageError
from shardlab.records import Link
from shardlab.runtime import launch
from shardlab.theory import collective_time

SLOW = Link(latency=0.01, bandwidth=4e6)  # 1000 float32 take 1 ms a hop


def run(fn, world_size=2, link=SLOW, **options):
    return launch(fn, world_size, device="cpu", timeout=30, link=link, **options)


def three_reductions():
    tensors = [torch.full((1000,), float(dist.get_rank() + 1)) for _ in range(3)]
    handles = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    early = [handle.is_completed() for handle in handles]
    for handle in handles:
        handle.wait()
    return early, [handle.is_completed() for handle in handles], [tensor[0].item() for tensor in tensors]


def test_collectives_queue_on_the_link_and_take_the_models_time():
    record = run(three_reductions)
    assert record.results == [([False] * 3, [True] * 3, [3.0] * 3)] * 2
    shortest = collective_time("all_reduce", 4000, 2, SLOW.latency, 1 / SLOW.bandwidth)
    for calls in record.calls:
        for call, later in zip(calls, [*calls[1:], None], strict=True):
            assert call.issued <= call.link_began and call.link_ended - call.link_began >= shortest
            assert call.completed >= call.link_ended
            assert later is None or later.link_began >= call.link_ended
            assert later is None or later.issued < call.link_ended, "all are issued before the first is done"


def test_a_message_takes_its_time_too():
    def messages():
        data = torch.ones(1000)
        if dist.get_rank() == 0:
            handles = [dist.isend(data, 1) for _ in range(2)]
            for handle in handles:
                handle.wait()
        else:
            for _ in range(2):
                dist.recv(data, 0)
        return data.sum().item()

    first, second = run(messages).calls[0]
    cost = SLOW.latency + 4000 / SLOW.bandwidth
    assert first.link_ended - first.link_began == pytest.approx(cost)
    assert second.link_began >= first.link_ended and second.completed >= second.link_ended


def test_messages_received_in_another_order_than_sent_do_not_deadlock():
    def crosswise():
        mine, a, b = torch.ones(1), torch.empty(1), torch.empty(1)
        if dist.get_rank() == 0:
            first, second = dist.isend(mine, 1, tag=1), dist.isend(mine, 1, tag=2)
            second.wait()
            dist.all_reduce(mine)
            first.wait()
        else:
            dist.recv(a, 0, tag=2)
            dist.all_reduce(mine)
            dist.recv(b, 0, tag=1)
        return mine.item()

    assert run(crosswise).results == [2.0, 2.0]


@pytest.mark.parametrize("how", ["wait", "then"])
def test_a_future_is_done_when_the_link_is(how):
    def ask(how):
        tensor = torch.ones(1000)
        future = dist.all_reduce(tensor, async_op=True).get_future()
        if how == "then":
            return future.then(lambda done: done.value()[0] / 2).wait()[0].item()
        future.wait()
        return tensor[0].item()

    record = run(ask, args=(how,))
    assert record.results == [2.0 if how == "wait" else 1.0] * 2
    assert all(calls[0].completed >= calls[0].link_ended for calls in record.calls)


def test_torchs_own_ddp_waits_for_the_link():
    def train():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.Linear(30, 30))
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
        for _ in range(2):
            ddp(torch.full((4, 30), float(dist.get_rank() + 1))).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain = launch(train, 2, device="cpu")
    record = run(train)
    for ours, theirs in zip(record.results, plain.results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    reductions = [call for call in record.calls[0] if call.op == "all_reduce" and call.numel >= 900]
    assert len(reductions) >= 3, "one bucket in the first step, then one per layer"
    assert all(call.link_ended and call.completed >= call.link_ended - 0.005 for call in reductions)
    assert record.seconds > plain.seconds


def test_a_dead_peer_is_reported_as_ever():
    def die():
        if dist.get_rank() == 1:
            raise ValueError("gone")
        dist.all_reduce(torch.ones(3))

    with pytest.raises(LaunchError) as failed:
        run(die)
    assert (failed.value.kind, failed.value.rank) == ("raised", 1)


def test_a_deadlock_is_found_as_ever():
    def wait_for_each_other():
        dist.recv(torch.ones(3), 1 - dist.get_rank())

    with pytest.raises(LaunchError) as failed:
        run(wait_for_each_other)
    assert failed.value.kind == "deadlock"


def test_the_process_ends_with_operations_on_the_link():
    def leave():
        dist.all_reduce(torch.ones(10_000_000), async_op=True)  # 20 s of this link

    began = time.monotonic()
    record = run(leave)
    assert record.calls[0][0].link_ended is None and record.calls[0][0].completed is None
    assert time.monotonic() - began < 15


@pytest.mark.parametrize("link", [3, (1, 2), Link(-1, 1), Link(0, 0)])
def test_a_link_that_cannot_be(link):
    with pytest.raises(UsageError, match="link"):
        run(three_reductions, link=link)


def test_a_link_and_slow_ranks_exclude_each_other():
    with pytest.raises(UsageError, match="give one of them"):
        run(three_reductions, slow_ranks={0})
