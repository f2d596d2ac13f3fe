"""Timelines from hand-made records: intervals, the hidden share, steps, and which bucket carried what."""

from __future__ import annotations

import random

import pytest

from shardlab.buckets import bucket_numbers
from shardlab.errors import UsageError
from shardlab.intervals import difference, intersection, length, union
from shardlab.records import GradientReady, Run
from shardlab.timeline import timeline_of
from timelines import call, run_of, simulated

# Intervals


@pytest.mark.parametrize(
    ("given", "merged"),
    [
        ([], []),
        ([(1, 1)], []),  # no length
        ([(2, 1)], []),  # ends before it begins
        ([(1, 2), (2, 3)], [(1, 3)]),  # they touch
        ([(4, 5), (1, 3), (2, 4.5)], [(1, 5)]),
        ([(0, 10), (2, 3)], [(0, 10)]),  # one within the other
        ([(3, 4), (1, 2)], [(1, 2), (3, 4)]),
    ],
)
def test_union(given, merged):
    assert union(given) == merged
    assert length(given) == sum(end - start for start, end in merged)


def test_intersection_and_difference():
    link, compute = [(0, 10), (20, 30)], [(5, 7), (9, 21), (29, 40)]
    assert intersection(link, compute) == intersection(compute, link) == [(5, 7), (9, 10), (20, 21), (29, 30)]
    assert difference(link, compute) == [(0, 5), (7, 9), (21, 29)]
    assert difference(compute, link) == [(10, 20), (30, 40)]
    assert intersection(link, []) == [] and difference(link, []) == link and difference([], link) == []


def test_intervals_against_counting_whole_moments():
    generator = random.Random(3)
    for _ in range(300):
        sets = []
        for _ in range(2):
            starts = [generator.randrange(30) for _ in range(generator.randrange(6))]
            sets.append([(start, start + generator.randrange(8)) for start in starts])
        first, second = ({at for start, end in one for at in range(start, end)} for one in sets)
        assert length(sets[0]) == len(first)
        assert length(intersection(*sets)) == len(first & second)
        assert length(difference(*sets)) == len(first - second)


# The hidden share


def one_rank(spans, calls):
    return timeline_of(run_of([spans], [calls])).ranks[0]


def test_hidden_is_what_the_link_carries_while_the_rank_computes():
    rank = one_rank([("backward", "a", 10.0, 14.0), ("backward", "b", 15.0, 18.0)], [call(0, 0, 11.0, (12.0, 20.0))])
    assert rank.communication_seconds == 8
    assert rank.hidden_seconds == 2 + 3
    assert rank.exposed == 1 + 2
    assert rank.hidden_share == 5 / 8
    assert rank.communication[0].exposed == ((4.0, 5.0), (8.0, 10.0))  # counted from the first span
    assert rank.communication[0].exposed_seconds == 3


def test_time_that_a_layer_stands_still_hides_nothing():
    spans = [("backward", "a", 0.0, 10.0), ("waiting", "all_reduce", 2.0, 9.0, 0, 0)]
    rank = one_rank(spans, [call(0, 0, 2.0, (3.0, 8.0))])
    assert rank.hidden_share == 0 and rank.exposed == 5
    assert rank.communication[0].waits == ((2.0, 9.0),)
    assert rank.computing == ((0.0, 2.0), (9.0, 10.0))


def test_another_threads_wait_does_not_stop_this_one():
    spans = [("backward", "a", 0.0, 10.0, 1), ("waiting", "recv", 2.0, 9.0, 2)]
    rank = one_rank(spans, [call(0, 0, 2.0, (3.0, 8.0))])
    assert rank.hidden_share == 1 and rank.waiting == ()


def test_spans_within_spans_count_once():
    spans = [("other", "step", 0.0, 10.0), ("backward", "a", 1.0, 5.0), ("recompute", "a", 2.0, 3.0)]
    rank = one_rank(spans, [call(0, 0, 0.0, (4.0, 12.0))])
    assert rank.hidden_seconds == 6
    assert [(item.label, item.level) for item in rank.compute] == [("step", 0), ("a", 1), ("a", 2)]


