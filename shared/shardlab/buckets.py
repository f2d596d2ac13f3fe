"""Which reduction carried which gradients, found out from sizes and times: nobody has to say it.

Gradients travel in some order: the reverse of the parameters' order, or that in which they became ready. If the
reductions, in the order of their issue, cut such an order into runs of exactly their sizes, and none was issued before
its gradients were ready, that is how they travelled. If no order fits, it is unknown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from .records import Call, GradientReady

REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")


def bucket_numbers(calls: Sequence[Call], gradients: Sequence[GradientReady]) -> tuple[dict[int, int], dict[int, int]]:
    """The bucket's number by `Call.index`, and by the parameter's number.

    Buckets are numbered from 0, in the order of their issue. When it is unknown what they carry, every reduction since
    the first gradient has a number, and no parameter.
    """
    first = min((item.ready for item in gradients), default=float("inf"))
    reductions = [call for call in sorted(calls, key=lambda call: call.issued) if call.op in REDUCTIONS]
    reductions = [call for call in reductions if call.issued >= first]
    backwards = sorted(gradients, key=lambda item: -item.number)
    as_ready = sorted(gradients, key=lambda item: item.ready)
    for by_dtype in (True, False):
        for order in (as_ready, backwards):
            carried = _cut(reductions, order, by_dtype)
            if carried is not None:
                numbers = {index: number for number, index in enumerate(carried)}
                return numbers, {p: numbers[index] for index, members in carried.items() for p in members}
    return {call.index: number for number, call in enumerate(reductions)}, {}


def _cut(reductions: Sequence[Call], order: Sequence[GradientReady], by_dtype: bool) -> dict[int, list[int]] | None:
    """The parameters' numbers in each reduction, by its index, in the order of issue; None when they do not fit."""
    queues: dict[str, list[GradientReady]] = defaultdict(list)
    for item in order:
        queues[item.dtype if by_dtype else ""].append(item)
    carried: dict[int, list[int]] = {}
    for call in reductions:
        queue = queues[call.dtype if by_dtype else ""]
        members: list[GradientReady] = []
        total = 0
        for item in queue:
            if total >= call.numel:
                break
            members.append(item)
            total += item.numel
        if not members or total != call.numel or any(item.ready > call.issued for item in members):
            continue  # something else: flags, a loss
        del queue[: len(members)]
        carried[call.index] = [item.number for item in members]
    return carried if order and not any(queues.values()) else None
