"""Lab 00: checks of a token that goes round once, and of a broadcast made of messages.

Looked at, case by case: which calls are made, the values on every rank, who sends how many messages to whom, and for
the broadcast in how many rounds; at last the values again with ranks whose messages complete as late as they may.
Memory is not looked at: a tensor that is kept twice costs no more than the message that brought it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CheckFailed
from ..records import Call
from ..rounds import broadcast_rounds
from ..theory import tree_rounds
from . import exercise
from .handed import IN_PLACE
from .haste import by_luck, ended_well, order
from .library import judge_calls
from .messages_cases import MOST_MARKED, BroadcastCase, TokenCase
from .messages_token import whose_part
from .notes import Case, Observation
from .observe import Trial, check_signature, line_of, observe

Judge = Callable[[Trial, Any, int, Sequence[Observation]], None]


@dataclass(frozen=True)
class Contract:
    """What the exercises differ in. judge: of the messages of a case whose values are right. late: (world size, cases)
    of trials in which every rank's messages complete late. starts: who sends and who receives first.
    """

    exercise: str
    arguments: tuple[str, ...]
    world_sizes: tuple[int, ...]
    cases: Callable[[int], list[Case]]
    late: tuple[tuple[int, list[Case]], ...]
    judge: Judge
    said: Callable[[list[Trial]], list[str]]
    starts: str

    def probe(self, solution: Callable) -> str:
        check_signature(self.exercise, solution, self.arguments)
        plain = [self._plain(solution, n) for n in self.world_sizes]
        late = [self._late(solution, n, cases) for n, cases in self.late]
        several = ", ".join(map(str, sorted(self.world_sizes)))
        cases = sum(len(trial.cases) for trial in plain)
        lines = [f"  values: right on every rank in {cases} cases, N = {several}, also with late messages"]
        lines += self.said(plain)
        printed = sum(trial.lines_printed for trial in plain + late)
        if printed:
            lines += [f"  your function printed {printed:,} line{'s' * (printed > 1)}; they are not shown here"]
        return "\n".join(lines)

    def _plain(self, solution: Callable, n: int) -> Trial:
        trial = observe(self.exercise, solution, self.cases(n), n)
        for index, case in enumerate(trial.cases):
            seen = trial.observations(index)
            if seen is None:
                break
            judge_calls(trial, index, seen)
            if any(one.judged.finding for one in seen):
                by_luck(solution, trial, index, seen, slow=range(n))
                self._wrong_values(trial, index, seen)
            self.judge(trial, case, index, seen)
        self._ended_well(trial)
        return trial

    def _ended_well(self, trial: Trial) -> None:
        """Raises what a trial ended with; where all ranks do the same and wait, in the words of this exercise."""
        try:
            ended_well(trial)
        except CheckFailed as failed:
            if failed.reason != "hang" or "every rank receives first" not in failed.seen:
                raise
            error = CheckFailed(self.exercise, "hang", failed.seen, self.starts, failed.look)
            for note in getattr(failed, "__notes__", ()):
                error.add_note(note)
            raise error from None

    def _wrong_values(self, trial: Trial, index: int, seen: list[Observation]) -> None:
        rank = next(rank for rank, one in enumerate(seen) if one.judged.finding)
        finding = seen[rank].judged.finding
        assert finding is not None
        look = finding.look
        if trial.world_size > 1 and not any(one.calls for one in seen):
            look = "no rank sent anything"
        elif trial.world_size > 1 and look == IN_PLACE and not receives_of(seen[rank]):
            look = f"rank {rank} receives no message"
        elif trial.world_size > 1 and isinstance(trial.cases[index], TokenCase):
            look = whose_part(seen, rank) or look
        raise trial.failed(index, "values", f"{trial.at(index, rank)}: {finding.seen}", finding.expected, look)

    def _late(self, solution: Callable, n: int, cases: list[Case]) -> Trial:
        trial = observe(self.exercise, solution, cases, n, slow=range(n))
        for index in range(len(trial.cases)):
            seen = trial.observations(index)
            if seen is None:
                break
            if any(one.judged.finding for one in seen):
                raise order(trial, index, seen, trial)
        self._ended_well(trial)
        return trial


def sends_of(one: Observation) -> list[Call]:
    return [call for call in one.calls if call.op == "send"]


def receives_of(one: Observation) -> list[Call]:
    return [call for call in one.calls if call.op == "recv"]


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def judge_size(trial: Trial, case: TokenCase | BroadcastCase, index: int, seen: Sequence[Observation]) -> None:
    """Raises CheckFailed("bytes") when a message is larger than what it has to carry."""
    for rank, one in enumerate(seen):
        for call in sends_of(one):
            if call.sent > case.bytes:
                said = f"{trial.at(index, rank)}: a message of {int(call.sent):,} bytes"
                expected = f"{case.bytes:,} bytes: {counted(case.count, 'element')} of {case.dtype.itemsize} bytes"
                raise trial.failed(index, "bytes", said, expected, line_of(call))


def only_the_library(seen: Sequence[Observation]) -> Call | None:
    """A collective that must have carried the data, since no message did."""
    calls = [call for one in seen for call in one.calls]
    if any(call.point_to_point for call in calls):
        return None
    return next((call for call in calls if call.op != "barrier"), None)


# The token


def token_cases(n: int) -> list[Case]:
    first: list[Case] = [
        TokenCase(3),
        TokenCase(1),
        TokenCase(MOST_MARKED),
        TokenCase(3, remark="called again"),
        TokenCase(1000, "small", torch.float32),
    ]
    if n > 3:
        return first
    return [
        *first,
        TokenCase(3, larger=True),
        TokenCase(3, nan=True),
        TokenCase(5, "small", torch.int64),
        TokenCase(5, "small", torch.float16),
    ]


def judge_token(trial: Trial, case: TokenCase, index: int, seen: Sequence[Observation]) -> None:
    """Raises CheckFailed("calls") unless every rank sends once, to the right, and receives once, from the left."""
    n = trial.world_size
    if n == 1:
        return
    library = only_the_library(seen)
    if library is not None:
        said = f"{trial.at(index, library.rank)}: the token came by the library's {library.op}, and by no message"
        raise trial.failed(index, "calls", said, "send and recv (isend, irecv) only", line_of(library))
    for rank, one in enumerate(seen):
        sends, receives, at = sends_of(one), receives_of(one), trial.at(index, rank)
        right, left = (rank + 1) % n, (rank - 1) % n
        for calls, verb, preposition, wanted in ((sends, "sends", "to", right), (receives, "receives", "from", left)):
            if len(calls) != 1:
                line = line_of(calls[-1]) if calls else ""
                expected = "the token passes every rank once: one message in and one out, on every rank"
                said = f"{at}: it {verb} {counted(len(calls), 'message')}"
                raise trial.failed(index, "calls", said, expected, line)
            if calls[0].peer != wanted:
                expected = f"it {verb} {preposition} rank {wanted}: the token travels 0 -> 1 -> ... -> N-1 -> 0"
                said = f"{at}: it {verb} {preposition} rank {calls[0].peer}"
                raise trial.failed(index, "calls", said, expected, line_of(calls[0]))
    judge_size(trial, case, index, seen)


def token_said(trials: list[Trial]) -> list[str]:
    return ["  messages: every rank sent one, to its right, and received one, from its left; none with N = 1"]


# The broadcast


def broadcast_cases(n: int) -> list[Case]:
    cases: list[Case] = [BroadcastCase((3,), root) for root in range(n)]
    cases += [BroadcastCase((1000,), n - 1), BroadcastCase((3,), 0, remark="called again")]
    if n > 3:
        return cases
    last = n - 1
    return [
        *cases,
        BroadcastCase((2, 3), last),
        BroadcastCase((), 0),
        BroadcastCase((1,), last, larger=True),
        BroadcastCase((2, 3), 0, larger=True),
        BroadcastCase((5,), last, nan=True),
        BroadcastCase((5,), 0, special=True),
        BroadcastCase((5,), last, torch.float64),
        BroadcastCase((2, 5), 0, torch.int64),
        BroadcastCase((40,), last, torch.bool),
        BroadcastCase((5,), 0, torch.float16),
        BroadcastCase((7,), last, torch.bfloat16),
        BroadcastCase((3,), 0, torch.complex64),
        BroadcastCase((4,), last, torch.uint8),
    ]


def judge_broadcast(trial: Trial, case: BroadcastCase, index: int, seen: Sequence[Observation]) -> None:
    """Raises CheckFailed("calls") for a message too many, ("rounds") for one round too many."""
    n = trial.world_size
    if n == 1:
        return
    library = only_the_library(seen)
    if library is not None:
        said = f"{trial.at(index, library.rank)}: the data came by the library's {library.op}, and by no message"
        raise trial.failed(index, "calls", said, "send and recv (isend, irecv) only", line_of(library))
    total = sum(len(sends_of(one)) for one in seen)
    for rank, one in enumerate(seen):
        receives, wanted = receives_of(one), 0 if rank == case.root else 1
        if len(receives) != wanted:
            said = f"{trial.at(index, rank)}: it receives {counted(len(receives), 'message')}; {total} are sent in all"
            expected = f"N-1 = {n - 1} in all: none to the root, and exactly one, the whole tensor, to every other rank"
            raise trial.failed(index, "calls", said, expected, line_of(receives[-1]) if receives else "")
    judge_size(trial, case, index, seen)
    rounds = broadcast_rounds([one.calls for one in seen], case.root)
    if len(rounds) > tree_rounds(n):
        raise _too_many_rounds(trial, index, case, rounds, seen)


def _too_many_rounds(
    trial: Trial, index: int, case: BroadcastCase, rounds: list[list[tuple[int, int]]], seen: Sequence[Observation]
) -> Exception:
    n, least = trial.world_size, tree_rounds(trial.world_size)
    source, target = rounds[-1][0]
    busiest = max(len(sends_of(one)) for one in seen)
    shape = ", a star" if busiest == n - 1 and n > 2 else ", a chain" if busiest == 1 and n > 2 else ""
    said = f"{trial.at(index)}: {len(rounds)} rounds{shape}; in the last rank {target} gets the data from rank {source}"
    expected = f"ceil(log2 N) = {counted(least, 'round')}: in every round all ranks that have the data pass it on"
    look = ""
    for number, messages in enumerate(rounds, 1):
        able = min(2 ** (number - 1), n - 2 ** (number - 1))  # who could send, when all rounds before were full
        if len(messages) < able:
            have = sum(map(len, rounds[: number - 1])) + 1
            look = f"round {number}: {have} ranks have the data, {counted(len(messages), 'message')} sent"
            break
    return trial.failed(index, "rounds", said, expected, look)


def broadcast_said(trials: list[Trial]) -> list[str]:
    most: dict[int, int] = {}
    for trial in trials:
        for index, case in enumerate(trial.cases):
            seen = trial.observations(index) or []
            assert isinstance(case, BroadcastCase)
            rounds = len(broadcast_rounds([one.calls for one in seen], case.root))
            most[trial.world_size] = max(most.get(trial.world_size, 0), rounds)
    sizes = [n for n in sorted(most) if n > 1]
    return [
        "  messages: N-1 in all, one to every rank but the root, whichever rank that is",
        f"  rounds at N = {', '.join(map(str, sizes))}: {', '.join(str(most[n]) for n in sizes)}"
        f" (a chain takes {', '.join(str(n - 1) for n in sizes)})",
    ]


_TOKEN = Contract(
    "00.pass_the_token",
    ("token", "mine"),
    (2, 3, 4, 5, 1),
    token_cases,
    ((3, token_cases(5)[:4]),),
    judge_token,
    token_said,
    "rank 0 sends first, and the others receive first",
)
_BROADCAST = Contract(
    "00.broadcast",
    ("tensor", "root"),
    (2, 3, 4, 5, 8, 1),
    broadcast_cases,
    ((4, [BroadcastCase((3,), 0), BroadcastCase((1000,), 2), BroadcastCase((3,), 1)]),),
    judge_broadcast,
    broadcast_said,
    "the root sends first, and the others receive first",
)

exercise(_TOKEN.exercise, title="Pass the token")(_TOKEN.probe)
exercise(_BROADCAST.exercise, title="Broadcast from messages")(_BROADCAST.probe)
