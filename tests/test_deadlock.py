"""The search for deadlocks and disagreements, on hand-made statuses: no processes, no time."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from shardlab.runtime.board import FINISHED, RUNNING, WAITING, GroupCount, RankStatus
from shardlab.runtime.deadlock import Deadlock, find_deadlock
from shardlab.runtime.disagreement import all_match, first_difference, first_unmatched, may_differ
from shardlab.runtime.history import Record

WORLD = 77  # the path of the group of all ranks


def message_path(source: int, target: int, tag: int = 0) -> int:
    return 1000 + 100 * tag + 10 * source + target


def ranks(*statuses: RankStatus) -> list[RankStatus]:
    """Fills in what the statuses leave out: nobody has sent or received anything."""
    none = (0,) * len(statuses)
    everyone = tuple(range(len(statuses)))
    filled = []
    for rank, status in enumerate(statuses):
        blank = {name: none for name in ("sends", "receives", "send_digests", "receive_digests")}
        given = {name: value for name in blank if (value := getattr(status, name))}
        members = everyone if status.path == WORLD else status.members
        filled.append(replace(status, rank=rank, members=members, **{**blank, **given}))
    return filled


def running() -> RankStatus:
    return RankStatus(0, RUNNING)


def finished(collectives: int = 0) -> RankStatus:
    return RankStatus(0, FINISHED, groups={WORLD: GroupCount(collectives)} if collectives else {})


def sending(rank: int, peer: int, number: int = 1, tag: int = 0) -> RankStatus:
    return RankStatus(0, WAITING, op="send", peer=peer, index=0, path=message_path(rank, peer, tag), number=number)


def receiving(rank: int, peer: int, number: int = 1, tag: int = 0) -> RankStatus:
    return RankStatus(0, WAITING, op="recv", peer=peer, index=0, path=message_path(peer, rank, tag), number=number)


def from_anybody(number: int = 1) -> RankStatus:
    return RankStatus(0, WAITING, op="recv", index=0, number=number, from_anybody=number)


def collective(number: int = 1) -> RankStatus:
    return RankStatus(0, WAITING, op="barrier", index=0, path=WORLD, number=number, groups={WORLD: GroupCount(number)})


def search(statuses: list[RankStatus], issued: dict[tuple[int, int], int] | None = None) -> Deadlock | None:
    """issued: (rank, path) -> messages; what waiting ranks wait for counts without being named."""
    counts = {(status.rank, status.path): status.number for status in statuses if status.op in ("send", "recv")}
    counts |= issued or {}
    return find_deadlock(statuses, range(len(statuses)), lambda rank, path: counts.get((rank, path), 0))


def test_everyone_sends_first() -> None:
    found = search(ranks(sending(0, 1), sending(1, 2), sending(2, 0)))
    assert found == Deadlock({0: (1,), 1: (2,), 2: (0,)}, (0, 1, 2))


def test_a_circle_starts_at_its_lowest_rank_and_leaves_out_the_tail() -> None:
    found = search(ranks(sending(0, 2), sending(1, 2), sending(2, 1)))
    assert found is not None and found.cycle == (1, 2) and set(found.stuck) == {0, 1, 2}


def test_a_send_that_meets_its_receive_goes_on() -> None:
    assert search(ranks(sending(0, 1), receiving(1, 0))) is None


def test_a_wait_for_a_running_rank_is_none() -> None:
    assert search(ranks(receiving(0, 1), running())) is None
    assert search(ranks(receiving(0, 1), receiving(1, 2), running())) is None
    assert search(ranks(collective(), collective(), running())) is None


def test_a_wait_for_a_finished_rank() -> None:
    assert search(ranks(receiving(0, 1), finished())) == Deadlock({0: (1,)}, ())
    assert search(ranks(receiving(0, 1), finished()), {(1, message_path(1, 0)): 1}) is None  # sent before it finished


def test_a_collective_that_one_rank_has_finished_without() -> None:
    assert search(ranks(collective(2), collective(2), finished(1))) == Deadlock({0: (2,), 1: (2,)}, ())
    assert search(ranks(collective(2), collective(2), finished(2))) is None


def test_who_waits_for_a_stuck_rank_is_stuck() -> None:
    found = search(ranks(receiving(0, 1), finished(), receiving(2, 0)))
    assert found is not None and found.stuck == {0: (1,), 2: (0,)}


def test_a_collective_against_a_receive() -> None:
    found = search(ranks(collective(), receiving(1, 0)))
    assert found is not None and found.cycle == (0, 1)


def test_only_ranks_that_stand_still_count() -> None:
    statuses = ranks(sending(0, 1), sending(1, 0))
    assert find_deadlock(statuses, [0], lambda rank, path: 0) is None


def test_tags_are_told_apart() -> None:
    found = search(ranks(receiving(0, 1, tag=3), receiving(1, 0)), {(1, message_path(1, 0, tag=5)): 1})
    assert found is not None and found.cycle == (0, 1)


def test_forgotten_calls_raise_no_alarm() -> None:
    assert find_deadlock(ranks(sending(0, 1), sending(1, 0)), [0, 1], lambda rank, path: None) is None


def test_from_anybody_needs_one_message() -> None:
    assert search(ranks(from_anybody(), finished(), running())) is None
    assert search(ranks(from_anybody(), finished(), finished())) == Deadlock({0: (1, 2)}, ())
    sent = replace(finished(), sends=(1, 0, 0))
    assert search(ranks(from_anybody(), sent, finished())) is None
    assert search(ranks(from_anybody(2), sent, finished())) is not None  # the one message has been taken
    taken_by_name = replace(from_anybody(), receives=(0, 1, 0))
    assert search(ranks(taken_by_name, sent, finished())) is not None


@st.composite
def programs(draw: st.DrawFn) -> list[list[tuple[str, int]]]:
    """For each rank a list of blocking calls: ("send", peer), ("recv", peer) or ("all", 0)."""
    world = draw(st.integers(2, 4))
    one = st.tuples(st.sampled_from(["send", "recv", "all"]), st.integers(0, world - 1))
    programs = [draw(st.lists(one, max_size=4)) for _ in range(world)]
    return [[call for call in calls if call[0] == "all" or call[1] != rank] for rank, calls in enumerate(programs)]


@given(programs())
def test_found_exactly_when_a_simulation_comes_to_a_halt(programs: list[list[tuple[str, int]]]) -> None:
    """Runs the programs step by step by other rules; whoever has not come to the end then is stuck."""
    world = range(len(programs))
    at = [0] * len(programs)

    def head(rank: int) -> tuple[str, int] | None:
        return programs[rank][at[rank]] if at[rank] < len(programs[rank]) else None

    moved = True
    while moved:
        moved = False
        for rank in world:
            now = head(rank)
            if now is not None and now[0] == "send" and head(now[1]) == ("recv", rank):
                at[rank] += 1
                at[now[1]] += 1
                moved = True
        if all((now := head(rank)) is not None and now[0] == "all" for rank in world):
            at = [place + 1 for place in at]
            moved = True
    statuses, issued = [], {}
    for rank in world:
        done, now = programs[rank][: at[rank]], head(rank)
        begun = done + ([now] if now is not None else [])
        for op, peer in begun:
            if op != "all":
                path = message_path(rank, peer) if op == "send" else message_path(peer, rank)
                issued[rank, path] = issued.get((rank, path), 0) + 1
        collectives = sum(op == "all" for op, _ in begun)
        if now is None:
            statuses.append(finished(collectives))
        elif now[0] == "all":
            statuses.append(collective(collectives))
        else:
            make = sending if now[0] == "send" else receiving
            status = make(rank, now[1])
            number = issued[rank, status.path]
            groups = {WORLD: GroupCount(collectives)} if collectives else {}
            statuses.append(replace(status, number=number, groups=groups))
    found = search(ranks(*statuses), issued)
    stuck = {rank for rank in world if head(rank) is not None}
    assert (set(found.stuck) if found else set()) == stuck
    if found and found.cycle:
        for rank, following in zip(found.cycle, found.cycle[1:] + found.cycle[:1], strict=True):
            assert following in found.stuck[rank]


# Disagreements


def call(rank: int, number: int = 1, op: str = "all_reduce", numel: int = 4, **more) -> Record:
    return Record(rank, more.pop("path", WORLD), number, op, numel, more.pop("dtype", "float32"), **more)


def counted(*digests: tuple[int, int]) -> list[RankStatus]:
    everyone = tuple(range(len(digests)))
    statuses = [RankStatus(0, FINISHED, groups={WORLD: GroupCount(*digest, everyone)}) for digest in digests]
    return ranks(*statuses)


def test_digests_are_compared_at_equal_counts() -> None:
    assert not may_differ(counted((3, 9), (3, 9)))
    assert not may_differ(counted((3, 9), (4, 5)))  # one is only further
    assert may_differ(counted((3, 9), (3, 8), (4, 5)))
    assert all_match(counted((3, 9), (3, 9)))
    assert not all_match(counted((3, 9), (4, 5)))
    assert not all_match(counted((3, 9), (3, 8)))


def test_the_first_difference_is_the_earliest() -> None:
    histories = [
        [call(0, 1, time=1.0), call(0, 2, numel=5, time=2.0), call(0, 3, "barrier", time=3.0)],
        [call(1, 1, time=1.1), call(1, 2, numel=6, time=2.1), call(1, 3, time=3.1)],
    ]
    found = first_difference(histories, counted((3, 1), (3, 2)))
    assert found is not None and [record.number for record in found.records] == [2, 2]
    assert found.odd == 1


def test_each_part_of_a_call_counts() -> None:
    base = call(0)
    for other in (
        call(1, op="reduce"),
        call(1, numel=5),
        call(1, dtype="int32"),
        call(1, peer=0),
    ):
        assert first_difference([[base], [other]], counted((1, 1), (1, 2))) is not None
    assert first_difference([[base], [call(1)]], counted((1, 1), (1, 1))) is None


def test_sizes_may_differ_where_the_operation_allows_it() -> None:
    histories = [[call(0, op="reduce_scatter", uneven=True)], [call(1, op="reduce_scatter", numel=9, uneven=True)]]
    assert first_difference(histories, counted((1, 1), (1, 1))) is None


def test_the_odd_one_out_is_blamed() -> None:
    histories = [[call(0, numel=5)], [call(1)], [call(2)]]
    found = first_difference(histories, counted((1, 1), (1, 2), (1, 2)))
    assert found is not None and found.odd == 0


def test_a_call_that_a_finished_rank_never_made() -> None:
    histories = [[call(0, 1), call(0, 2)], [call(1, 1)]]
    found = first_unmatched(histories, counted((2, 1), (1, 2)))
    assert found is not None and found.absent == (1,) and found.odd == 1


def test_messages_meet_by_path_and_number() -> None:
    path = message_path(0, 1)
    sent = [call(0, 1, "send", 4, path=path, peer=1), call(0, 2, "send", 8, path=path, peer=1)]
    got = [call(1, 1, "recv", 4, path=path, peer=0), call(1, 2, "recv", 9, path=path, peer=0)]
    statuses = ranks(RankStatus(0, FINISHED), RankStatus(0, FINISHED))
    found = first_difference([sent, got], statuses)
    assert found is not None and found.records == (sent[1], got[1])
    assert first_difference([sent[:1], got[:1]], statuses) is None
    lost = first_unmatched([sent, got[:1]], statuses)
    assert lost is not None and lost.absent == (1,)
    anybody = ranks(RankStatus(0, FINISHED), RankStatus(0, FINISHED, from_anybody=1))
    assert first_difference([sent, got], anybody) is None  # who meets whom is not known then
