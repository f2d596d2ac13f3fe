"""Lab 04: checks of a ring reduce-scatter, all-gather and all-reduce.

Looked at, in this order, at N = 2, 3, 4, 5 and 1: which calls are made, the values on every rank, the bytes of the
busiest rank, whom it talks to; at last the values again with ranks whose messages complete as late as they may. Memory
is not looked at: a ring that keeps N copies of the tensor must have received them, so its bytes tell.

A solution whose values depend on luck, because it uses a buffer too early, can fail at any point. So when values are
wrong the same trial runs once more with late messages and copied sends: if anything changes, the reason is "order".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..errors import CheckFailed
from ..records import Call
from ..theory import format_bytes
from . import exercise
from .observe import Trial, breakdown, check_signature, line_of, observe, unfinished
from .ring_cases import FLOAT32, ChunksCase, Data, TensorCase, balanced
from .ring_traffic import judge_calls, judge_traffic, sent_by_busiest
from .trial import Case, Dropped, Observation, unwaited_receives

WORLD_SIZES = (2, 3, 4, 5, 1)
LATE = ((3, (0,)), (4, (1, 2)))  # world size, ranks whose messages complete late
ALL_KINDS_UP_TO = 3  # ranks: dtypes and layouts are tried at N = 1, 2, 3; more ranks can only add index mistakes
LARGE = 840  # elements a chunk where bytes are measured: divisible by 2..8, so halves and pieces are exact too

FLOAT64, INT64, INT32 = (Data("marked", dtype) for dtype in (torch.float64, torch.int64, torch.int32))
SMALL32, HALF, BFLOAT = (Data("small", dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16))
NORMAL = Data("normal", torch.float32)


def chunk_cases(phase: str, n: int) -> list[Case]:
    """Cases for a phase at world size n, the simplest first. float32 marks have room for 15 elements in all."""

    def case(sizes: tuple[int, ...], data: Data = FLOAT32, **how: str) -> Case:
        return ChunksCase(phase, sizes, data, **how)  # type: ignore[arg-type]

    uneven = (1, 4, 0, 2, 3)[:n]
    first: list[Case] = [
        case((3,) * n, storage="separate"),
        case((LARGE,) * n, SMALL32),
        case((2,) * n, remark="called again"),
        *(case(balanced(count, n)) for count in (9, 5, 2)),
        case(uneven, storage="separate"),
    ]
    if phase == "all-gather":
        first += [case((3,) * n, garbage="nan", remark="nan in the unfinished chunks")]
    if n > ALL_KINDS_UP_TO:
        return first
    return [
        *first,
        *(case(balanced(count, n)) for count in (1, 0)),
        case(uneven[::-1], storage="inner"),
        case((2,) * n, storage="inner"),
        case(uneven, FLOAT64),
        case(balanced(11, n), INT64, storage="separate"),
        case(balanced(7, n), HALF),
        case(balanced(7, n), BFLOAT),
        case(balanced(97, n), NORMAL),
    ]


def tensor_cases(n: int) -> list[Case]:
    """Cases for the all-reduce at world size n, the simplest first."""
    first: list[Case] = [
        TensorCase(3 * n),
        TensorCase(LARGE * n, SMALL32),
        TensorCase(3 * n, remark="called again"),
        *(TensorCase(count) for count in (9, 5, 2)),
        TensorCase(LARGE * n + 1, SMALL32),
    ]
    if n > ALL_KINDS_UP_TO:
        return first
    return [
        *first,
        *(TensorCase(count) for count in (1, 0)),
        TensorCase(12, view="2-D"),
        TensorCase(12, view="transposed"),
        TensorCase(7, view="every second element of a larger tensor"),
        TensorCase(7, view="a slice of a larger tensor"),
        TensorCase(6, view="a block of a larger matrix"),
        TensorCase(1, view="0-d"),
        TensorCase(1, view="0-d, one of a larger tensor"),
        TensorCase(11, FLOAT64),
        TensorCase(11, INT64),
        TensorCase(5, INT32),
        TensorCase(7, HALF),
        TensorCase(9, BFLOAT, view="transposed"),
        TensorCase(97, NORMAL),
    ]


@dataclass(frozen=True)
class Contract:
    """What the exercises differ in. phases: each takes N-1 steps and (N-1)/N n bytes."""

    exercise: str
    argument: str
    phases: int
    cases: Callable[[int], list[Case]]

    def probe(self, solution: Callable) -> str:
        check_signature(self.exercise, solution, [self.argument])
        trials = [self._plain(solution, n) for n in WORLD_SIZES]
        for n, slow in LATE:
            self._late(solution, n, slow)
        return self._verdict(trials)

    def _plain(self, solution: Callable, n: int) -> Trial:
        trial = observe(self.exercise, solution, self.cases(n), n)
        for index, case in enumerate(trial.cases):
            seen = trial.observations(index)
            if seen is None:
                break
            judge_calls(trial, index, seen)
            if any(one.judged.finding for one in seen):
                self._wrong_values(solution, trial, index, seen)
            judge_traffic(trial, case, index, seen, self.phases)
        self._finish(trial)
        return trial

    def _finish(self, trial: Trial) -> None:
        """Raises what a trial ended with, if it did not end well."""
        for notes in trial.notes:
            for note in notes:
                if isinstance(note, Dropped):
                    raise _never_waits(trial, note.case, note.call)
                if isinstance(note, Observation) and unwaited_receives(note.calls):
                    raise _never_waits(trial, note.case, unwaited_receives(note.calls)[0])
        if trial.error:
            raise breakdown(trial)

    def _wrong_values(self, solution: Callable, trial: Trial, index: int, seen: list[Observation]) -> None:
        hasty = [call for one in seen for call in unwaited_receives(one.calls)]
        if hasty:
            raise _never_waits(trial, index, hasty[0])
        again = observe(self.exercise, solution, trial.cases[: index + 1], trial.world_size, slow=[0], copy_sends=True)
        for earlier in range(index + 1):
            then, now = trial.observations(earlier), again.observations(earlier)
            if now is None or [one.judged.digest for one in now] != [one.judged.digest for one in then or ()]:
                raise _order(trial, index, seen, late=again.observations(index))
        rank = next(rank for rank, one in enumerate(seen) if one.judged.finding)
        finding = seen[rank].judged.finding
        assert finding is not None
        said = f"{trial.at(rank, index)}: {finding.seen}"
        silent = not any(one.calls for one in seen)
        look = "no rank sent anything" if silent else finding.look
        raise CheckFailed(self.exercise, "values", said, finding.expected, look)

    def _late(self, solution: Callable, n: int, slow: Sequence[int]) -> None:
        cases = self.cases(n)[:4]
        trial = observe(self.exercise, solution, cases, n, slow=slow)
        for index in range(len(cases)):
            seen = trial.observations(index)
            if seen is None:
                break
            if any(one.judged.finding for one in seen):
                raise _order(trial, index, seen, late=seen)
        self._finish(trial)

    def _verdict(self, trials: list[Trial]) -> str:
        measured = [trial for trial in trials if trial.world_size > 1]
        sent = [sent_by_busiest(trial.observations(1) or []) for trial in measured]
        cases = sum(len(trial.cases) for trial in trials)
        sizes = ", ".join(str(trial.world_size) for trial in measured)
        return "\n".join(
            [
                f"  values: right on every rank in {cases} cases, N = 1 to {max(WORLD_SIZES)}, also with late messages",
                f"  bytes sent per rank at N = {sizes}: {', '.join(format_bytes(one.bytes) for one in sent)}, which is"
                f" {'2' if self.phases == 2 else ''}(N-1)/N n",
                f"  messages sent per rank: {', '.join(str(one.messages) for one in sent)}"
                f" (a plain ring: {'2(N-1)' if self.phases == 2 else 'N-1'})",
            ]
        )


def _never_waits(trial: Trial, index: int, call: Call) -> CheckFailed:
    at = f"N = {trial.world_size}, {trial.cases[index].name}"
    if call.op == "recv":
        said = f"{at}: rank {call.rank} never waits for a receive, so it may use the buffer before the data is there"
        return CheckFailed(trial.exercise, "order", said, "wait() before the buffer is read", line_of(call))
    said = f"{at}: rank {call.rank} never waits for a send and drops its handle: the message may never leave"
    return CheckFailed(trial.exercise, "order", said, "keep what isend returns, and wait() for it", line_of(call))


def _order(trial: Trial, index: int, seen: list[Observation], late: list[Observation] | None = None) -> CheckFailed:
    """Values that depend on when messages complete: which kind of haste was it, and in which line."""
    at = f"N = {trial.world_size}, {trial.cases[index].name}"
    if late is not None and any(one.judged.unusable for one in late):
        return CheckFailed(
            trial.exercise,
            "order",
            f"{at}: with late messages, data is used (or sent on) before it has arrived",
            "wait() for a receive before its buffer is read, added or sent on",
            next((line_of(call) for call in seen[0].calls if call.op == "recv"), ""),
        )
    look = next((call for one in seen for call in unfinished(one.calls)), None)
    look = look or next((call for call in seen[0].calls if call.op == "send"), None)
    return CheckFailed(
        trial.exercise,
        "order",
        f"{at}: with late messages the values are wrong: a buffer is changed before its send is complete",
        "wait() for a send before its buffer is used again, and for all sends before the function returns",
        line_of(look) if look else "",
    )


def _register(name: str, argument: str, phases: int, cases: Callable[[int], list[Case]], title: str) -> None:
    contract = Contract(f"04.{name}", argument, phases, cases)
    exercise(contract.exercise, title=title)(contract.probe)


_register("ring_reduce_scatter", "chunks", 1, lambda n: chunk_cases("reduce-scatter", n), "Ring reduce-scatter")
_register("ring_all_gather", "chunks", 1, lambda n: chunk_cases("all-gather", n), "Ring all-gather")
_register("ring_all_reduce", "tensor", 2, tensor_cases, "Ring all-reduce")
