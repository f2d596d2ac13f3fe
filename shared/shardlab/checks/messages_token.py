"""Lab 00: whose part is missing from a token, and where on its way it got lost: all ranks' values side by side."""

from __future__ import annotations

from collections.abc import Sequence

from .messages_cases import MINE_CHANGED
from .notes import Observation
from .observe import line_of

NEW_TENSOR = "`token = token + mine` makes a new tensor, and the one handed in stays as it is; use `token += mine`"


def whose_part(seen: Sequence[Observation], wrong: int) -> str:
    """Where to look, in the order of the token's way; "" when the values do not tell. wrong: the rank that is named."""
    n = len(seen)
    for rank in (wrong, *range(n)):
        peers = [call for call in seen[rank].calls if call.op == "recv"]
        if len(peers) == 1 and peers[0].peer != (rank - 1) % n:
            said = f"rank {rank} receives from rank {peers[0].peer}, and the token travels 0 -> 1 -> ... -> N-1 -> 0"
            return f"{said}: {line_of(peers[0])}"
    for rank, one in enumerate(seen):
        if one.judged.finding and one.judged.finding.look == MINE_CHANGED:
            return f"`mine` has changed on rank {rank}: {MINE_CHANGED}"
    held = [_held(one, rank, n) for rank, one in enumerate(seen)]
    if any(parts is None or parts[-1] or parts[-2] != 1 for parts in held):
        return ""
    if not all(any(call.op == "recv" for call in one.calls) for one in seen):
        return ""
    return _on_the_way([list(parts[:n]) for parts in held if parts is not None])


def _on_the_way(held: list[list[int]]) -> str:
    """held[r][s]: how often rank s's part is in what rank r holds, where the token itself has come to everybody."""
    n = len(held)
    if not any(map(any, held)):
        return "no rank adds its part to the token: `token += mine`, before the token is passed on"
    if not held[1][0]:
        late = "adds its part, but only after it has passed the token on" if held[0][0] else "never adds its part"
        return f"rank 0 {late}: it adds at the start, before it sends" if held[0][0] < 2 else ""
    if not held[0][0] and not any(held[0]):
        # It travelled with rank 0's part, and is not in rank 0's memory: what came home did not get there either.
        new = held[1] == [1] + [0] * (n - 1)
        return f"rank 0's part is in what rank 1 received, but not in rank 0's `token`: {NEW_TENSOR}" if new else ""
    for rank in range(1, n):
        before = [1] * rank + [0] * (n - rank)
        further = held[(rank + 1) % n][rank]
        if held[rank] == before and further:
            return f"rank {rank}'s part was passed on, but is not in its own `token`: {NEW_TENSOR}"
        if held[rank] == before:
            return f"rank {rank}'s part is missing on rank {rank} already: first receive, then add, then send"
        if held[rank][rank] == 1 and not further:
            home = "; or rank 0 does not receive into `token`" if rank == n - 1 else ""
            return f"rank {rank} adds its part after it has passed the token on: first add, then send{home}"
    return ""


def _held(one: Observation, rank: int, n: int) -> tuple[int, ...] | None:
    """How often each rank's part, the token and the garbage are there; None where that cannot be read."""
    finding = one.judged.finding
    if finding is None:
        return (*(1 if rank == 0 or other <= rank else 0 for other in range(n)), 1, 0)
    return finding.parts or None
