"""Shard maps from records made by hand: no rank runs."""

from __future__ import annotations

import pytest

from shardlab.errors import UsageError
from shardlab.records import MemorySample, RankMemory, Run
from shardlab.shard_map import shard_map
from shardlab.state_records import Flight, RankStates, StateFrame
from shardlab.theory import FP32_ADAM

NAMES = ("a", "b")


def frame(time, kind="mark", label="", ends=False, until=None, **held):
    return StateFrame(time, kind, label, held, ends, time if until is None else until)


def run_of(*ranks, memory=None):
    memory = memory or [RankMemory(rank.rank) for rank in ranks]
    return Run(len(ranks), "cpu", "gloo", 1.0, [None] * len(ranks), memory=memory, states=[[rank] for rank in ranks])


def rank_of(rank, *frames, sizes=(4, 6), flights=()):
    return RankStates(rank, NAMES, sizes, list(frames), list(flights))


def whole(kind="weights"):
    return {kind: ((0, 0, 4), (1, 0, 6))}


def test_elements_are_numbered_over_all_parameters():
    record = shard_map(run_of(rank_of(0, frame(0, weights=((0, 1, 4), (1, 0, 2), (1, 5, 6))))))
    assert [(c.name, c.start, c.stop) for c in record.columns] == [("a", 0, 4), ("b", 4, 10)]
    assert record.frames[0].ranks[0].held == {"weights": ((1, 6), (9, 10))}
    assert record.psi == 10 and record.share(0, 0, "weights") == 0.6 and record.share(0, 0, "gradients") == 0


def test_sizes_that_one_rank_does_not_know_come_from_the_others():
    """A ZeRO-3 parameter is empty outside its layer: a rank knows only its own piece."""
    first = rank_of(0, frame(0, weights=((0, 0, 2),)), sizes=(2, 0))
    second = rank_of(1, frame(0, weights=((0, 2, 4), (1, 0, 6))), sizes=(4, 6))
    record = shard_map(run_of(first, second), "zero3")
    assert record.psi == 10
    assert record.frames[0].ranks[1].held == {"weights": ((2, 10),)}


def test_owners_hold_the_optimizer_state_alone():
    ranks = [
        rank_of(0, frame(0, **whole(), first_moment=((0, 0, 4),), master=((1, 0, 1),))),
        rank_of(1, frame(0, **whole(), first_moment=((0, 2, 4), (1, 0, 3)))),
    ]
    record = shard_map(run_of(*ranks))
    # 0 and 1: rank 0's. 2 and 3, and element 4 (rank 0's master): both ranks hold something. 7 to 9: no state.
    assert record.owners == ((0, 2, 0), (2, 5, None), (5, 7, 1), (7, 10, None))
    assert record.own(1) == ((5, 7),)
    assert record.foreign(0, 1, "first_moment") == ((2, 4),)
    # Of what nobody owns alone, only what others hold as well is too much.
    assert record.left_over(1) == record.left_over(0) == {"first_moment": ((2, 4),)}


def test_frozen_parameters_belong_to_who_alone_holds_the_weights():
    ranks = [
        rank_of(0, frame(0, weights=((0, 0, 2), (1, 0, 6)), first_moment=((1, 0, 3),))),
        rank_of(1, frame(0, weights=((0, 2, 4),), first_moment=((1, 3, 6),))),
    ]
    record = shard_map(run_of(*ranks), "zero3")
    assert record.owners == ((0, 2, 0), (2, 4, 1), (4, 7, 0), (7, 10, 1))
    assert record.left_over(0) == {"weights": ((7, 10),)} and record.left_over(1) == {}


@pytest.mark.parametrize(
    ("strategy", "kinds"),
    [
        ("ddp", set()),
        ("zero1", {"first_moment"}),
        ("zero2", {"first_moment", "gradients"}),
        ("zero3", {"first_moment", "gradients", "weights"}),
    ],
)
def test_what_is_left_over_depends_on_the_strategy(strategy, kinds):
    everything = {kind: ((0, 0, 4), (1, 0, 6)) for kind in ("weights", "gradients", "first_moment")}
    record = shard_map(run_of(rank_of(0, frame(0, **everything)), rank_of(1, frame(0, **everything))), strategy)
    assert record.left_over(0) == record.left_over(1) == dict.fromkeys(kinds, ((0, 10),))