def test_zero_length_and_missing_times():
    spans = [("backward", "a", 0.0, 4.0), ("backward", "b", 2.0, 2.0), ("backward", "never ended", 3.0, None)]
    calls = [call(0, 0, 1.0, (1.0, 1.0)), call(0, 1, 1.0, (2.0, None)), call(0, 2, 1.0), call(0, 3, 2.0, (3.0, 6.0))]
    rank = one_rank(spans, calls)
    assert [item.label for item in rank.compute] == ["a", "b"]
    assert [item.seconds for item in rank.communication] == [0, 0, 0, 3]
    assert [item.exposed for item in rank.communication[:3]] == [(), (), ()]
    assert (rank.hidden_seconds, rank.exposed, rank.hidden_share) == (1, 2, 1 / 3)


def test_zero_is_a_time_like_any_other():
    spans = [("backward", "a", -4.0, 0.0), ("waiting", "all_reduce", -1.0, 0.0, 0, 0), ("other", "b", 2.0, 3.0)]
    rank = one_rank(spans, [call(0, 0, -2.0, (-2.0, 0.0))])
    assert [(item.began, item.ended) for item in rank.compute] == [(0, 4), (6, 7)]
    assert rank.hidden_share == 1 / 2 and rank.waiting == ((3, 4),)


def test_without_communication_nothing_is_exposed():
    for calls in ([], [call(0, 0, 1.0, (1.0, 1.0))], [call(0, 0, 5.0, (5.0, 6.0), op="barrier")]):
        rank = one_rank([("forward", "a", 0.0, 4.0)], calls)
        assert rank.hidden_share == 1 and rank.exposed == 0


def test_all_ranks_together_are_weighed_by_their_time():
    spans = [[("backward", "a", 0.0, 1.0)], [("backward", "a", 0.0, 8.0)]]
    calls = [[call(0, 0, 0.0, (0.0, 2.0))], [call(1, 0, 0.0, (0.0, 8.0))]]
    timeline = timeline_of(run_of(spans, calls))
    assert [rank.hidden_share for rank in timeline.ranks] == [0.5, 1.0]
    assert timeline.hidden_share == 9 / 10
    assert timeline.exposed == 1
    assert timeline.slowest.rank == 1


def test_without_a_link_calls_last_from_issue_to_completion():
    calls = [call(0, 0, 1.0, completed=3.0), call(0, 1, 2.0, completed=6.0), call(0, 2, 3.0)]
    timeline = timeline_of(run_of([[("backward", "a", 0.0, 4.0)]], [calls]))
    assert timeline.clock == "calls"
    rank = timeline.ranks[0]
    assert rank.communication_seconds == 5  # from 1 to 6: what they share counts once
    assert rank.hidden_share == 3 / 5
    assert rank.communication[2].ended is None and rank.communication[2].seconds == 0


def test_with_a_link_receives_are_left_to_the_senders_link():
    calls = [call(0, 0, 1.0, (1.0, 2.0), op="send"), call(0, 1, 1.0, op="recv", completed=9.0)]
    rank = one_rank([("backward", "a", 0.0, 4.0)], calls)
    assert [item.op for item in rank.communication] == ["send"]


def test_blocking_hides_nothing_and_asynchronous_nearly_all():
    blocking, hidden = simulated(4, how="blocking"), simulated(4)
    assert blocking.hidden_share == 0
    assert blocking.exposed == pytest.approx(4 * 1.5e-3)
    assert hidden.hidden_share > 0.7  # three of four reductions run under the next layer
    assert hidden.exposed < 2e-3
    assert [rank.overlapping for rank in hidden.ranks] == [3] * 4
    assert hidden.overlapping == 3


def test_one_bucket_overlaps_with_nothing():
    timeline = simulated(2, bucket=4)
    assert timeline.overlapping == 0
    assert timeline.hidden_share < 0.01


# Steps


def two_steps():
    spans, calls = [], []
    for start in (100.0, 200.0):
        spans += [
            ("forward", "a", start, start + 1),
            ("forward", "b", start + 1, start + 2),
            ("backward", "b", start + 3, start + 5),
            ("recompute", "a", start + 5, start + 5.5),
            ("backward", "a", start + 5, start + 7),
            ("other", "optimizer", start + 12, start + 13),
        ]
        calls.append(call(0, len(calls), start + 4, (start + 4, start + 6), 10 * start))
    return run_of([spans], [calls])


def test_a_step_begins_with_a_forward_after_a_backward():
    for step, numel in ((0, 1000), (1, 2000), (-1, 2000), (-2, 1000)):
        timeline = timeline_of(two_steps(), step=step)
        (rank,) = timeline.ranks
        assert [item.label for item in rank.compute] == ["a", "b", "b", "a", "a", "optimizer"]
        assert rank.compute[0].began == 0 and rank.compute[-1].ended == 13
        assert [item.bytes for item in rank.communication] == [4 * numel]
        assert timeline.seconds == 13
    whole = timeline_of(two_steps())
    assert len(whole.ranks[0].compute) == 12 and whole.seconds == 113


