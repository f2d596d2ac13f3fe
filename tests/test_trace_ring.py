"""`trace_ring`: the pictures' data, from right and wrong solutions."""

from __future__ import annotations

import pytest

from shardlab import trace_ring
from shardlab.errors import LaunchError, UsageError
from shardlab.records import RingTrace
from shardlab.theory import ring_sent_chunks
from zoo import specimens

ZOO = {(specimen.exercise, specimen.name): specimen.solution for specimen in specimens("04")}


def trace(name: str, phase: str, world_size: int = 3, **how: object) -> RingTrace:
    return trace_ring(ZOO[f"04.ring_{phase}", name], world_size, phase=phase, **how)  # type: ignore[arg-type]


def is_complete(held: tuple) -> bool:
    return all(counts == (1,) * len(held) for rank in held for counts in rank)


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_the_plain_all_reduce(world_size: int) -> None:
    steps = trace("ring_all_reduce", "all_reduce", world_size).steps
    assert [step.phase for step in steps] == [
        "",
        *["reduce-scatter"] * (world_size - 1),
        *["all-gather"] * (world_size - 1),
    ]
    for number, step in enumerate(steps[1:]):
        for move in step.transfers:
            assert move.destination == (move.source + 1) % world_size
            assert move.chunk == ring_sent_chunks("all_reduce", world_size, move.source)[number]
            assert move.bytes == 4 * 8
        assert len(step.transfers) == world_size
    half = steps[world_size - 1].held
    assert all(half[rank][rank] == (1,) * world_size for rank in range(world_size))
    assert not is_complete(half)
    assert is_complete(steps[-1].held)


def test_the_start() -> None:
    held = trace("ring_all_reduce", "all_reduce").steps[0].held
    assert held[1] == ((0, 1, 0),) * 3
    held = trace("ring_all_gather", "all_gather").steps[0].held
    assert held[1] == (None, (1, 1, 1), None)


@pytest.mark.parametrize(
    "name",
    [specimen.name for specimen in specimens("04") if specimen.exercise == "04.ring_all_reduce" and not specimen.wrong],
)
def test_every_right_all_reduce_ends_complete(name: str) -> None:
    steps = trace(name, "all_reduce").steps
    assert is_complete(steps[-1].held)
    assert len(steps) == 5
    assert all(move.chunk is not None for step in steps for move in step.transfers)
    assert [step.phase for step in steps[1:]] == ["reduce-scatter"] * 2 + ["all-gather"] * 2


@pytest.mark.parametrize("name", ["ring_reduce_scatter", "rs_counter_clockwise", "rs_even_odd_blocking"])
def test_reduce_scatter_ends_with_the_own_chunk(name: str) -> None:
    steps = trace(name, "reduce_scatter").steps
    assert len(steps) == 3
    assert all(steps[-1].held[rank][rank] == (1, 1, 1) for rank in range(3))


def test_a_padded_copy_is_followed_as_it_changes() -> None:
    steps = trace("ar_pads_to_a_multiple", "all_reduce").steps
    assert steps[1].held[0][2] == (1, 0, 1)


def test_uneven_and_empty_chunks() -> None:
    steps = trace("ring_all_reduce", "all_reduce", 4, numel=6).steps
    assert is_complete(steps[-1].held)
    steps = trace("ring_all_reduce", "all_reduce", 3, numel=0).steps
    assert steps[-1].held[0][0] == (0, 0, 0)


def test_alone_there_is_nothing_to_see() -> None:
    assert len(trace("ring_all_reduce", "all_reduce", 1).steps) == 1


# Wrong solutions look wrong


def test_a_chunk_that_ends_in_the_wrong_place() -> None:
    held = trace("rs_ends_one_chunk_too_far", "reduce_scatter").steps[-1].held
    assert all(held[rank][(rank + 1) % 3] == (1, 1, 1) for rank in range(3))
    assert all(held[rank][rank] != (1, 1, 1) for rank in range(3))


def test_one_step_too_many() -> None:
    assert len(trace("rs_n_steps", "reduce_scatter").steps) == 1 + 3


def test_a_part_counted_twice() -> None:
    held = trace("ar_second_phase_adds", "all_reduce").steps[-1].held
    assert any(counts is not None and max(counts) > 1 for rank in held for counts in rank)


def test_garbage_that_is_added_to_stays_garbage() -> None:
    held = trace("ag_adds", "all_gather").steps[-1].held
    assert held[0] == ((1, 1, 1), None, None)


def test_mixed_chunks_are_no_sum() -> None:
    held = trace("rs_index_runs_the_wrong_way", "reduce_scatter").steps[-1].held
    assert any(counts is None for rank in held for counts in rank)


def test_the_whole_tensor_is_no_chunk() -> None:
    steps = trace("ar_through_rank_zero", "all_reduce").steps
    assert {move.chunk for step in steps for move in step.transfers} == {None}
    assert all(step.phase == "" for step in steps)


def test_a_result_that_is_not_written_back() -> None:
    held = trace("ar_returns_a_new_tensor", "all_reduce").steps[-1].held
    assert held[0] == ((1, 0, 0),) * 3


def test_a_deadlock_is_reported() -> None:
    with pytest.raises(LaunchError, match="Deadlock"):
        trace("rs_send_first_blocking", "reduce_scatter")


@pytest.mark.parametrize(
    "how",
    [{"phase": "ring"}, {"world_size": 13}, {"world_size": 0}, {"world_size": "4"}, {"numel": -1}, {"numel": 2.5}],
)
def test_what_cannot_be_followed(how: dict) -> None:
    with pytest.raises(UsageError):
        trace_ring(**{"fn": print, "world_size": 2} | how)
    with pytest.raises(UsageError):
        trace_ring(3, 2)  # type: ignore[arg-type]
