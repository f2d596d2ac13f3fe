"""Says in words where each rank stood when a launch failed."""

from __future__ import annotations

from collections.abc import Sequence

from ..records import Standing, Where
from .board import FINISHED, RUNNING, STARTING, WAITING, RankStatus
from .monitor import Faults
from .places import place, source


def call(op: str, peer: int | None, numel: int, dtype: str) -> str:
    """ "send to rank 1 (1,024 float32)" """
    size = f" ({numel:,} {dtype})" if dtype else ""
    if op == "send":
        return f"send to rank {peer}{size}"
    if op == "recv":
        return f"recv from {'any rank' if peer is None else f'rank {peer}'}{size}"
    return f"{op}{'' if peer is None else f' with root {peer}'}{size}"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """ "rank 1", "ranks 1 and 2", "ranks 0, 1 and 2", "ranks 0 to 62" """
    if len(ranks) > 3 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    *first, last = [str(rank) for rank in ranks]
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def at(where: Where | None) -> str:
    """The place on a line of its own, with its text; "" when it is not known."""
    if where is None:
        return ""
    text = source(where.filename, where.line)
    return f"\n      {place(where.filename, where.line)}" + (f":  {text}" if text else "")


def everyone(faults: Faults, without: int | None = None) -> list[str]:
    """A sentence for each rank; ranks that did the same thing at the same place share one."""
    alike: dict[str, list[int]] = {}
    for status in faults.statuses:
        if status.rank != without:
            alike.setdefault(_predicate(faults, status), []).append(status.rank)
    return [f"  {_sentence(ranks, predicate)}" for predicate, ranks in alike.items()]


def sentence(faults: Faults, rank: int) -> str:
    return _sentence([rank], _predicate(faults, faults.statuses[rank]))


def nobody_moved(faults: Faults) -> int:
    """The rank to blame when nothing moves: one that waits for nobody, else the first."""
    return next((status.rank for status in faults.statuses if status.state in (RUNNING, STARTING)), 0)


def standings(faults: Faults, blamed: int | None) -> tuple[Standing, ...]:
    """The same as plain data."""
    died, raised = {death.rank for death in faults.deaths}, {failure.rank for failure in faults.failures}
    result = []
    for status in faults.statuses:
        rank, waits = status.rank, status.state == WAITING
        doing = "died" if rank in died else "raised" if rank in raised else _STATES[status.state]
        where = _where(faults, status)
        result.append(
            Standing(
                rank,
                doing,
                call(status.op, status.peer, status.numel, status.dtype) if status.in_call and waits else "",
                place(where.filename, where.line) if where else "",
                source(where.filename, where.line) if where else "",
                faults.waits.get(rank, ()) if waits else (),
                rank == blamed,
            )
        )
    return tuple(result)


_STATES = {STARTING: "starting", RUNNING: "computing", WAITING: "waiting", FINISHED: "finished"}


def _sentence(ranks: Sequence[int], predicate: str) -> str:
    plural = {"was ": "were ", "its ": "their "} if len(ranks) > 1 else {}
    for one, many in plural.items():
        predicate = predicate.replace(one, many, 1)
    return f"{ranks_in_words(ranks)} {predicate}"


def _predicate(faults: Faults, status: RankStatus) -> str:
    """What a rank was doing, in one line, and where."""
    where = _where(faults, status)
    later = next((failure for failure in faults.failures if failure.rank == status.rank), None)
    after = f"\n      then raised {later.exception_type}" if later is not None else ""
    if status.state == FINISHED:
        return f"had finished its function{after}"
    if status.state == STARTING:
        return f"was starting{after}"
    last = call(status.op, status.peer, status.numel, status.dtype)
    if status.state == WAITING:
        waits = faults.waits.get(status.rank, ())
        others = f" for {_few(waits)}" if waits and status.op not in ("send", "recv") else ""
        return f"was waiting in {last}{others}{at(where)}{after}"
    if status.rank in faults.positions or not status.in_call:
        return f"was computing{at(where)}{after}"
    return f"was computing; its last call was {last}{at(where)}{after}"


def _few(ranks: Sequence[int]) -> str:
    return ranks_in_words(ranks) if len(ranks) <= 4 else f"{len(ranks)} other ranks"


def _where(faults: Faults, status: RankStatus) -> Where | None:
    """A computing rank's own answer is newer than its last call."""
    position = faults.positions.get(status.rank)
    if status.state == RUNNING and position is not None and position.main is not None:
        return position.main
    return status.where if status.in_call else None
