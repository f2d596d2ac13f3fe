"""What the traffic meter counts: every call once, with the right bytes, whoever makes it and by whichever name."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist

from shardlab.errors import LaunchError
from shardlab.records import Totals
from shardlab.runtime import launch

FLOAT = 4  # bytes of a float32


def measured(fn, world_size=2, **options):
    """A run of `fn` on the CPU."""
    return launch(fn, world_size, device="cpu", timeout=30, **options)


def only_call(run, rank=0):
    (call,) = run.calls[rank]
    return call


# --- point to point


def test_blocking_messages():
    def talk():
        if dist.get_rank() == 0:
            dist.send(torch.ones(5), 1)
            dist.send(torch.ones(7, dtype=torch.float64), 1)
        else:
            dist.recv(torch.empty(5), 0)
            dist.recv(torch.empty(7, dtype=torch.float64), 0)

    run = measured(talk)
    sender, receiver = run.traffic
    assert (sender.messages_sent, sender.sent, sender.messages_received, sender.received) == (2, 76, 0, 0)
    assert (receiver.messages_sent, receiver.sent, receiver.messages_received, receiver.received) == (0, 0, 2, 76)
    assert sender.by_peer == {1: Totals(2, 76, 0)} and receiver.by_peer == {0: Totals(2, 0, 76)}
    assert [(call.op, call.numel, call.dtype) for call in run.calls[0]] == [
        ("send", 5, "float32"),
        ("send", 7, "float64"),
    ]


def test_bytes_by_peer_on_a_ring():
    def ring():
        rank, n = dist.get_rank(), dist.get_world_size()
        sending = dist.isend(torch.ones(10 + rank), (rank + 1) % n)
        before = (rank - 1) % n
        dist.irecv(torch.empty(10 + before), before).wait()
        sending.wait()

    for rank, traffic in enumerate(measured(ring, 4).traffic):
        before, after = (rank - 1) % 4, (rank + 1) % 4
        assert traffic.by_peer == {
            after: Totals(1, (10 + rank) * FLOAT, 0),
            before: Totals(1, 0, (10 + before) * FLOAT),
        }
        assert traffic.by_operation == {
            "send": Totals(1, (10 + rank) * FLOAT, 0),
            "recv": Totals(1, 0, (10 + before) * FLOAT),
        }


def test_batch_isend_irecv():
    def batch():
        rank, n = dist.get_rank(), dist.get_world_size()
        operations = [
            dist.P2POp(dist.isend, torch.ones(6), (rank + 1) % n),
            dist.P2POp(dist.irecv, torch.empty(6), (rank - 1) % n),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    for calls in measured(batch, 3).calls:
        assert sorted((call.op, call.sent, call.received) for call in calls) == [("recv", 0, 24), ("send", 24, 0)]
        assert all(call.completed is not None for call in calls)


def test_a_message_from_any_rank_is_put_down_to_the_one_that_sent_it():
    def gather():
        if dist.get_rank() == 0:
            return [dist.recv(torch.empty(3)) for _ in range(2)]
        dist.send(torch.ones(3), 0)

    run = measured(gather, 3)
    assert sorted(run.results[0]) == [1, 2]
    assert run.traffic[0].by_peer == {1: Totals(1, 0, 12), 2: Totals(1, 0, 12)}
    assert [call.peer for call in run.calls[0]] == run.results[0]


def test_a_refused_call_does_not_count():
    def refused():
        with pytest.raises(RuntimeError, match="contiguous"):
            dist.isend(torch.ones(4, 4).t()[:, 1:], 1 - dist.get_rank())
        dist.all_reduce(torch.ones(2))

    assert only_call(measured(refused)).op == "all_reduce"


# --- collectives: (how it is called, operation, bytes sent and received on each rank of 4)

N = 4
n = 8 * FLOAT  # bytes of the full tensor of 8 elements


def parts(size=2):
    return [torch.ones(size) for _ in range(N)]


def root_has(value, root=1):
    return value if dist.get_rank() == root else None


EQUAL = {
    "all_reduce": (lambda: dist.all_reduce(torch.ones(8)), "all_reduce", 1.5 * n),
    "all_reduce_coalesced": (
        lambda: dist.all_reduce_coalesced([torch.ones(5), torch.ones(3)]),
        "all_reduce",
        1.5 * n,
    ),
    "all_gather": (lambda: dist.all_gather(parts(), torch.ones(2)), "all_gather", 0.75 * n),
    "all_gather_into_tensor": (
        lambda: dist.all_gather_into_tensor(torch.empty(8), torch.ones(2)),
        "all_gather",
        0.75 * n,
    ),
    "_all_gather_base": (lambda: dist._all_gather_base(torch.empty(8), torch.ones(2)), "all_gather", 0.75 * n),
    "all_gather_coalesced": (
        lambda: dist.all_gather_coalesced([[torch.ones(1), torch.ones(1)]] * N, [torch.ones(1), torch.ones(1)]),
        "all_gather",
        0.75 * n,
    ),
    "reduce_scatter": (lambda: dist.reduce_scatter(torch.empty(2), parts()), "reduce_scatter", 0.75 * n),
    "reduce_scatter_tensor": (
        lambda: dist.reduce_scatter_tensor(torch.empty(2), torch.ones(8)),
        "reduce_scatter",
        0.75 * n,
    ),
    "_reduce_scatter_base": (
        lambda: dist._reduce_scatter_base(torch.empty(2), torch.ones(8)),
        "reduce_scatter",
        0.75 * n,
    ),
    "all_to_all": (lambda: dist.all_to_all(parts(), parts()), "all_to_all", 0.75 * n),
    "all_to_all_single": (lambda: dist.all_to_all_single(torch.empty(8), torch.ones(8)), "all_to_all", 0.75 * n),
    "barrier": (lambda: dist.barrier(), "barrier", 0),
    "monitored_barrier": (lambda: dist.monitored_barrier(), "barrier", 0),
}
if hasattr(dist, "all_gather_single"):  # the names that torch 2.13 gives the two above
    EQUAL["all_gather_single"] = (lambda: dist.all_gather_single(torch.empty(8), torch.ones(2)), "all_gather", 0.75 * n)
    EQUAL["reduce_scatter_single"] = (
        lambda: dist.reduce_scatter_single(torch.empty(2), torch.ones(8)),
        "reduce_scatter",
        0.75 * n,
    )


def every_collective():
    warnings.simplefilter("ignore")
    for call, _, _ in EQUAL.values():
        call()


def test_collectives_that_cost_every_rank_the_same():
    run = measured(every_collective, N)
    for calls in run.calls:
        seen = [(call.op, call.sent, call.received) for call in calls]
        assert dict(zip(EQUAL, seen, strict=True)) == {name: (op, cost, cost) for name, (_, op, cost) in EQUAL.items()}
        assert all(call.peer is None and call.completed is not None and call.group == (0, 1, 2, 3) for call in calls)


ROOT = 1
ROOTED = {  # sent and received by rank 0, 1 (the root), 2, 3; a chain runs 1, 2, 3, 0 or back
    "broadcast": (lambda: dist.broadcast(torch.ones(8), ROOT), [(0, n), (n, 0), (n, n), (n, n)]),
    "reduce": (lambda: dist.reduce(torch.ones(8), ROOT), [(n, 0), (0, n), (n, n), (n, n)]),
    "gather": (
        lambda: dist.gather(torch.ones(2), root_has(parts()), ROOT),
        [(n / 4, 0), (0, 0.75 * n), (n / 4, 0), (n / 4, 0)],
    ),
    "scatter": (
        lambda: dist.scatter(torch.ones(2), root_has(parts()), ROOT),
        [(0, n / 4), (0.75 * n, 0), (0, n / 4), (0, n / 4)],
    ),
}


def test_collectives_with_a_root():
    def every_one():
        for call, _ in ROOTED.values():
            call()

    run = measured(every_one, N)
    for rank, calls in enumerate(run.calls):
        assert [call.op for call in calls] == list(ROOTED)
        assert [call.peer for call in calls] == [ROOT] * 4
        assert [(call.sent, call.received) for call in calls] == [cost[rank] for _, cost in ROOTED.values()]
    for op in ROOTED:
        totals = [traffic.by_operation[op] for traffic in run.traffic]
        assert sum(each.sent for each in totals) == sum(each.received for each in totals)


def test_asynchronous_collectives_cost_the_same():
    def reduce_all():
        works = [
            dist.all_reduce(torch.ones(8), async_op=True),
            dist.reduce_scatter(torch.empty(2), parts(), async_op=True),
            dist.all_gather(parts(), torch.ones(2), async_op=True),
            dist.broadcast(torch.ones(8), 0, async_op=True),
        ]
        for work in works:
            work.wait()

    for traffic in measured(reduce_all, N).traffic[1:3]:  # neither the first nor the last of the broadcast's chain
        assert (traffic.sent, traffic.received) == (4 * n, 4 * n)
        assert (traffic.messages_sent, traffic.messages_received, traffic.by_peer) == (0, 0, {})


def test_groups_cost_by_their_own_size_and_name_global_ranks():
    def in_groups():
        odd = dist.new_group([1, 3])
        triple = dist.new_group([1, 2, 3])
        rank = dist.get_rank()
        if rank in (1, 3):
            dist.all_reduce(torch.ones(8), group=odd)
            dist.broadcast(torch.ones(8), 3, group=odd)
            if rank == 1:
                dist.send(torch.ones(2), 3, group=odd)
            else:
                dist.recv(torch.empty(2), 1, group=odd)
        if rank:
            dist.all_gather([torch.empty(2) for _ in range(3)], torch.ones(2), group=triple)

    run = measured(in_groups, 4)
    calls = [[call for call in calls if call.op != "barrier"] for calls in run.calls]
    assert [[call.op for call in each] for each in calls] == [
        [],
        ["all_reduce", "broadcast", "send", "all_gather"],
        ["all_gather"],
        ["all_reduce", "broadcast", "recv", "all_gather"],
    ]
    reduced, spread, sent, gathered = calls[1]
    assert (reduced.group, reduced.sent) == ((1, 3), n)
    assert (spread.group, spread.peer, spread.sent, spread.received) == ((1, 3), 3, 0, n)
    assert (sent.peer, run.traffic[1].by_peer, run.traffic[3].by_peer) == (
        3,
        {3: Totals(1, 8, 0)},
        {1: Totals(1, 0, 8)},
    )
    assert (gathered.group, gathered.sent) == ((1, 2, 3), 2 / 3 * 3 * 2 * FLOAT)


def test_one_rank_moves_nothing():
    def alone():
        dist.all_reduce(torch.ones(8))
        dist.broadcast(torch.ones(8), 0)

    run = measured(alone, 1)
    assert (run.traffic[0].sent, run.traffic[0].received, len(run.calls[0])) == (0, 0, 2)


def test_the_coalescing_manager_is_refused_by_gloo_in_its_own_words():
    def coalesced():
        with dist._coalescing_manager(device=torch.device("cpu")):
            dist.all_reduce(torch.ones(4))

    with pytest.raises(LaunchError, match="gloo does not implement startCoalescing"):
        measured(coalesced)
