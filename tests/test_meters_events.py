"""The event log: what was issued, completed and marked, in which order, on one clock for all ranks."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
import torch.distributed as dist

from shardlab.meters import mark
from shardlab.runtime import launch


def measured(fn, world_size=2, **options):
    """A run of `fn` on the CPU."""
    return launch(fn, world_size, device="cpu", timeout=30, **options)


def position(events, **wanted):
    """Where the one event with these attributes stands."""
    (found,) = [i for i, event in enumerate(events) if all(getattr(event, k) == v for k, v in wanted.items())]
    return found


def test_every_call_completes_after_it_was_issued_and_in_the_order_of_the_code():
    def step():
        rank, n = dist.get_rank(), dist.get_world_size()
        for _ in range(3):
            sending = dist.isend(torch.ones(3), (rank + 1) % n)
            dist.recv(torch.empty(3), (rank - 1) % n)
            sending.wait()
            dist.all_reduce(torch.ones(2))

    run = measured(step, 3)
    for calls in run.calls:
        assert [call.op for call in calls] == ["send", "recv", "all_reduce"] * 3
        assert [call.index for call in calls] == list(range(9))
        assert all(call.issued < call.completed <= run.seconds for call in calls)
        assert all(before.issued < after.issued for before, after in itertools.pairwise(calls))
        send, receive, reduction = calls[:3]
        assert send.issued < receive.issued < receive.completed < send.completed < reduction.issued
    times = [event.time for event in run.events]
    assert times == sorted(times) and len(times) == 2 * 9 * 3


def test_an_asynchronous_call_completes_when_it_is_waited_for():
    def step():
        work = dist.all_reduce(torch.ones(4), async_op=True)
        time.sleep(0.05)
        mark("before the wait")
        work.wait()
        mark("after the wait")

    events = measured(step).events
    for rank in range(2):
        mine = [(event.kind, event.label) for event in events if event.rank == rank]
        assert mine == [
            ("issued", "all_reduce"),
            ("mark", "before the wait"),
            ("completed", "all_reduce"),
            ("mark", "after the wait"),
        ]


def test_a_call_that_nobody_waited_for_has_no_completion():
    def step():
        kept = [dist.isend(torch.ones(4), 1) if dist.get_rank() == 0 else dist.recv(torch.empty(4), 0)]
        kept.append(dist.all_reduce(torch.ones(4), async_op=True))
        dist.barrier()
        kept.clear()  # gloo drops a message whose handle is gone before it has left

    run = measured(step)
    assert [(call.op, call.completed is None) for call in run.calls[0]] == [
        ("send", True),
        ("all_reduce", True),
        ("barrier", False),
    ]
    assert [event.kind for event in run.events if event.call is run.calls[0][0]] == ["issued"]


def test_a_future_or_a_poll_is_as_good_as_a_wait():
    def step():
        dist.all_reduce(torch.ones(4), async_op=True).get_future().wait()
        work = dist.all_reduce(torch.ones(4), async_op=True)
        while not work.is_completed():
            time.sleep(0.001)

    for calls in measured(step).calls:
        assert [call.completed is not None for call in calls] == [True, True]


def test_a_message_is_received_after_it_was_sent_whatever_the_ranks_clocks():
    def late_sender():
        if dist.get_rank() == 0:
            time.sleep(0.1)
            dist.send(torch.ones(4), 1)
        else:
            dist.recv(torch.empty(4), 0)

    run = measured(late_sender)
    (send,), (receive,) = run.calls
    assert receive.issued < send.issued < receive.completed
    order = [(event.rank, event.kind) for event in run.events[:2]]
    assert order == [(1, "issued"), (0, "issued")]


def test_a_rank_that_is_late_holds_a_collective_up_for_all():
    def late():
        if dist.get_rank() == 2:
            time.sleep(0.1)
        dist.all_reduce(torch.ones(4))

    run = measured(late, 3)
    last_issue = max(calls[0].issued for calls in run.calls)
    assert last_issue == run.calls[2][0].issued
    assert all(calls[0].completed > last_issue for calls in run.calls)


def test_ddp_issues_reductions_during_backward_and_they_complete():
    def train():
        from torch.nn.parallel import DistributedDataParallel

        layers = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
        model = DistributedDataParallel(layers, bucket_cap_mb=0.01)
        for step in range(2):
            loss = model(torch.ones(2, 64)).sum()
            layers[0].bias.register_hook(lambda gradient: mark("last gradient"))
            mark(f"backward {step}")
            loss.backward()
            mark(f"done {step}")

    run = measured(train)
    for rank in range(2):
        mine = [event for event in run.events if event.rank == rank]
        begin, end = position(mine, label="backward 1"), position(mine, label="done 1")
        during = mine[begin:end]
        issued = [event for event in during if event.kind == "issued"]
        assert len(issued) >= 4 and {event.label for event in issued} == {"all_reduce"}
        # Nobody calls wait() in Python: the completions come from the library's own notice, a moment after the fact.
        assert all(event.call.completed > event.time for event in issued)
        last = next(i for i, event in enumerate(during) if event.label == "last gradient")
        assert sum(event.kind == "issued" for event in during[:last]) >= 2


def test_where_a_call_stands_in_the_learners_code():
    def first():
        dist.barrier()

    def second():
        first()
        dist.all_reduce(torch.ones(2))

    line = first.__code__.co_firstlineno
    for calls in measured(second).calls:
        barrier, reduction = calls
        assert (barrier.where.function, barrier.where.line) == ("first", line + 1)
        assert (reduction.where.function, reduction.where.line) == ("second", line + 5)
        assert barrier.where.filename == __file__


def test_marks_are_optional_and_harmless_outside_a_launch():
    mark("nobody listens")
    run = measured(lambda: mark("inside"))
    assert [(event.kind, event.label, event.call) for event in run.events] == [("mark", "inside", None)] * 2
    assert measured(lambda: mark("inside"), meter=False).calls == [[], []]


@pytest.mark.parametrize("ranks", [1, 4])
def test_ranks_share_one_clock(ranks):
    run = measured(lambda: dist.barrier(), ranks)
    assert all(0 < event.time < run.seconds for event in run.events)
