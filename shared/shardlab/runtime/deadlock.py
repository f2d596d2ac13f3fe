"""Finds ranks that can never go on, from one consistent picture of the board. Pure: no processes, no time.

A rank that waits for a send to (or receive from) a peer goes on once the peer has issued the matching call; one that
waits in a collective goes on once every member has. If none of those whom it still misses will ever get there, because
they have finished or are stuck themselves, it is stuck. The set of stuck ranks is the greatest one with this property.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .board import FINISHED, WAITING, RankStatus


@dataclass(frozen=True)
class Deadlock:
    """stuck: rank -> the ranks it waits for in vain. cycle: ranks in a circle, each waiting for the next; or ()."""

    stuck: dict[int, tuple[int, ...]]
    cycle: tuple[int, ...]


def missing(status: RankStatus, statuses: Sequence[RankStatus]) -> tuple[int, ...]:
    """The ranks that have not issued the call that this waiting rank waits for; () when the data is on its way."""
    if status.op == "send" and status.peer is not None:
        return () if statuses[status.peer].receives[status.rank] >= status.number else (status.peer,)
    if status.op == "recv" and status.peer is not None:
        return () if statuses[status.peer].sends[status.rank] >= status.number else (status.peer,)
    if status.op == "recv":  # from any source: anybody's message will do
        others = tuple(other.rank for other in statuses if other.rank != status.rank)
        posted = sum(statuses[other].sends[status.rank] for other in others)
        return () if posted >= status.number else others
    return tuple(
        member
        for member in status.group
        if member != status.rank and statuses[member].groups.get(status.group, 0) < status.number
    )


def find_deadlock(statuses: Sequence[RankStatus], still: Iterable[int]) -> Deadlock | None:
    """The stuck ranks, or None when every rank may go on. `still`: the ranks that have not moved for a while."""
    finished = {status.rank for status in statuses if status.state == FINISHED}
    waits = {rank: missing(statuses[rank], statuses) for rank in still if statuses[rank].state == WAITING}
    stuck = {rank for rank, ranks in waits.items() if ranks}
    while True:
        hopeless = stuck | finished
        needs_all = {rank for rank in stuck if statuses[rank].op != "recv" or statuses[rank].peer is not None}
        may_go_on = {
            rank
            for rank in stuck
            if not (hopeless.intersection(waits[rank]) if rank in needs_all else hopeless.issuperset(waits[rank]))
        }
        if not may_go_on:
            break
        stuck -= may_go_on
    if not stuck:
        return None
    in_vain = {rank: tuple(other for other in waits[rank] if other in stuck | finished) for rank in sorted(stuck)}
    return Deadlock(in_vain, _cycle(in_vain))


def _cycle(waits: dict[int, tuple[int, ...]]) -> tuple[int, ...]:
    """A circle of ranks in which each waits for the next, starting at its lowest rank; () when there is none."""
    for start in waits:
        path = [start]
        while path[-1] in waits and waits[path[-1]]:
            following = next((rank for rank in waits[path[-1]] if rank in waits), None)
            if following is None:
                break
            if following in path:
                circle = path[path.index(following) :]
                lowest = circle.index(min(circle))
                return tuple(circle[lowest:] + circle[:lowest])
            path.append(following)
    return ()
