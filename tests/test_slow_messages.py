"""`slow_ranks`: messages complete as late as they may, so that code which is right by luck goes wrong every time."""

from __future__ import annotations

import itertools
import math
import time

import pytest
import torch
import torch.distributed as dist

from shardlab.errors import LaunchError
from shardlab.runtime import launch


def run(fn, world_size=2, slow=(), **options):
    """A run of `fn` with held sends on the ranks in `slow`."""
    return launch(fn, world_size, device="cpu", timeout=30, slow_ranks=slow, **options)


def subsets(world_size):
    ranks = range(world_size)
    return [s for size in range(world_size + 1) for s in itertools.combinations(ranks, size)]


def change_before_wait(wait_first):
    """Rank 0 sends ones and then overwrites the buffer."""
    data = torch.ones(4)
    if dist.get_rank() == 0:
        sending = dist.isend(data, 1)
        if wait_first:
            sending.wait()
        data.fill_(7)
        sending.wait() if not wait_first else None
    else:
        dist.recv(data.zero_(), 0)
    return data.tolist()


def test_a_buffer_changed_before_its_send_completed_is_sent_changed():
    assert run(change_before_wait, slow=[0], args=(False,)).results[1] == [7] * 4
    assert run(change_before_wait, slow=[0], args=(True,)).results[1] == [1] * 4


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
def test_a_received_buffer_is_unusable_before_wait(dtype):
    def receive():
        if dist.get_rank() == 1:
            dist.send(torch.ones(3, dtype=dtype), 0)
            return None
        data = torch.zeros(3, dtype=dtype)
        receiving = dist.irecv(data, 1)
        before = data.clone()
        receiving.wait()
        return before, data

    before, after = run(receive, slow=[0]).results[0]
    assert torch.equal(after, torch.ones(3, dtype=dtype))
    if dtype.is_floating_point or dtype.is_complex:
        assert bool(before.isnan().all())
    elif dtype == torch.bool:
        assert before.tolist() == [True] * 3
    else:
        assert before.tolist() == [torch.iinfo(dtype).max] * 3


def ring(style):
    """Every rank's number travels all the way round. Returns what came in, in order."""
    rank, n = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % n, (rank - 1) % n
    seen, carried = [], torch.tensor([float(rank)])
    for _ in range(n - 1):
        incoming = torch.empty(1)
        if style == "isend, recv":
            sending = dist.isend(carried, right)
            dist.recv(incoming, left)
            sending.wait()
        elif style == "irecv, isend":
            receiving = dist.irecv(incoming, left)
            sending = dist.isend(carried, right)
            receiving.wait()
            sending.wait()
        elif style == "batch":
            operations = [dist.P2POp(dist.isend, carried, right), dist.P2POp(dist.irecv, incoming, left)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        elif rank % 2 == 0 and rank != n - 1:  # "even-odd": with N odd, the last rank receives first like an odd one
            dist.send(carried, right)
            dist.recv(incoming, left)
        else:
            dist.recv(incoming, left)
            dist.send(carried, right)
        carried = incoming
        seen.append(int(incoming))
    return seen


@pytest.mark.parametrize("slow", subsets(3))
def test_a_right_ring_is_right_whoever_is_slow(slow):
    assert run(ring, 3, slow, args=("isend, recv",)).results == [[2, 1], [0, 2], [1, 0]]


@pytest.mark.parametrize("style", ["isend, recv", "irecv, isend", "batch", "even-odd"])
@pytest.mark.parametrize("world_size", [2, 4, 5])
def test_every_way_of_a_ring_ends_when_all_are_slow(style, world_size):
    results = run(ring, world_size, range(world_size), args=(style,)).results
    assert results == [[(rank - step) % world_size for step in range(1, world_size)] for rank in range(world_size)]


def forwarder():
    """Rank 1 passes two numbers of rank 0 on to rank 2 through one buffer, and waits for its sends at the end."""
    rank, data, got = dist.get_rank(), torch.empty(1), []
    if rank == 0:
        for number in (1.0, 2.0):
            dist.send(torch.tensor([number]), 1)
    elif rank == 1:
        sends = []
        for _ in range(2):
            dist.recv(data, 0)
            sends.append(dist.isend(data, 2))
        for sending in sends:
            sending.wait()
    else:
        for _ in range(2):
            dist.recv(data, 1)
            got.append(float(data))
    return got


def test_a_buffer_reused_while_its_send_is_on_the_way_sends_the_later_content_twice():
    assert run(forwarder, 3, slow=[1]).results[2] == [2, 2]


def test_a_receive_that_nobody_waits_for_never_shows():
    def careless():
        if dist.get_rank() == 0:
            dist.send(torch.ones(2), 1)
            return None
        data = torch.zeros(2)
        receiving = dist.irecv(data, 0)
        time.sleep(0.2)
        seen = data.sum().item()
        receiving.wait()
        return seen, data.sum().item()

    seen, afterwards = run(careless, slow=[1]).results[1]
    assert math.isnan(seen) and afterwards == 2


def test_a_send_that_nobody_waits_for_arrives_in_the_end():
    def leave_it():
        if dist.get_rank() == 0:
            dist.isend(torch.ones(2), 1)
            return None
        data = torch.zeros(2)
        dist.recv(data, 0)
        return data.tolist()

    outcome = run(leave_it, slow=[0])
    assert outcome.results[1] == [1, 1]
    assert [(call.op, call.completed) for call in outcome.calls[0]] == [("send", None)]


@pytest.mark.parametrize("operation", ["isend", "irecv"])
def test_what_the_backend_refuses_is_still_refused(operation):
    def refused():
        getattr(dist, operation)(torch.ones(4, 4).t(), 1 - dist.get_rank())

    messages = []
    for slow in ((), (0, 1)):
        with pytest.raises(LaunchError) as caught:
            run(refused, slow=slow)
        messages.append((caught.value.exception_type, caught.value.exception_message))
    assert messages[0] == messages[1] and "contiguous" in messages[0][1]


def test_traffic_and_memory_are_those_of_the_learner():
    def exchange():
        data = torch.zeros(1 << 18)
        receiving = dist.irecv(data, 1 - dist.get_rank())
        sending = dist.isend(torch.ones(1 << 18), 1 - dist.get_rank())
        receiving.wait()
        sending.wait()

    plain, slow = run(exchange), run(exchange, slow=[0, 1])
    assert plain.traffic == slow.traffic
    assert [memory.peak for memory in plain.memory] == [memory.peak for memory in slow.memory] == [2 << 20] * 2
    assert all(call.completed is not None for calls in slow.calls for call in calls)
