"""Events of several ranks side by side."""

from __future__ import annotations

import random

from shardlab.programs import side_by_side


def shown(ranks):
    return [
        "".join("." if number is None else ranks[rank][number] for rank, number in enumerate(row))
        for row in side_by_side(ranks)
    ]


def test_equal_programs_are_side_by_side():
    assert shown(["abcab", "abcab", "abcab"]) == ["aaa", "bbb", "ccc", "aaa", "bbb"]


def test_what_only_some_ranks_do_stands_alone():
    assert shown(["abd", "abcd", "abd"]) == ["aaa", "bbb", ".c.", "ddd"]
    assert shown(["abcd", "ad", "acd"]) == ["aaa", "b..", "c.c", "ddd"]
    assert shown(["ab", "", "b"]) == ["a..", "b.b"]
    assert shown([]) == [] and shown([""]) == []


def test_every_event_is_there_once_and_in_its_ranks_order():
    draw = random.Random(0)
    for _ in range(200):
        ranks = [[draw.choice("abc") for _ in range(draw.randrange(12))] for _ in range(4)]
        rows = side_by_side(ranks)
        for rank, events in enumerate(ranks):
            numbers = [row[rank] for row in rows if row[rank] is not None]
            assert numbers == list(range(len(events)))
        for row in rows:
            assert len({ranks[rank][number] for rank, number in enumerate(row) if number is not None}) == 1
