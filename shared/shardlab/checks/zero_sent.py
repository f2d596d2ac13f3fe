"""Labs 06 to 08: judges what ranks send in a step, in elements, and in which order reductions come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import CheckFailed
from ..records import Call
from .observe import Trial, line_of
from .zero_cases import ZeroCase
from .zero_models import Sizes
from .zero_order import REDUCING, overlapping
from .zero_play import Played
from .zero_stage import Stage

SLACK = 1.06  # padding: N-1 elements a bucket at most; and the numbers that travel beside the data
LEAST = 2  # reductions that must be on their way while backward computes
NUMBERS = 8  # calls of all_reduce on a few numbers, in a step: the norm is one, an engine may have flags of its own
AROUND = 64  # bytes of one call beside the communicator: a flag, a norm


def elements(calls: Sequence[Call]) -> float:
    """Elements that a rank sent."""
    return sum(call.sent / getattr(torch, call.dtype).itemsize for call in calls if call.dtype)


@dataclass(frozen=True)
class SentJudge:
    """One case of a chain."""

    trial: Trial
    index: int
    stage: Stage
    case: ZeroCase
    played: Sequence[Played]

    @property
    def unit(self) -> float:
        """(N-1)/N psi: what a rank sends when something of the model's size is reduced and scattered, or gathered."""
        return self.sizes.psi * (self.trial.world_size - 1) / self.trial.world_size

    @property
    def sizes(self) -> Sizes:
        return Sizes.of(self.case)

    def passes(self, number: int = -1) -> float:
        """How many units a rank sends in a step, on average: who owns much sends more."""
        return sum(elements(one.steps[number].calls) for one in self.played) / len(self.played) / self.unit

    @property
    def frozen(self) -> float:
        """Units that gathering frozen weights takes, forward and backward."""
        return 2 * self.sizes.frozen / self.sizes.psi if self.stage.splits("parameters") else 0.0

    def all(self) -> None:
        """Raises CheckFailed at the first fault."""
        if self.trial.world_size == 1:
            return
        self._waited()
        for number in range(len(self.case.steps)):
            passes = self.passes(number)
            if passes > (self.stage.most + self.frozen) * SLACK:
                raise self._too_much(number, passes)
            for rank, one in enumerate(self.played):
                small = [call for call in one.steps[number].calls if call.op == "all_reduce" and call.numel <= 16]
                if len(small) > NUMBERS:
                    said = f"step {number + 1}: {len(small)} calls of all_reduce on one number or a few"
                    goal = "one for the norm and the overflow of all buckets: each call waits for every rank"
                    raise self._failed("calls", said, goal, line_of(small[-1]), rank)

    def _too_much(self, number: int, passes: float) -> CheckFailed:
        calls = [call for one in self.played for call in one.steps[number].calls]
        mine = [call for call in self.played[0].steps[number].calls if call.sent]
        shares = {
            op: elements([call for call in mine if call.op == op]) / self.unit for op in {call.op for call in mine}
        }
        told = ", ".join(f"{op} {share:.2f}" for op, share in sorted(shares.items(), key=lambda each: -each[1])[:3])
        said = f"step {number + 1}: a rank sends {passes:.2f} units of (N-1)/N psi elements (rank 0: {told})"
        look = self._in_excess(shares)
        largest = max(calls, key=lambda call: call.sent + call.received)
        parts = "gather, gather again, reduce" if self.stage.passes == 3 else "reduce-scatter, all-gather"
        goal = f"{self.stage.passes + self.frozen:g} units: {parts}"
        if self.stage.most > self.stage.passes:
            goal += f"; {self.stage.most} with an all-reduce in place of the first"
        return self._failed("bytes", said, goal, look or line_of(largest))

    def _in_excess(self, shares: dict[str, float]) -> str:
        """Words for the operation that is used too much, if one is."""
        gathers = self.stage.passes - 1 + self.frozen
        if shares.get("all_reduce", 0) > 0.5:  # more than a norm
            return "all_reduce moves the sums to every rank, who needs its own part alone: reduce_scatter"
        if shares.get("reduce_scatter", 0) > SLACK:
            return "reduce_scatter takes one flat tensor, whose chunk r goes to rank r: no copy per rank, and each once"
        if shares.get("all_gather", 0) > gathers * SLACK:
            times = "in forward and in backward, each unit once" if self.stage.passes == 3 else "once, after the update"
            return f"all_gather moves more than the {gathers:g} units that weights take: they are gathered {times}"
        return ""

    def _waited(self) -> None:
        for rank, one in enumerate(self.played):
            for ops, said in (
                (one.waiting, "nobody waits for {}"),
                (one.freed, "memory is let go before {} is through"),
            ):
                if ops:
                    told = said.format(
                        f"{len(ops)} of the operations, {ops[0]} first" if ops is one.waiting else ops[0]
                    )
                    goal = "wait() for every handle, and only then let go of what it writes to"
                    raise self._failed(
                        "order", told, goal, "also of what was fetched and is not needed after all", rank
                    )

    def order(self) -> None:
        """Of a case with the check's own communicator."""
        if self.trial.world_size == 1:
            return
        self._waited()
        psi = self.sizes.psi
        for rank, one in enumerate(self.played):
            large = [call for call in one.around if max(call.sent, call.received) > AROUND]
            if large:
                said = f"{len(large)} calls go round the communicator that was handed in, {large[0].op} first"
                goal = "all that grows with the model goes through it after construction: communicator.all_gather(flat)"
                raise self._failed("calls", said, goal, line_of(large[0]), rank)
            if one.through < psi:
                said = f"{one.through:,} elements of {psi:,} go through the communicator that was handed in"
                goal = (
                    "all that grows with the model: communicator.reduce_scatter(flat) and the like, after construction"
                )
                raise self._failed("calls", said, goal, line_of(large[0]) if large else "", rank)
            count = overlapping(one.happened)
            if count >= LEAST:
                continue
            issued = [place for place, each in enumerate(one.happened) if _reduction(each)]
            ready = [place for place, each in enumerate(one.happened) if each.kind == "ready"]
            early = [place for place in issued if ready and place < ready[-1]]
            goal = f"at least {LEAST} reductions on their way while backward computes the next gradients"
            if not early:
                said = f"no reduction has been issued when backward comes to the first layer; {len(issued)} follow"
                look = "a hook that runs when a gradient is ready, and buckets of bucket_bytes"
            elif not self.stage.hides and len(early) >= LEAST:
                continue
            elif not count:
                said = f"each of {len(early)} reductions is waited for before the next layer's gradients are computed"
                look = "wait() when the result is needed, not in the hook that issues it"
            else:
                said = f"{count} reduction is on its way while gradients are computed, of {len(issued)} in all"
                look = "buckets of bucket_bytes, each issued as soon as it is complete"
            raise self._failed("order", said, goal, look, rank)

    def _failed(self, reason: str, seen: str, goal: str, look: str = "", rank: int | None = None) -> CheckFailed:
        return self.trial.failed(self.index, reason, f"{self.trial.at(self.index, rank)}: {seen}", goal, look)


def _reduction(one: object) -> bool:
    return getattr(one, "kind", "") == "issued" and getattr(one, "op", "") in REDUCING and getattr(one, "numel", 0) > 1
