"""Lab 03: checks of what keeps replicas equal: broadcasting, averaging per parameter and flat, and the sampler.

Averaging and broadcasting are tried on small models whose values differ between ranks, at N = 2, 3, 4, 5 and 1, with
`.grad` looked at directly: an optimizer like AdamW would hide any constant factor. All asynchronous calls complete as
late as they may (see meters/late.py), so that a missing wait shows every time. Looked at: values on every rank, then
bytes of the busiest rank and the number of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import CheckFailed
from . import exercise
from .breakdown import breakdown
from .ddp_broadcast import broadcast_cases
from .ddp_calls import disagreement, judge_flat, judge_one_each, judge_traffic, nbytes
from .ddp_gradients import DTYPES, MEASURED, gradient_cases
from .ddp_indices import IndicesCase, Table, index_cases
from .ddp_words import OWN
from .haste import ended_well
from .notes import Case, Observation
from .observe import Trial, check_signature, line_at, line_of, observe

WORLD_SIZES = (2, 3, 4, 5, 1)

_DTYPES = "a gradient has its parameter's dtype: one buffer per dtype, and zeros_like(p) where one is missing"

# What a crash's message tells of lab 03's mistakes, by words in it.
_EXPECTED = {
    "NoneType": "p.grad is None where a rank has no gradient; it takes part with zeros",
    "assign a gradient": _DTYPES,
    "assigned grad": _DTYPES,
    "same dtype": "one buffer per dtype",
    "index out of range": "N pieces, some of them empty: chunk(N) may give fewer than N, tensor_split(N) never does",
}


def _probe(
    name: str, solution: Callable, cases: Callable[[int], Sequence[Case]], judge: Callable[[Trial, int], None]
) -> list[Trial]:
    """One launch for each world size. judge(trial, index) is called for every case that all ranks ended rightly."""
    check_signature(name, solution, ["module"])
    return [_trial(name, solution, cases(n), n, judge) for n in WORLD_SIZES]


def _trial(name: str, solution: Callable, cases: Sequence[Case], n: int, judge: Callable[[Trial, int], None]) -> Trial:
    trial = observe(name, solution, cases, n, slow=range(n))
    for index in range(len(cases)):
        seen = trial.observations(index)
        if seen is None:
            break
        _judge_values(trial, index, seen)
        judge(trial, index)
    apart = disagreement(trial)
    if apart is not None:
        raise apart
    try:
        ended_well(trial)
    except CheckFailed as failed:
        raise _explained(failed) from None
    return trial


def _explained(failed: CheckFailed) -> CheckFailed:
    """A crash whose message says little, with what was expected."""
    if failed.reason != "crash" or failed.expected:
        return failed
    expected = next((hint for words, hint in _EXPECTED.items() if words in failed.seen), "")
    seen = failed.seen.partition(". ")[0] if expected else failed.seen  # torch goes on with other advice
    told = CheckFailed(failed.exercise, failed.reason, seen, expected, failed.look)
    for note in getattr(failed, "__notes__", ()):
        told.add_note(note)  # what the solution printed
    return told


def _judge_values(trial: Trial, index: int, seen: list[Observation]) -> None:
    wrong = [rank for rank, one in enumerate(seen) if one.judged.finding]
    if wrong:
        hasty = _hasty(trial, index, seen)
        if hasty is not None:
            raise hasty
        telling = [rank for rank in wrong if OWN not in str(seen[rank].judged.finding)]
        rank = (telling or wrong)[0]
        finding = seen[rank].judged.finding
        assert finding is not None
        look = finding.look if any(one.calls for one in seen) or trial.world_size == 1 else "no rank sent anything"
        reduced = [call for one in seen for call in one.calls if call.op == "reduce"]
        if reduced:
            look = f"reduce leaves the sum on one rank alone, all_reduce on every rank; {line_of(reduced[0])}"
        raise trial.failed(index, "values", f"{trial.at(index, rank)}: {finding.seen}", finding.expected, look)
    different = [rank for rank, one in enumerate(seen) if one.judged.digest != seen[0].judged.digest]
    if different:
        said = f"{trial.at(index)}: ranks 0 and {different[0]} do not end with the same bits"
        look = "each element is summed in one order for all ranks; a gradient that is None here is None everywhere"
        raise trial.failed(index, "values", said, "the same on all ranks, to the last bit, or replicas drift", look)


def _hasty(trial: Trial, index: int, seen: list[Observation]) -> CheckFailed | None:
    """The verdict when wrong values come from a collective that was not waited for, or not yet."""
    calls = [call for one in seen for call in one.calls if call.completed is None and call.numel]
    if calls and any(one.judged.unusable for one in seen):
        call = calls[0]
        said = f"{trial.at(index, call.rank)}: nobody waits for an asynchronous {call.op}: its result may come too late"
        return trial.failed(index, "order", said, "keep what the call returns, and wait() for each", line_of(call))
    early = [one for one in trial.early(index) if not one.call.point_to_point]
    if not early:
        return None
    call, where = early[0].call, early[0].where
    said = f"{trial.at(index, call.rank)}: the buffer of an asynchronous {call.op} is used before wait() has returned"
    look = line_of(call) + (f"; used in {line_at(where)}" if where is not None else "")
    return trial.failed(index, "order", said, "wait() first, then read or write the buffer", look)


def _verdict(trials: Sequence[Trial], values: str, *more: str) -> str:
    cases = sum(len(trial.cases) for trial in trials)
    lines = [
        f"  values: {values} in {cases} cases, N = 1 to {max(WORLD_SIZES)}",
        *(f"  {line}" for line in more if line),
    ]
    printed = sum(trial.lines_printed for trial in trials)
    if printed:
        lines += [f"  your function printed {printed:,} line{'s' * (printed > 1)}; they are not shown here"]
    return "\n".join(lines)


def _measured(trials: Sequence[Trial], n: int) -> list[Observation]:
    trial = next(trial for trial in trials if trial.world_size == n)
    return trial.observations(MEASURED) or []


def _busiest(seen: Sequence[Observation]) -> float:
    return max(sum(call.sent for call in one.calls) for one in seen)


@exercise("03.broadcast_parameters", title="Broadcast of parameters and buffers")
def broadcast_parameters(solution: Callable) -> str:
    trials = _probe("03.broadcast_parameters", solution, broadcast_cases, lambda trial, index: None)
    seen = _measured(trials, 4)
    ops = ", ".join(sorted({call.op for one in seen for call in one.calls}))
    from .ddp_broadcast import measured_bytes

    share = _busiest(seen) / measured_bytes()
    sent = f"bytes sent by the busiest of 4 ranks: {share:.2f} n ({ops}; a broadcast sends n, all states once)"
    return _verdict(trials, "rank 0's parameters and buffers, bit for bit, on every rank", sent)


def _averaging(name: str, solution: Callable, judge: Callable[[Trial, int], None]) -> str:
    trials = _probe(name, solution, gradient_cases, judge)
    seen = _measured(trials, 4)
    calls = len([call for call in seen[0].calls if call.op != "barrier"])
    share = _busiest(seen) / nbytes("many")
    sent = f"calls for 9 parameters: {calls}; bytes sent per rank at N = 4: {share:.3f} n"
    exact = " = 2(N-1)/N n, exactly" if share == 1.5 else "; 2(N-1)/N n = 1.5 n"
    return _verdict(trials, "the mean on every rank, to the same bits,", sent + exact)


@exercise("03.average_gradients", title="Averaged gradients, one all-reduce per parameter")
def average_gradients(solution: Callable) -> str:
    def judge(trial: Trial, index: int) -> None:
        if trial.world_size > 1 and index == MEASURED:
            seen = trial.observations(index) or []
            judge_one_each(trial, index, "many", seen)
            judge_traffic(trial, index, "many", seen)

    return _averaging("03.average_gradients", solution, judge)


@exercise("03.average_gradients_flat", title="Averaged gradients, one all-reduce per dtype")
def average_gradients_flat(solution: Callable) -> str:
    def judge(trial: Trial, index: int) -> None:
        kind = getattr(trial.cases[index], "kind", "")
        if trial.world_size > 1 and (index == MEASURED or kind == DTYPES):
            seen = trial.observations(index) or []
            judge_flat(trial, index, kind, seen)
            judge_traffic(trial, index, kind, seen)

    return _averaging("03.average_gradients_flat", solution, judge)


@exercise("03.shard_indices", title="A sampler's shards")
def shard_indices(solution: Callable) -> str:
    name = "03.shard_indices"
    try:
        check_signature(name, solution, ["length", "rank", "world_size", "epoch", "seed"])
    except CheckFailed as failed:
        look = failed.look if "torch.distributed" not in failed.look else "seed is the last one, with the default 0"
        raise CheckFailed(name, "signature", failed.seen, failed.expected, look) from None
    trials = []
    for n in WORLD_SIZES:
        trial = observe(name, Table(solution), index_cases(n), n)
        for index in range(len(trial.cases)):
            seen = trial.observations(index)
            if seen is None:
                break
            _judge_indices(trial, index, seen)
        if trial.error:
            raise _explained(breakdown(trial))
        trials.append(trial)
    cases = [case for trial in trials for case in trial.cases if isinstance(case, IndicesCase)]
    longest = max(case.length for case in cases)
    return _verdict(
        trials,
        f"every index once, shards alike in size, new order each epoch and seed, up to {longest:,} items,",
        "drawn alike in all processes; global random state neither used nor changed",
    )


def _judge_indices(trial: Trial, index: int, seen: list[Observation]) -> None:
    for rank, one in enumerate(seen):
        if one.calls:
            said = f"{trial.at(index, rank)}: it calls {one.calls[0].op}"
            expected = "a function of its arguments alone: any process can call it at any time, for any rank"
            raise trial.failed(index, "calls", said, expected, line_of(one.calls[0]))
    wrong = [rank for rank, one in enumerate(seen) if one.judged.finding]
    if wrong:
        finding = seen[wrong[0]].judged.finding
        assert finding is not None
        raise trial.failed(index, "values", f"{trial.at(index)}: {finding.seen}", finding.expected, finding.look)
    different = [rank for rank, one in enumerate(seen) if one.judged.digest != seen[0].judged.digest]
    if different:
        said = (
            f"{trial.at(index)}: the processes of ranks 0 and {different[0]} get different lists for the same arguments"
        )
        expected = "the same in every process: all ranks must divide the same order among them"
        look = "what differs between processes: get_rank(), the time, hash() of a text, the global random state?"
        raise trial.failed(index, "values", said, expected, look)