def test_in_flight_from_issue_until_complete_and_only_what_is_alive():
    flights = [
        Flight("reduce_scatter", "gradients", ((0, 0, 4),), 1.0, 3.0),
        Flight("all_gather", "weights", ((1, 0, 6),), 2.5, float("inf")),
    ]
    frames = [frame(t, gradients=((0, 1, 4),), weights=((1, 0, 6),)) for t in (0.5, 1.0, 2.0, 2.9, 3.0, 4.0)]
    record = shard_map(run_of(rank_of(0, *frames, flights=flights)))
    flying = [f.ranks[0].flying for f in record.frames]
    gradients, weights = {"gradients": ((1, 4),)}, {"weights": ((4, 10),)}
    assert flying == [{}, gradients, gradients, gradients | weights, weights, weights]


def test_a_wait_shows_what_is_in_flight_while_it_lasts():
    """A ring in a thread of its own may begin after the thread that trains has begun to wait for it."""
    flights = [Flight("send", "gradients", ((0, 0, 4),), 1.5, 1.9)]
    frames = [
        frame(0.0, gradients=((0, 0, 4),)),
        frame(1.0, "waiting", "a thread", until=2.0, gradients=((0, 0, 4),)),
        frame(2.0, "waiting", "a thread", ends=True, gradients=((0, 0, 4),)),
        frame(2.1, "end", gradients=((0, 0, 4),)),
    ]
    record = shard_map(run_of(rank_of(0, *frames, flights=flights)))
    assert [(f.kind, f.ends, bool(f.ranks[0].flying)) for f in record.frames] == [
        ("mark", False, False),
        ("waiting", False, True),
        ("end", False, False),
    ]


def test_ends_that_change_nothing_are_no_frames():
    held = whole()
    frames = [
        frame(0, "start", **held),
        frame(1, "forward", "a", **held),
        frame(2, "forward", "a", ends=True, **held),  # nothing: left out
        frame(3, "forward", "b", **held),
        frame(4, "forward", "b", ends=True, weights=((0, 0, 4),)),  # b is freed
        frame(5, "end", weights=((0, 0, 4),)),
    ]
    record = shard_map(run_of(rank_of(0, *frames)))
    assert [(f.kind, f.label, f.ends) for f in record.frames] == [
        ("start", "", False),
        ("forward", "a", False),
        ("forward", "b", False),
        ("forward", "b", True),
        ("end", "", False),
    ]


def test_ranks_are_shown_at_the_same_place_of_their_program():
    first = rank_of(0, frame(0, "start"), frame(1, "call", "x", weights=((0, 0, 1),)), frame(2, "end"))
    second = rank_of(1, frame(5, "start", weights=((1, 0, 1),)), frame(6, "end"))
    record = shard_map(run_of(first, second))
    assert [(f.kind, f.on) for f in record.frames] == [("start", (0, 1)), ("call", (0,)), ("end", (0, 1))]
    assert [f.ranks[1].held for f in record.frames] == [{"weights": ((4, 5),)}, {"weights": ((4, 5),)}, {}]


def test_bytes_are_the_meters_and_the_formula_is_theorys():
    samples = [MemorySample(0.0, 100, 40, 20, 30), MemorySample(2.0, 150, 40, 60, 30)]
    frames = [frame(t, **whole()) for t in (-1.0, 1.0, 2.0, 3.0)]
    record = shard_map(
        run_of(rank_of(0, *frames), rank_of(1, *frames), memory=[RankMemory(0, samples), RankMemory(1)]),
        "zero1",
        state=FP32_ADAM,
    )
    assert [f.ranks[0].state_bytes for f in record.frames] == [0, 90, 130, 130]
    assert record.most(0) == 130 and record.most(1) == 0
    assert record.formula == 10 * (4 + 4) + 10 * 8 / 2
    assert record.title == "shard map, zero1"


def test_what_cannot_be_made_into_a_map():
    run = run_of(rank_of(0, frame(0)), rank_of(1, frame(0)))
    with pytest.raises(UsageError, match="no strategy; there are ddp, zero1, zero2, zero3"):
        shard_map(run, "zero4")
    with pytest.raises(UsageError, match="no watch 1; on some rank `watch_states` was open 1 times"):
        shard_map(run, watch=1)
    for states in ([], [[], []], [run.states[0], []]):
        with pytest.raises(UsageError, match="no snapshots of every rank"):
            shard_map(Run(2, "cpu", "gloo", 1.0, [], states=states))
    other = RankStates(1, ("a", "c"), (4, 6), [frame(0)])
    with pytest.raises(UsageError, match="different parameters"):
        shard_map(run_of(rank_of(0, frame(0)), other))
