"""Finds ranks that can never go on, from one picture of the board. Pure: no processes, no time.

A rank that waits for a send to (or receive from) a peer goes on once the peer has issued the matching call; one that
waits in a collective goes on once every member has. If none of those whom it still misses will ever get there, because
they have finished or are stuck themselves, it is stuck. The set of stuck ranks is the greatest one with this property.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .board import FINISHED, WAITING, RankStatus

Posted = Callable[[int, int], int | None]  # (rank, path) -> calls issued there; None when unknown


@dataclass(frozen=True)
class Deadlock:
    """stuck: rank -> the ranks it waits for in vain. cycle: ranks in a circle, each waiting for the next; or ()."""

    stuck: dict[int, tuple[int, ...]]
    cycle: tuple[int, ...]


def missing(status: RankStatus, statuses: Sequence[RankStatus], posted: Posted) -> tuple[int, ...]:
    """The ranks that have not issued the call that this waiting rank waits for; () when the data is on its way."""
    if status.op == "recv" and status.peer is None:
        return _missing_from_anybody(status, statuses)
    if status.op in ("send", "recv"):
        assert status.peer is not None
        there = posted(status.peer, status.path)
        return (status.peer,) if there is not None and there < status.number else ()
    return tuple(
        member
        for member in status.members
        if member != status.rank and _collectives(statuses[member], status.path) < status.number
    )


def _missing_from_anybody(status: RankStatus, statuses: Sequence[RankStatus]) -> tuple[int, ...]:
    """Anybody's message will do, if no receive that names its source takes it."""
    others = [other.rank for other in statuses if other.rank != status.rank]
    free = sum(max(0, statuses[other].sends[status.rank] - status.receives[other]) for other in others)
    return () if free >= status.from_anybody else tuple(others)


def _collectives(status: RankStatus, path: int) -> int:
    return status.groups[path].calls if path in status.groups else 0


def find_deadlock(statuses: Sequence[RankStatus], still: Iterable[int], posted: Posted) -> Deadlock | None:
    """The stuck ranks, or None when every rank may go on. `still`: the ranks that have not moved for a while."""
    finished = {status.rank for status in statuses if status.state == FINISHED}
    waits = {rank: missing(statuses[rank], statuses, posted) for rank in still if statuses[rank].state == WAITING}
    stuck = {rank for rank, ranks in waits.items() if ranks}
    anybody = {rank for rank in stuck if statuses[rank].op == "recv" and statuses[rank].peer is None}
    while True:
        hopeless = stuck | finished
        may_go_on = {
            rank
            for rank in stuck
            if not (hopeless.issuperset(waits[rank]) if rank in anybody else hopeless.intersection(waits[rank]))
        }
        if not may_go_on:
            break
        stuck -= may_go_on
    if not stuck:
        return None
    in_vain = {rank: tuple(other for other in waits[rank] if other in hopeless) for rank in sorted(stuck)}
    return Deadlock(in_vain, _cycle(in_vain))


def _cycle(waits: dict[int, tuple[int, ...]]) -> tuple[int, ...]:
    """A circle of ranks in which each waits for the next, starting at its lowest rank; () when there is none."""
    for start in waits:
        path = [start]
        while True:
            following = next((rank for rank in waits[path[-1]] if rank in waits), None)
            if following is None:
                break
            if following in path:
                circle = path[path.index(following) :]
                lowest = circle.index(min(circle))
                return tuple(circle[lowest:] + circle[:lowest])
            path.append(following)
    return ()
