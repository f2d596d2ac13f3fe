"""Lab 05: what one trial of a DistributedDataParallel showed, judged; the first fault in a learner's words."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import CheckFailed
from ..records import Call
from .library import HARMLESS_TOTAL
from .notes import Observation
from .observe import Trial, line_at, line_of
from .overlap_cases import INTERRUPTED, NESTED, ORDER, PLAIN, STUCK, OverlapCase
from .overlap_models import build
from .overlap_play import WARM, Happened, Played

TWICE = "a hook is called again: the bucket left before the second part came, or the first part was changed in p.grad"
LEAST = 2  # reductions that must overlap with backward


class Judge:
    """One case of a trial. `all()` raises CheckFailed at the first fault."""

    def __init__(self, trial: Trial, index: int, seen: Sequence[Observation]) -> None:
        self.trial, self.index, self.seen = trial, index, seen
        case = trial.cases[index]
        assert isinstance(case, OverlapCase)
        self.case = case
        self.played = [one.judged for one in seen if isinstance(one.judged, Played)]

    def all(self) -> None:
        self._lacks()
        self._values()
        if self.case.growth:
            self._growth()
        if self.trial.world_size > 1:
            self._no_sync()
            if self.case.about == ORDER:
                self._plugged()
                self._order()
            if self.case.about == STUCK:
                self._stuck()
            if self.case.about == PLAIN:
                self._bytes()

    def _failed(self, reason: str, seen: str, expected: str, look: str = "", rank: int | None = None) -> CheckFailed:
        return self.trial.failed(self.index, reason, f"{self.trial.at(self.index, rank)}: {seen}", expected, look)

    def _lacks(self) -> None:
        for rank, played in enumerate(self.played):
            if played.lacks:
                expected = "forward (or __call__), backward(loss), no_sync() and module"
                raise self._failed("signature", played.lacks, expected, rank=rank)

    def _values(self) -> None:
        wrong = [rank for rank, played in enumerate(self.played) if played.finding]
        if wrong:
            hasty = self._hasty()
            if hasty is not None:
                raise hasty
            # What is wrong from the start explains what follows, on whichever rank it shows.
            wrong.sort(key=lambda rank: not self.played[rank].from_the_start)
            finding = self.played[wrong[0]].finding
            assert finding is not None
            look = TWICE if self.case.kind == "shared" else finding.look
            if self.case.about == INTERRUPTED:
                look = "synchronise is still False after the exception: put it back in a finally"
            if not any(one.calls for one in self.seen) and self.trial.world_size > 1:
                look = "no rank sent anything"
            raise self._failed("values", finding.seen, finding.expected, look, wrong[0])
        different = [rank for rank, played in enumerate(self.played) if played.digest != self.played[0].digest]
        if different:
            said = f"gradients on ranks 0 and {different[0]} are not the same bits"
            expected = "the same on all ranks, to the last bit, or replicas drift; None on one rank is None on all"
            raise self._failed("values", said, expected)

    def _hasty(self) -> CheckFailed | None:
        """The verdict when wrong values come from a reduction that was not waited for, or not yet."""
        calls = [
            call
            for one in self.seen
            for call in one.calls
            if call.completed is None and call.numel and not call.point_to_point
        ]
        if calls:
            rank = calls[0].rank
            mine = [call for call in self.seen[rank].calls if call.op == "all_reduce"]
            left = sum(call.completed is None for call in mine)
            said = f"nobody waits for {left} of {len(mine)} asynchronous all_reduce calls: what they bring is lost"
            expected = "wait() for every handle before backward() copies anything into p.grad"
            return self._failed("order", said, expected, line_of(calls[0]), rank)
        early = [one for one in self.trial.early(self.index) if not one.call.point_to_point]
        if not early or not any(played.unusable for played in self.played):
            return None
        call, where = early[0].call, early[0].where
        said = f"the tensor of an asynchronous {call.op} is used before wait() for it has returned"
        look = line_of(call) + (f"; used in {line_at(where)}" if where is not None else "")
        return self._failed("order", said, "wait() first, then read or write what is being reduced", look, call.rank)

    def _growth(self) -> None:
        for rank, played in enumerate(self.played):
            first, last = played.live
            if last > first:
                said = f"live memory has grown from {first:,} bytes after step {WARM + 1} to {last:,} at the end"
                expected = "what a step needs is dropped, or used again, in the next step"
                raise self._failed("memory", said, expected, "lists of handles, tensors or graphs that are kept", rank)

    def _no_sync(self) -> None:
        for rank, played in enumerate(self.played):
            if sum(call.sent for call in played.silent) > HARMLESS_TOTAL:
                ops = {call.op: sum(one.op == call.op for one in played.silent) for call in played.silent}
                told = ", ".join(f"{count} {op}" for op, count in ops.items())
                said = f"inside no_sync() there are calls that carry data: {told}"
                expected = "nothing is sent there: gradients add up in p.grad until a backward outside"
                look = line_of(played.silent[0])
                if self.case.about == NESTED:
                    look = f"the inner no_sync() ends the outer one too: put back what was before, not True; {look}"
                raise self._failed("bytes", said, expected, look, rank)

    def _stuck(self) -> None:
        for rank, played in enumerate(self.played):
            if not all(one.here for one in played.happened if one.kind == "issued"):
                continue  # from a thread of its own, whenever that gets its turn
            if overlapping_reductions(played.happened) < LEAST:
                said = "of 5 buckets that are complete when one layer's gradient is still to come, 1 leaves or none"
                expected = "when a bucket leaves, those behind it that are complete leave at once with it"
                raise self._failed("order", said, expected, "a loop (while), not an if", rank)

    def _elements(self) -> int:
        parameters = build(self.case.kind, 0).parameters()
        return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)

    def _plugged(self) -> None:
        elements = self._elements()
        for rank, played in enumerate(self.played):
            through = sum(one.numel for one in played.reductions)
            if through >= elements:
                continue
            said = f"{through:,} of {elements:,} elements go through the all_reduce that was plugged in"
            around = [call for call in played.calls[-1] if call.op == "all_reduce" and call.numel > 1]
            look = line_of(around[0]) if around and not through else ""
            expected = "all of them: self.all_reduce(flat), whose handle has wait()"
            raise self._failed("calls", said, expected, look, rank)

    def _order(self) -> None:
        for rank, played in enumerate(self.played):
            overlapping = overlapping_reductions(played.happened)
            if overlapping >= LEAST:
                continue
            issued = [place for place, one in enumerate(played.happened) if one.kind == "issued"]
            ready = [place for place, one in enumerate(played.happened) if one.kind == "ready"]
            early = [place for place in issued if place < ready[-1]]
            expected = f"at least {LEAST} reductions on their way while backward computes the next gradients"
            calls = [call for call in played.calls[-1] if call.op == "all_reduce"]
            line = line_of(calls[0]) if calls else ""
            if not early:
                said = f"no reduction has been issued when the last of {len(ready)} gradients is ready"
                look = "a hook that runs when a gradient is ready, and buckets of bucket_bytes"
                raise self._failed("order", f"{said}; {len(issued)} follow", expected, line or look, rank)
            if overlapping == 0:
                said = f"each of {len(early)} reductions is waited for before the next gradient is computed"
                raise self._failed("order", said, expected, f"wait() after backward, not in the hook; {line}", rank)
            said = f"{overlapping} reduction is on its way while gradients are computed, of {len(issued)} in all"
            raise self._failed("order", said, expected, line, rank)

    def _bytes(self) -> None:
        n = self.trial.world_size
        nbytes = 4 * self._elements()
        parameters = len(list(build(self.case.kind, 0).parameters()))
        share = 2 * (n - 1) / n
        most = share * (nbytes + 2 * 8 * 2 * parameters + 128)
        for rank, played in enumerate(self.played):
            for number, calls in enumerate(played.calls):
                for verb, moved in (("sends", sent(calls)), ("receives", sum(call.received for call in calls))):
                    if moved > most:
                        ops = list(dict.fromkeys(call.op for call in calls))
                        said = f"in step {number + 1} it {verb} {moved:,.0f} bytes ({', '.join(ops)})"
                        expected = f"2(N-1)/N n = {share * nbytes:,.0f} bytes: each gradient is reduced once"
                        largest = max(calls, key=lambda call: call.sent + call.received)
                        raise self._failed("bytes", said, expected, line_of(largest), rank)


def overlapping_reductions(happened: Sequence[Happened]) -> int:
    """Reductions after whose issue a gradient became ready before the backward's thread waited for them."""
    count = 0
    for place, one in enumerate(happened):
        if one.kind != "issued":
            continue
        for later in happened[place + 1 :]:
            if later.kind == "ready":
                count += 1
                break
            if later.kind == "waits" and later.number == one.number and later.here:
                break
    return count


def sent(calls: Sequence[Call]) -> float:
    return sum(call.sent for call in calls)
