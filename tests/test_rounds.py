"""Rounds of a broadcast, counted from records alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.records import Call
from shardlab.rounds import broadcast_rounds
from shardlab.theory import tree_rounds


def record(world_size: int, *messages: tuple[int, int], op: str = "send") -> list[list[Call]]:
    """The calls of all ranks, when these messages (from, to) are sent in this order."""
    calls: list[list[Call]] = [[] for _ in range(world_size)]

    def add(rank: int, op: str, peer: int | None) -> None:
        calls[rank].append(Call(rank, len(calls[rank]), op, peer, 1, "float32", 4.0, 0.0, 0.0))

    for source, target in messages:
        add(target, "recv", source)
        add(source, op, target)
    return calls


def test_a_chain_has_a_round_for_each_message() -> None:
    assert broadcast_rounds(record(4, (0, 1), (1, 2), (2, 3))) == [[(0, 1)], [(1, 2)], [(2, 3)]]


def test_a_star_has_a_round_for_each_message() -> None:
    assert broadcast_rounds(record(4, (2, 0), (2, 1), (2, 3)), root=2) == [[(2, 0)], [(2, 1)], [(2, 3)]]


def test_a_tree_sends_side_by_side() -> None:
    assert broadcast_rounds(record(4, (0, 2), (0, 1), (2, 3))) == [[(0, 2)], [(0, 1), (2, 3)]]


def test_who_serves_its_largest_part_last_is_late() -> None:
    assert len(broadcast_rounds(record(4, (0, 1), (0, 2), (2, 3)))) == 3


def test_the_order_in_which_ranks_are_looked_at_does_not_matter() -> None:
    """Rank 1 gets the data late, from rank 3, though its number is low."""
    assert broadcast_rounds(record(4, (0, 2), (2, 3), (3, 1))) == [[(0, 2)], [(2, 3)], [(3, 1)]]


def test_a_second_copy_changes_nothing() -> None:
    rounds = broadcast_rounds(record(3, (0, 1), (1, 2), (0, 2)))
    assert rounds == [[(0, 1)], [(0, 2), (1, 2)]]


def test_messages_of_ranks_without_the_data_do_not_count() -> None:
    assert broadcast_rounds(record(4, (2, 3), (3, 2), (0, 1))) == [[(0, 1)]]
    assert broadcast_rounds(record(3, (1, 2)), root=0) == []


def test_collectives_and_nothing_at_all() -> None:
    assert broadcast_rounds(record(3, (0, 1), op="barrier")) == []
    assert broadcast_rounds([[]]) == []


@given(st.integers(1, 64), st.data())
def test_doubling_takes_the_rounds_of_a_tree(world_size: int, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, world_size - 1))
    messages, distance = [], 1
    while distance < world_size:
        for me in range(min(distance, world_size - distance)):
            messages.append(((root + me) % world_size, (root + me + distance) % world_size))
        distance *= 2
    rounds = broadcast_rounds(record(world_size, *messages), root)
    assert len(rounds) == tree_rounds(world_size)
    assert sorted(message for messages in rounds for message in messages) == sorted(messages)


@pytest.mark.parametrize("world_size", range(2, 9))
def test_no_broadcast_is_quicker_than_a_tree(world_size: int) -> None:
    chain = record(world_size, *((rank, rank + 1) for rank in range(world_size - 1)))
    assert len(broadcast_rounds(chain)) == world_size - 1 >= tree_rounds(world_size)
