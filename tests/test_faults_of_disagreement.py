"""Ranks whose calls differ are told so, even when the library would end with wrong numbers."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from launching import fault

cloudpickle.register_pickle_by_value(sys.modules[__name__])


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
    assert "test_faults_of_disagreement.py, line " in error.report
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
