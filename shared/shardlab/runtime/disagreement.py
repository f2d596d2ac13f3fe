"""Finds calls of different ranks that belong together but are not the same. Pure: no processes, no time.

Ranks in the same collective must name the same operation, element type, root and number of elements (shapes may differ;
so may sizes where the operation allows it); a message must be received in the size and type it was sent in. Libraries
check little of this: some mismatches crash, some hang, some end with wrong numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .board import HISTORY, GroupCount, RankStatus
from .history import Record

Histories = Sequence[Sequence[Record]]  # one per rank, oldest record first
Meetings = dict[tuple[int, int], list[Record]]  # (path, number) -> the calls that belong together, by rank


@dataclass(frozen=True)
class Disagreement:
    """records: the calls that meet each other, by rank. absent: ranks that finished without making theirs.

    Without records, the ranks are known to differ, but only in calls so old that they have been forgotten.
    """

    records: tuple[Record, ...] = ()
    absent: tuple[int, ...] = ()

    @property
    def odd(self) -> int | None:
        """The rank that differs from most, or the first of them; of two that differ, the higher."""
        if not self.records or self.absent:
            return min(self.absent, default=None)
        alike = defaultdict(list)
        for record in self.records:
            alike[_signature(record)].append(record.rank)
        most = max(alike.values(), key=len)
        return min(rank for ranks in alike.values() if ranks is not most for rank in ranks)


def may_differ(statuses: Sequence[RankStatus]) -> bool:
    """Whether digests differ where ranks have issued equally many calls. Cheap; False says nothing of later calls."""
    for counts in _group_counts(statuses):
        digests: dict[int, int] = {}
        if any(digests.setdefault(count.calls, count.digest) != count.digest for count in counts):
            return True
    return any(sent[0] == received[0] and sent != received for sent, received in _links(statuses))


def all_match(statuses: Sequence[RankStatus]) -> bool:
    """Whether ranks that have all finished made the same calls, as far as counts and digests tell."""
    for counts in _group_counts(statuses):
        if len({(count.calls, count.digest) for count in counts}) > 1:
            return False
    for status in statuses:
        if status.from_anybody:
            arrived = sum(other.sends[status.rank] for other in statuses)
            if arrived != sum(status.receives) + status.from_anybody:
                return False
    return all(sent == received for sent, received in _links(statuses))


def first_difference(histories: Histories, statuses: Sequence[RankStatus]) -> Disagreement | None:
    """The earliest calls that meet and differ, or None."""
    differing = [records for records in _meetings(histories, statuses).values() if _differ(records)]
    return Disagreement(tuple(min(differing, key=_began))) if differing else None


def first_unmatched(histories: Histories, statuses: Sequence[RankStatus]) -> Disagreement | None:
    """The earliest call of ranks that have all finished which some other rank never made, or None."""
    groups = {path: count.members for status in statuses for path, count in status.groups.items()}
    made = {(record.rank, record.path): record.number for records in histories for record in records}  # the last one
    remembers_all = {rank for rank, records in enumerate(histories) if len(records) < HISTORY}

    def never_made(rank: int, path: int, number: int) -> bool:
        last = made.get((rank, path), 0 if rank in remembers_all else None)
        return last is not None and last < number

    unmatched = []
    for (path, number), records in _meetings(histories, statuses).items():
        first = records[0]
        expected = (first.rank, first.peer) if first.point_to_point else groups.get(path, ())
        absent = tuple(rank for rank in expected if rank is not None and never_made(rank, path, number))
        if absent:
            unmatched.append(Disagreement(tuple(records), tuple(sorted(absent))))
    return min(unmatched, key=lambda found: _began(found.records), default=None)


def _meetings(histories: Histories, statuses: Sequence[RankStatus]) -> Meetings:
    """Calls that belong together. Not those to a rank that receives from anybody: there it is luck who meets whom."""
    anybody = {status.rank for status in statuses if status.from_anybody}
    meetings: Meetings = defaultdict(list)
    for records in histories:
        for record in records:
            target = record.peer if record.op == "send" else record.rank if record.op == "recv" else None
            if target not in anybody:
                meetings[record.path, record.number].append(record)
    return meetings


def _differ(records: Sequence[Record]) -> bool:
    uneven = any(record.uneven for record in records)
    return len({_signature(record, uneven) for record in records}) > 1


def _signature(record: Record, uneven: bool = False) -> tuple:
    """What has to be the same. uneven: sizes need not be."""
    numel = 0 if uneven else record.numel
    return (numel, record.dtype) if record.point_to_point else (record.op, record.peer, numel, record.dtype)


def _began(records: Iterable[Record]) -> float:
    return min(record.time for record in records)


def _group_counts(statuses: Sequence[RankStatus]) -> Iterator[list[GroupCount]]:
    """For each process group, the counts of all its members."""
    members = {path: count.members for status in statuses for path, count in status.groups.items()}
    for path, ranks in members.items():
        yield [statuses[rank].groups.get(path, GroupCount(0)) for rank in ranks]


def _links(statuses: Sequence[RankStatus]) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """(sends, digest) and (receives, digest) for each ordered pair of ranks; not for those who take from anybody."""
    for source in statuses:
        for target in statuses:
            if source.rank != target.rank and not target.from_anybody:
                yield (
                    (source.sends[target.rank], source.send_digests[target.rank]),
                    (target.receives[source.rank], target.receive_digests[source.rank]),
                )
