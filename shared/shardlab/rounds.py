"""Counts the rounds of a broadcast that was made of messages: read from the record of calls, not from a clock.

A rank cannot pass on what it has not received yet, and it sends one message after the other. So the round of a message
is one more than the round in which its sender received the data (0 for the root), or than that of the sender's previous
message, whichever is later. Nothing here runs anything: lists of `Call` in, plain numbers out.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence

from shardlab.records import Call

Message = tuple[int, int]  # source and destination rank


def broadcast_rounds(calls: Sequence[Sequence[Call]], root: int = 0) -> list[list[Message]]:
    """The messages by round: element 0 is round 1. calls[r]: what rank r called, in order (`run.calls`).

    A rank that receives several times counts from its first. Messages of ranks that never get the data are left out:
    they cannot carry it.
    """
    got: dict[int, int] = {}
    messages: dict[int, list[Message]] = defaultdict(list)
    waiting = [(0, root)]
    while waiting:
        number, rank = heapq.heappop(waiting)
        if rank in got:
            continue
        got[rank] = number
        sends = [call for call in calls[rank] if call.op == "send" and call.peer is not None]
        for later, send in enumerate(sends, start=number + 1):
            assert send.peer is not None
            messages[later].append((rank, send.peer))
            heapq.heappush(waiting, (later, send.peer))
    return [sorted(messages[number]) for number in range(1, max(messages, default=0) + 1)]