def test_zero_is_the_first_span_of_any_rank():
    spans = [[("forward", "a", 7.0, 8.0)], [("forward", "a", 5.0, 6.0)]]
    timeline = timeline_of(run_of(spans, [[], [call(1, 0, 4.0, (4.0, 4.5))]]))
    assert [rank.compute[0].began for rank in timeline.ranks] == [2.0, 0.0]
    assert timeline.ranks[1].communication == (), "it was over before the first span"


@pytest.mark.parametrize("step", [2, -3])
def test_a_step_that_is_not_there(step):
    with pytest.raises(UsageError, match=f"no step {step}; this run has 2"):
        timeline_of(two_steps(), step=step)


@pytest.mark.parametrize(
    "run", [Run(2, "cpu", "gloo", 1.0, [0, 0]), run_of([[("waiting", "all_reduce", 0.0, 1.0)]], [[]])]
)
def test_a_run_without_spans_says_how_to_get_them(run):
    with pytest.raises(UsageError, match="watch_layers"):
        timeline_of(run)


def test_a_rank_without_spans_has_an_empty_row():
    timeline = timeline_of(run_of([[("forward", "a", 1.0, 2.0)], []], [[], []]), step=0)
    assert timeline.ranks[1].compute == () and timeline.ranks[1].hidden_share == 1


# Buckets

PARAMETERS = (100, 30, 70, 5)  # elements


def gradients(order=(3, 2, 1, 0), dtypes=("float32",) * 4):
    return [GradientReady(0, f"p{n}", n, PARAMETERS[n], dtypes[n], 1.0 + i) for i, n in enumerate(order)]


def numbers(*reductions, ready=None):
    """reductions: (time, elements[, dtype[, op]])"""
    calls = []
    for time, elements, *more in reductions:
        dtype, op = (*more, *("float32", "all_reduce")[len(more) :])
        calls.append(call(0, len(calls), time, (time, time), elements, op, dtype=dtype))
    return bucket_numbers(calls, ready or gradients())


def test_a_bucket_is_known_by_its_size_and_time():
    assert numbers((2.5, 75), (4.5, 130)) == ({0: 0, 1: 1}, {3: 0, 2: 0, 1: 1, 0: 1})
    assert numbers((1.1, 5), (2.1, 70), (3.1, 30), (4.1, 100))[1] == {3: 0, 2: 1, 1: 2, 0: 3}


def test_gradients_may_be_ready_in_another_order_than_they_travel():
    late_last = gradients((2, 3, 1, 0))
    assert numbers((2.5, 75), (4.5, 130), ready=late_last)[1] == {3: 0, 2: 0, 1: 1, 0: 1}
    assert numbers((1.5, 70), (2.5, 5), (3.5, 30), (4.5, 100), ready=late_last)[1] == {2: 0, 3: 1, 1: 2, 0: 3}


def test_what_carries_no_gradients_has_no_number():
    flags, broadcast = (5.0, 4, "uint8"), (5.1, 205, "float32", "broadcast")
    assert numbers((2.5, 75), (4.5, 130), flags, broadcast)[0] == {0: 0, 1: 1}


def test_each_dtype_has_buckets_of_its_own():
    mixed = gradients(dtypes=("float32", "float16", "float32", "float16"))
    assert numbers((3.5, 35, "float16"), (4.5, 170), ready=mixed)[1] == {3: 0, 1: 0, 2: 1, 0: 1}
    assert numbers((2.5, 75), (4.5, 130), ready=gradients(dtypes=("float16",) * 4))[1] == {3: 0, 2: 0, 1: 1, 0: 1}


def test_unknown_contents_leave_only_numbers():
    for calls in (((2.5, 76), (4.5, 130)), ((2.5, 75),), ((1.5, 75), (4.5, 130))):  # sizes; too few; before it is ready
        by_call, by_parameter = numbers(*calls)
        assert by_parameter == {} and list(by_call.values()) == list(range(len(calls)))


def test_a_layer_tells_the_buckets_of_its_gradients():
    backward = [item for item in simulated(2, bucket=2).ranks[0].compute if item.kind == "backward"]
    assert [item.buckets for item in backward] == [(0,), (0,), (1,), (1,)]
    assert [item.bucket for item in simulated(2, bucket=2).ranks[0].communication] == [0, 1]
