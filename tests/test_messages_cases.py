"""Lab 00: the data on which solutions are tried, and what is said about them. Nothing is launched here."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from shardlab.checks.marked import Marks
from shardlab.checks.messages import broadcast_cases, token_cases
from shardlab.checks.messages_cases import BroadcastCase, TokenCase, contents, same


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_ranks_differ_wherever_they_broadcast(n: int) -> None:
    for case in broadcast_cases(n):
        assert isinstance(case, BroadcastCase)
        tensors = [case.of(rank) for rank in range(n)]
        if not case.nan:
            assert not any(same(one, two) for one, two in combinations(tensors, 2)), case.name
        assert not any(same(tensors[case.root], tensors[rank]) for rank in range(n) if rank != case.root), case.name


@pytest.mark.parametrize(
    ("dtype", "smaller"), [(torch.float64, torch.float32), (torch.float32, torch.float16), (torch.int64, torch.int32)]
)
def test_a_detour_through_a_smaller_type_shows(dtype: torch.dtype, smaller: torch.dtype) -> None:
    values = BroadcastCase((5,), 0, dtype).of(0)
    assert not same(values.to(smaller).to(dtype), values)


def test_every_root_is_tried() -> None:
    for n in range(1, 9):
        roots = {case.root for case in broadcast_cases(n) if isinstance(case, BroadcastCase)}
        assert roots == set(range(n))


@pytest.mark.parametrize("n", [1, 2, 5])
def test_tokens_can_be_read(n: int) -> None:
    """The sum of everything, counted twice, still tells whose part is in it how often."""
    for case in token_cases(n):
        if isinstance(case, TokenCase) and case.kind == "marked":
            marks = Marks(n + 2, case.dtype)
            for index, number in enumerate((2 * torch.stack(case.parts(n)).sum(0)).tolist()):
                mark = marks.read(number)
                assert mark is not None
                assert (mark.counts, mark.position) == ((2,) * (n + 2), index)


def test_same_means_bit_for_bit() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert same(nan, nan.clone())
    assert not same(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same(torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64))


def test_contents_in_words() -> None:
    assert contents([1, 2, 0], 1, 0) == "the token, rank 0's part and rank 1's part 2 times"
    assert contents([0, 0], 1, 0) == "the token alone"
    assert contents([0, 1], 0, 1) == "rank 1's part and what stood there before the call"
