"""Lab 04: what the busiest rank of a ring sends, and whom it talks to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import CheckFailed
from ..records import Call
from .notes import Case, Observation
from .observe import Trial, line_of
from .ring_cases import ChunksCase, TensorCase

LARGE_ENOUGH = 400  # elements a chunk from which bytes are judged: below, rounding could hide a step


@dataclass(frozen=True)
class Traffic:
    """One rank's messages in one case. largest: elements of the largest message."""

    bytes: int
    received: int
    messages: int
    largest: int


def traffic_of(calls: Sequence[Call]) -> Traffic:
    """Of send and recv alone: harmless collectives do not count."""
    sends = [call for call in calls if call.op == "send"]
    return Traffic(
        bytes=int(sum(call.sent for call in sends)),
        received=int(sum(call.received for call in calls if call.op == "recv")),
        messages=len(sends),
        largest=max((call.numel for call in sends), default=0),
    )


def sent_by_busiest(seen: Sequence[Observation]) -> Traffic:
    return max((traffic_of(one.calls) for one in seen), key=lambda traffic: traffic.bytes)


def judge_traffic(trial: Trial, case: Case, index: int, seen: Sequence[Observation], phases: int) -> None:
    """Raises CheckFailed("bytes") when a rank sends or receives too much, ("calls") when it talks to a stranger."""
    if trial.world_size == 1:
        return
    _judge_bytes(trial, case, index, [traffic_of(one.calls) for one in seen], phases)
    n = trial.world_size
    for rank, one in enumerate(seen):
        neighbours = {(rank - 1) % n, (rank + 1) % n}
        for call in one.calls:
            if call.op == "send" and call.peer not in neighbours:
                raise trial.failed(
                    index,
                    "calls",
                    f"{trial.at(index, rank)}: it sends to rank {call.peer}",
                    f"in a ring a rank talks to its two neighbours only, here {min(neighbours)} and {max(neighbours)}",
                    line_of(call),
                )


def most_elements(case: Case, n: int, phases: int, messages: int) -> int:
    """The most that a rank may send in a case that is large enough, in elements.

    Chunks of one given size: all but one are sent. A tensor: N-1 chunks of ceil(n/N) a phase, which is (N-1)/N n when N
    divides n, and padding to a multiple of N otherwise; then one element more for every message more than N-1 a phase,
    since pieces are rounded too.
    """
    if isinstance(case, ChunksCase):
        return (n - 1) * case.sizes[0]
    assert isinstance(case, TensorCase)
    plain = phases * (n - 1)
    rounding = max(0, messages - plain) if case.count % n else 0
    return plain * -(-case.count // n) + rounding


def _judge_bytes(trial: Trial, case: Case, index: int, traffic: list[Traffic], phases: int) -> None:
    n = trial.world_size
    assert isinstance(case, (ChunksCase, TensorCase))
    elements = sum(case.sizes) if isinstance(case, ChunksCase) else case.count
    if elements < LARGE_ENOUGH * n or (isinstance(case, ChunksCase) and len(set(case.sizes)) > 1):
        return
    for verb, moved in (("sent", [one.bytes for one in traffic]), ("received", [one.received for one in traffic])):
        busiest = max(range(n), key=moved.__getitem__)
        most = most_elements(case, n, phases, traffic[busiest].messages) * case.data.dtype.itemsize
        if moved[busiest] > most:
            raise _too_much(trial, index, verb, moved, traffic[busiest], most, phases, elements)


def _too_much(
    trial: Trial, index: int, verb: str, moved: list[int], it: Traffic, most: int, phases: int, elements: int
) -> CheckFailed:
    n, steps = trial.world_size, phases * (trial.world_size - 1)
    busiest, laziest = moved.index(max(moved)), moved.index(min(moved))
    said = f"rank {busiest} {verb} {moved[busiest]:,} bytes"
    said += f" in {it.messages} message{'s' * (it.messages > 1)}" if verb == "sent" else ""
    if moved[busiest] > 1.2 * moved[laziest]:
        said += f", rank {laziest} only {moved[laziest]:,}"
        look = "the busiest rank counts: in a ring all ranks send and receive alike"
    elif it.largest >= elements:
        look = "what a step sends: one chunk, not the whole tensor"
    else:
        look = "how many steps a phase takes (N-1, not N), and what each step sends (one chunk)"
    formula = f"{'2' if phases == 2 else ''}(N-1)/N n = {most:,} bytes in {steps} message{'s' * (steps > 1)}"
    at = f"N = {n}, {trial.cases[index].name}"
    return trial.failed(index, "bytes", f"{at}: {said}", f"at most {formula}", look)
