"""Lab 04: checks of a ring reduce-scatter, all-gather and all-reduce.

Looked at, in this order, at N = 2, 3, 4, 5 and 1: which calls are made, the values on every rank, the bytes of the
busiest rank, whom it talks to; at last the values again with ranks whose messages complete as late as they may. Memory
is not looked at: a ring that keeps N copies of the tensor must have received them, so its bytes tell.

A solution whose values depend on luck, because it uses a buffer too early, can fail at any point. So when values are
wrong the same trial runs once more with late messages and copied sends: if anything changes, the reason is "order".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..errors import CheckFailed
from ..theory import chunk_sizes
from . import exercise
from .haste import by_luck, ended_well, order
from .library import judge_calls
from .notes import Case, Observation
from .observe import Trial, check_signature, observe
from .ring_cases import FLOAT32, ChunksCase, Data, TensorCase, clearer
from .ring_traffic import judge_traffic, sent_by_busiest

WORLD_SIZES = (2, 3, 4, 5, 1)
LATE = ((3, (0,)), (4, (1, 2)))  # world size, ranks whose messages complete late
ALL_KINDS_UP_TO = 3  # ranks: dtypes and layouts are tried at N = 1, 2, 3; more ranks can only add index mistakes
MEASURED = 3360  # elements in all where bytes are measured, at every N: divisible by 2, 3, 4, 5, and so are halves

FLOAT64, INT64, INT32 = (Data("marked", dtype) for dtype in (torch.float64, torch.int64, torch.int32))
SMALL32, HALF, BFLOAT = (Data("small", dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16))
NORMAL = Data("normal", torch.float32)


def chunk_cases(phase: str, n: int) -> list[Case]:
    """Cases for a phase at world size n, the simplest first. float32 marks have room for 15 elements in all."""

    def case(sizes: Sequence[int], data: Data = FLOAT32, **how: str) -> Case:
        return ChunksCase(phase, tuple(sizes), data, **how)  # type: ignore[arg-type]

    uneven = (1, 4, 0, 2, 3)[:n]
    first: list[Case] = [
        case((3,) * n, storage="separate"),
        case((MEASURED // n,) * n, SMALL32),
        case((3,) * n, storage="separate", remark="called again"),
        *(case(chunk_sizes(count, n)) for count in (9, 5, 2)),
        case(uneven, storage="separate"),
    ]
    if phase == "all-gather":
        first += [case((3,) * n, garbage="nan", remark="nan in the unfinished chunks")]
    if n > ALL_KINDS_UP_TO:
        return first
    return [
        *first,
        *(case(chunk_sizes(count, n)) for count in (1, 0)),
        case(uneven[::-1], storage="inner"),
        case((2,) * n, storage="inner"),
        case(uneven, FLOAT64),
        case(chunk_sizes(11, n), INT64, storage="separate"),
        case(chunk_sizes(7, n), HALF),
        case(chunk_sizes(7, n), BFLOAT),
        case(chunk_sizes(97, n), NORMAL),
    ]


def tensor_cases(n: int) -> list[Case]:
    """Cases for the all-reduce at world size n, the simplest first."""
    first: list[Case] = [
        TensorCase(3 * n),
        TensorCase(MEASURED, SMALL32),
        TensorCase(3 * n, remark="called again"),
        *(TensorCase(count) for count in (9, 5, 2)),
        TensorCase(MEASURED + 1, SMALL32),
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
        trials += [self._late(solution, n, slow) for n, slow in LATE]
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
        ended_well(trial)
        return trial

    def _wrong_values(self, solution: Callable, trial: Trial, index: int, seen: list[Observation]) -> None:
        twin = clearer(trial.cases[index])
        more = [twin] if twin else []
        again = by_luck(solution, trial, index, seen, more, slow=[0])
        raise self._values(trial, index, seen, again.observations(index + 1) if twin else None)

    def _values(
        self, trial: Trial, index: int, seen: list[Observation], twins: list[Observation] | None
    ) -> CheckFailed:
        """twins: what the same case showed with data from which more can be read."""
        rank = next(rank for rank, one in enumerate(seen) if one.judged.finding)
        finding = seen[rank].judged.finding
        assert finding is not None
        clear = twins[rank].judged.finding if twins else None
        if clear and clear.decoded and finding.decoded:
            finding, seen = clear, twins or seen
        elif clear and finding.decoded:  # then what was read was chance
            finding = replace(finding, seen=finding.plain, chunk=None)
        if not any(one.calls for one in seen):
            finding = replace(finding, look="no rank sent anything", chunk=None)
        said, look = f"{trial.at(index, rank)}: {finding.seen}", finding.look
        if finding.chunk is not None:
            instead, where = elsewhere(rank, finding.chunk, [one.judged.complete for one in seen])
            said, look = said + instead, look or where
        return trial.failed(index, "values", said, finding.expected, look)

    def _late(self, solution: Callable, n: int, slow: Sequence[int]) -> Trial:
        trial = observe(self.exercise, solution, self.cases(n)[:4], n, slow=slow)
        for index in range(len(trial.cases)):
            seen = trial.observations(index)
            if seen is None:
                break
            if any(one.judged.finding for one in seen):
                raise order(trial, index, seen, trial)
        ended_well(trial)
        return trial

    def _verdict(self, trials: list[Trial]) -> str:
        plain = trials[: len(WORLD_SIZES)]
        measured = [trial for trial in plain if trial.world_size > 1]
        sent = [sent_by_busiest(trial.observations(1) or []) for trial in measured]
        shares = [traffic.bytes / (MEASURED * SMALL32.dtype.itemsize) for traffic in sent]
        exact = all(share == self.phases * (n - 1) / n for share, n in zip(shares, WORLD_SIZES, strict=False))
        sizes = ", ".join(str(trial.world_size) for trial in measured)
        two, cases = "2" if self.phases == 2 else "", sum(len(trial.cases) for trial in plain)
        lines = [
            f"  values: right on every rank in {cases} cases, N = 1 to {max(WORLD_SIZES)}, also with late messages",
            f"  bytes sent per rank at N = {sizes}: {', '.join(f'{share:.3f} n' for share in shares)}"
            + (f" = {two}(N-1)/N n, exactly" if exact else f"; a plain ring sends {two}(N-1)/N n"),
            f"  messages sent per rank: {', '.join(str(one.messages) for one in sent)}"
            f" (a plain ring: {'2(N-1)' if two else 'N-1'})",
        ]
        printed = sum(trial.lines_printed for trial in trials)
        if printed:
            lines += [f"  your function printed {printed:,} line{'s' * (printed > 1)}; they are not shown here"]
        return "\n".join(lines)


def elsewhere(rank: int, chunk: int, complete: Sequence[tuple[int, ...]]) -> tuple[str, str]:
    """Where `chunk`, which is not complete on `rank`, is complete instead. complete[r]: the complete ones of rank r."""
    n = len(complete)
    here = [one for one in complete[rank] if one != chunk]
    holders = [f"rank {other}" for other, chunks in enumerate(complete) if chunk in chunks]
    said = f"; chunk {here[0]} is complete there instead" if here else ""
    for shift in range(1, n):
        if all(set(chunks) == {(owner + shift) % n} for owner, chunks in enumerate(complete)):
            return said, f"on every rank r it is chunk (r + {shift}) % N that ends complete, not chunk r"
    if holders:
        return f"{said}; chunk {chunk} is complete on {' and '.join(holders)}", ""
    return f"{said}; chunk {chunk} is complete on no rank", ""


def _register(name: str, argument: str, phases: int, cases: Callable[[int], list[Case]], title: str) -> None:
    contract = Contract(f"04.{name}", argument, phases, cases)
    exercise(contract.exercise, title=title)(contract.probe)


_register("ring_reduce_scatter", "chunks", 1, lambda n: chunk_cases("reduce-scatter", n), "Ring reduce-scatter")
_register("ring_all_gather", "chunks", 1, lambda n: chunk_cases("all-gather", n), "Ring all-gather")
_register("ring_all_reduce", "tensor", 2, tensor_cases, "Ring all-reduce")
