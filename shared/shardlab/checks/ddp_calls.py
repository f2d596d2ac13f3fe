"""Lab 03: how many calls averaging takes and what they send; and ranks that do not make the same calls, in words."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import CheckFailed
from ..records import Call
from .ddp_modules import KINDS, Spec
from .notes import Begun, Issued, Observation
from .observe import Trial, line_at, line_of

MOST_FLAGS = 2  # tiny calls that the flat way may make


def trained(kind: str) -> list[Spec]:
    """The parameters that have gradients; a tied one once."""
    return [spec for spec in KINDS[kind] if not spec.frozen]


def nbytes(kind: str, at_least: int = 0) -> int:
    """Bytes of all gradients. at_least: bytes of an element, for those that have fewer."""
    return sum(torch.Size(spec.shape).numel() * max(spec.dtype.itemsize, at_least) for spec in trained(kind))


def flags_and_data(kind: str, calls: Sequence[Call]) -> tuple[list[Call], list[Call]]:
    """Tiny calls, of up to one element for each parameter (such as "who has a gradient"), and the others.

    Only for kinds whose smallest parameter is larger than that.
    """
    limit = max(len(KINDS[kind]), 16)
    flags = [call for call in calls if call.numel <= limit]
    return flags, [call for call in calls if call.numel > limit]


def judge_traffic(trial: Trial, index: int, kind: str, seen: Sequence[Observation]) -> None:
    """Raises CheckFailed("bytes") when the busiest rank moves more than an all-reduce of all gradients does.

    Two-byte gradients may travel in four bytes, since summing in float32 is a way not to overflow.
    """
    n = trial.world_size
    plain, widened = nbytes(kind), nbytes(kind, at_least=4)
    flags = 2 * 16 * len(KINDS[kind]) + 128  # two flags of 8 bytes a parameter, and padding
    share = 2 * (n - 1) / n
    for verb, moved in (
        ("sends", [sum(call.sent for call in one.calls) for one in seen]),
        ("receives", [sum(call.received for call in one.calls) for one in seen]),
    ):
        busiest = max(range(n), key=moved.__getitem__)
        if moved[busiest] <= share * (widened + flags):
            continue
        ops = list(dict.fromkeys(call.op for call in seen[busiest].calls if call.op != "barrier"))
        data = flags_and_data(kind, seen[busiest].calls)[1]
        largest = max(data, key=lambda call: max(call.sent, call.received), default=None)
        raise trial.failed(
            index,
            "bytes",
            f"{trial.at(index)}: rank {busiest} {verb} {moved[busiest]:,.0f} bytes ({' and '.join(ops)}), "
            f"{moved[busiest] / plain:.2f} n, where n = {plain:,} bytes are its gradients",
            f"2(N-1)/N n = {share * plain:,.0f} bytes, which all-reduces of the gradients take: each one once, in its"
            " own dtype, no frozen ones",
            line_of(largest) if largest else "",
        )


def judge_one_each(trial: Trial, index: int, kind: str, seen: Sequence[Observation]) -> None:
    """Raises CheckFailed("calls") unless there was one all_reduce for each parameter."""
    specs = trained(kind)
    if _by_other_means(trial, index, kind, seen):
        return
    for rank, one in enumerate(seen):
        data = flags_and_data(kind, one.calls)[1]
        if len(data) != len(specs):
            few = len(data) < len(specs)
            look = "the flat way is the next exercise" if few else ""
            if len(data) == len(specs) + 1 and any(spec.tied for spec in KINDS[kind]):
                look = "the tied parameter is one parameter with two names: parameters() lists it once"
            raise trial.failed(
                index,
                "calls",
                f"{trial.at(index, rank)}: {_count(data)} with gradients",
                f"one all_reduce for each of the {len(specs)} parameters that have a gradient",
                look or line_of(data[-1]),
            )


def judge_flat(trial: Trial, index: int, kind: str, seen: Sequence[Observation]) -> None:
    """Raises CheckFailed("calls") when there was more than one all_reduce for each dtype."""
    dtypes = {spec.dtype for spec in trained(kind)}
    if _by_other_means(trial, index, kind, seen):
        return
    for rank, one in enumerate(seen):
        flags, data = flags_and_data(kind, [call for call in one.calls if call.op != "barrier"])
        if len(data) > len(dtypes) or len(flags) > MOST_FLAGS:
            tiny = f" and {len(flags)} tiny ones" if flags else ""
            raise trial.failed(
                index,
                "calls",
                f"{trial.at(index, rank)}: {_count(data)}{tiny}",
                f"one all_reduce for each dtype, here {len(dtypes)}, however many parameters there are; "
                "one tiny one more is fine",
                line_of((data if len(data) > len(dtypes) else flags)[-1]),
            )


def _count(calls: Sequence[Call]) -> str:
    return f"{len(calls)} all_reduce call{'s' * (len(calls) != 1)}"


def _by_other_means(trial: Trial, index: int, kind: str, seen: Sequence[Observation]) -> bool:
    """Whether something else than all_reduce carries gradients. With two ranks that costs nothing more and is let pass;
    with more it is rejected: for its bytes if those are too many.
    """
    for rank, one in enumerate(seen):
        for call in flags_and_data(kind, one.calls)[1]:
            if call.op == "all_reduce" or call.op == "barrier":
                continue
            if trial.world_size > 2:
                judge_traffic(trial, index, kind, seen)
                said = f"{trial.at(index, rank)}: {call.op} carries {call.numel:,} {call.dtype}"
                raise trial.failed(index, "calls", said, "dist.all_reduce carries the gradients", line_of(call))
            return True
    return False


def disagreement(trial: Trial) -> CheckFailed | None:
    """When ranks did not make the same collective calls in the case in which a trial ended: which is the first?

    A rank that made fewer calls lets the others wait for ever; if sizes happen to fit, later calls meet the wrong ones.
    """
    if trial.error is None or trial.error.kind not in ("disagree", "deadlock"):
        return None
    case = min(max((note.case for note in notes if isinstance(note, Begun)), default=0) for notes in trial.notes)
    issued = [_calls_of(notes, case) for notes in trial.notes]
    ended = [any(isinstance(note, Observation) and note.case == case for note in notes) for notes in trial.notes]
    longest = max(map(len, issued))
    for number in range(longest):
        at = [calls[number] if number < len(calls) else None for calls in issued]
        told = [_told(one) if one else ("none: it has returned" if ended[r] else "none") for r, one in enumerate(at)]
        if len(set(told)) == 1:
            continue
        rank = next(r for r, text in enumerate(told) if text != told[0])
        missing = any(one is None for one in at)
        look = next((line_at(one.where) for one in (at[rank], at[0]) if one is not None), "")
        return trial.failed(
            case,
            "hang" if missing else "calls",
            f"{trial.at(case)}: call {number + 1} is {told[0]} on rank 0, and {told[rank]} on rank {rank}"
            + ("; who makes the call waits for ever" if missing else ""),
            "all ranks make the same calls in the same order, whatever a rank has or lacks",
            look,
        )
    return None


def _told(call: Issued) -> str:
    root = f" from rank {call.peer}" if call.op == "broadcast" else ""
    size = f" of {call.numel:,} {call.dtype}" if call.dtype else ""
    return f"{call.op}{root}{size}"


def _calls_of(notes: Sequence[object], case: int) -> list[Issued]:
    """The calls of one case; the barrier that follows each case is the check's own."""
    calls: list[Issued] = []
    current = -1
    for note in notes:
        if isinstance(note, Begun):
            current = note.case
        elif isinstance(note, Observation):
            current = -1
        elif isinstance(note, Issued) and current == case:
            calls.append(note)
    return calls
