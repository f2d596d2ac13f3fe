"""Judges what an engine showed: the gradients after backward, whether it stepped, its scale, its weights, its calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import CheckFailed
from ..theory import format_bytes
from .observe import Trial, line_of
from .states_close import close, definition, excess, ops, short, shown, worst
from .states_explain import about_gradient, about_moments, about_weights
from .states_play import Played, StepSeen
from .states_reference import VARIATIONS, Expected, expected
from .states_script import EngineCase, Script

MOST_CALLS = 3  # of torch.distributed in one step: a flag, and a little room
MOST_BYTES = 1024  # of one of them


@dataclass(frozen=True)
class Judge:
    """One case of one trial. played[r]: what rank r showed."""

    trial: Trial
    index: int
    case: EngineCase
    played: Sequence[Played]

    def all(self) -> None:
        """Raises CheckFailed at the first step in which any rank's engine is wrong."""
        for rank, one in enumerate(self.played):
            if one.lacks:
                raise self._failed("signature", rank, one.lacks, "backward(loss), step(), zero_grad() and scale")
        ranks = range(len(self.played))
        for engine, script in enumerate(self.case.scripts):
            right = [expected(script, rank, len(ranks)) for rank in ranks]
            for number in range(len(script.steps)):
                at = _Moment(self, engine, script, number, right)
                at.calls()
                for rank in ranks:
                    at.gradients(rank)
                at.decisions()
                for rank in ranks:
                    at.state(rank)
                    at.weights(rank)
        if self.case.same_end:
            self._same_end()

    def _same_end(self) -> None:
        for rank, one in enumerate(self.played):
            ends = [seen[-1].weights or [] for seen in one.steps]
            for parameter, (first, second) in enumerate(zip(*ends, strict=True)):
                if not torch.equal(first, second):
                    raise self._failed(
                        "values",
                        rank,
                        f"after skipped steps parameter {parameter} differs from that of an engine that never had them,"
                        f" by {float((first - second).abs().max()):.3g}",
                        "equal to the last bit: a skip leaves weights, master weights, moments and step count alone",
                        definition(one.steps[0][-1].where),
                    )

    def _failed(self, reason: str, rank: int, seen: str, wanted: str = "", look: str = "") -> CheckFailed:
        alone = self.trial.world_size == 1
        at = self.case.name if alone else f"rank {rank}, N = {self.trial.world_size}, {self.case.name}"
        return self.trial.failed(self.index, reason, f"{at}: {seen}", wanted, look)


@dataclass(frozen=True)
class _Moment:
    """One step of one engine on all ranks. right[r]: what rank r should show, for all steps."""

    judge: Judge
    engine: int
    script: Script
    number: int
    right: list[list[Expected]]

    def seen(self, rank: int) -> StepSeen:
        return self.judge.played[rank].steps[self.engine][self.number]

    @property
    def when(self) -> str:
        which = f"engine {self.engine + 1} of {len(self.judge.case.scripts)}, " if self._several else ""
        return f"{which}step {self.number + 1}"

    @property
    def _several(self) -> bool:
        return len(self.judge.case.scripts) > 1 and not self.judge.case.same_end

    def failed(self, reason: str, rank: int, seen: str, wanted: str = "", look: str = "") -> CheckFailed:
        look = look or definition(self.seen(rank).where)
        return self.judge._failed(reason, rank, f"{self.when}: {seen}", wanted, look)

    def calls(self) -> None:
        for rank in range(len(self.right)):
            calls = self.seen(rank).calls
            large = [call for call in calls if max(call.sent, call.received) > MOST_BYTES]
            if large:
                moved = format_bytes(max(large[0].sent, large[0].received))
                wanted = "one number from each rank: whether it has an overflow. Averaging gradients is not step's task"
                raise self.failed("bytes", rank, f"{large[0].op} moves {moved}", wanted, line_of(large[0]))
            if len(calls) > MOST_CALLS:
                wanted = "one all-reduce for all parameters together"
                raise self.failed(
                    "calls", rank, f"step makes {len(calls)} {ops(calls)} calls", wanted, line_of(calls[0])
                )
        self._together()

    def _together(self) -> None:
        """Collectives are made by all ranks or by none."""
        made = [[call for call in self.seen(rank).calls if not call.point_to_point] for rank in range(len(self.right))]
        counts = [len(calls) for calls in made]
        if len(set(counts)) > 1:
            rank, fewest = counts.index(max(counts)), counts.index(min(counts))
            said = f"this rank calls {ops(made[rank])}, rank {fewest} {'does not' if not min(counts) else 'less often'}"
            wanted = "the same calls on every rank, overflow or not: the others are waited for, now or in a later step"
            raise self.failed("calls", rank, said, wanted, line_of(made[rank][0]))

    def gradients(self, rank: int) -> None:
        """Of `.grad` after backward, before anything else was done to it."""
        scale = self._scale_before
        true = self.script.gradients(self.number, rank)
        pairs = zip(self.seen(rank).gradients, self.right[rank][self.number].gradients, strict=False)
        for parameter, (seen, wanted) in enumerate(pairs):
            if wanted is None or (seen is not None and close(seen, wanted)):
                continue
            gradient = true[parameter]
            assert gradient is not None
            if seen is None:
                said, look = f"parameter {parameter} has no .grad after backward(loss)", ""
            else:
                place = worst(seen, wanted)
                said = (
                    f"parameter {parameter}, element {place}: after backward(loss) .grad is"
                    f" {shown(seen, place)}, where the loss's gradient is {shown(gradient, place)}"
                )
                look = about_gradient(self.script, self.number, parameter, seen, wanted, gradient, scale)
            times = self.script.steps[self.number].backwards
            added = f", added up over {times} calls of backward" if times > 1 else ""
            place = 0 if seen is None else worst(seen, wanted)
            raise self.failed("values", rank, said, f"{shown(wanted, place)}: scale {scale:g} times that{added}", look)
        before, after = self.seen(rank).loss
        if after != before and not (after != after and before != before):
            said = f"backward(loss) changed the caller's loss from {before:g} to {after:g}"
            raise self.failed(
                "values",
                rank,
                said,
                "a loss as it was: loss * self.scale is a new tensor, loss *= self.scale is not",
                "backward",
            )

    def decisions(self) -> None:
        """Whether each rank stepped, and its scale afterwards."""
        wanted = self.right[0][self.number]
        step = self.script.steps[self.number]
        answers = [self.seen(rank).returned for rank in range(len(self.right))]
        for rank, returned in enumerate(answers):
            if isinstance(returned, str):
                truth = "True when it stepped, False when it skipped"
                raise self.failed("values", rank, f"step() returned {returned}", truth)
        if any(answer == wanted.overflow for answer in answers):
            rank = next(rank for rank, answer in enumerate(answers) if answer == wanted.overflow)
            raise self._wrong_decision(rank, answers, wanted, step.bad)
        for rank in range(len(self.right)):
            scale = self.seen(rank).scale
            if scale != wanted.scale:
                raise self._wrong_scale(rank, scale, wanted.scale)

    def _wrong_decision(self, rank: int, answers: list, wanted: Expected, bad: Sequence) -> CheckFailed:
        others = ""
        if len(set(answers)) > 1:
            said = [f"rank {other} {'stepped' if answer else 'skipped'}" for other, answer in enumerate(answers)]
            others = f" ({', '.join(said)})"
        if wanted.overflow:
            places = " and ".join(map(str, bad[:2])) or "a gradient that overflowed"
            all_ranks = ", on every rank" if len(answers) > 1 else ""
            expectation = (
                f"False{all_ranks}: any inf or NaN in any gradient{' of any rank' * bool(all_ranks)} is an overflow"
            )
            return self.failed("values", rank, f"{places}: step() returned True{others}", expectation)
        largest = max(
            (float(each.abs().max()) for each in self.right[rank][self.number].gradients if each is not None), default=0
        )
        detail = (
            f"gradients are finite, the largest in .grad is {largest:g}" if largest else "no gradient is inf or NaN"
        )
        return self.failed("values", rank, f"{detail}: step() returned False{others}", "True: a step")

    def _wrong_scale(self, rank: int, scale: float, wanted: float) -> CheckFailed:
        before = max(0, self.number - 5)
        history = [
            f"{'overflow' if self.right[0][step].overflow else 'good'} {self.seen_at(rank, step).scale:g}"
            for step in range(before, self.number + 1)
        ]
        interval = self.script.option("growth_interval")
        if self.right[0][self.number].overflow:
            rule = "an overflow halves the scale, never below 1"
        else:
            rule = (
                f"it doubles after growth_interval = {interval} steps in a row without overflow, counted anew each time"
            )
        first = f"from {self.script.option('scale'):g}: " if not before else "... "
        said = f"scale {scale:g} after {first}{', '.join(history)}"
        return self.failed("values", rank, said, f"{wanted:g}: {rule}")

    def seen_at(self, rank: int, step: int) -> StepSeen:
        return self.judge.played[rank].steps[self.engine][step]

    def state(self, rank: int) -> None:
        """What is kept in self.state: the contract's names and dtypes, in memory of their own."""
        found = self.seen(rank).state
        if found.seen:
            raise self.failed(found.reason, rank, found.seen, found.expected, "where self.state is made")

    def weights(self, rank: int) -> None:
        seen, wanted = self.seen(rank), self.right[rank][self.number]
        if seen.weights is None:
            return
        alternatives = [expected(self.script, rank, len(self.right), how)[self.number] for how in self.script.accepts]
        for parameter, weight in enumerate(seen.weights):
            if weight.dtype != self.script.dtype(parameter):
                dtypes = f"{short(weight.dtype)} now", f"{short(self.script.dtype(parameter))}, as before"
                raise self.failed("values", rank, f"parameter {parameter} is {dtypes[0]}", dtypes[1])
        if wanted.overflow:
            self._unchanged(rank, seen.weights)
        if not any(self._agree(seen.weights, right.weights) for right in [wanted, *alternatives]):
            raise self._wrong_weights(rank, seen.weights, wanted)
        if seen.lost:
            stays = ".grad stays until the caller calls zero_grad(): step only reads it"
            raise self.failed("values", rank, seen.lost, stays)
        if not seen.cleared:
            raise self.failed("values", rank, "after zero_grad() a gradient is left", "None, or zeros", "zero_grad")

    def _unchanged(self, rank: int, weights: list[torch.Tensor]) -> None:
        if not self.number:
            before: list[torch.Tensor] | None = [
                weight.to(self.script.dtype(parameter)) for parameter, weight in enumerate(self.script.weights(rank))
            ]
        else:
            before = self.seen_at(rank, self.number - 1).weights
        for parameter, (now, then) in enumerate(zip(weights, before or weights, strict=True)):
            if not torch.equal(now, then):
                place = worst(now, then)
                said = f"step() skipped, yet parameter {parameter}, element {place} went from"
                said += f" {shown(then, place)} to {shown(now, place)}"
                raise self.failed("values", rank, said, "a skipped step changes no weight, not by one bit")

    def _agree(self, weights: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
        return all(excess(weight, right) <= 0 for weight, right in zip(weights, wanted, strict=True))

    def _wrong_weights(self, rank: int, weights: list[torch.Tensor], wanted: Expected) -> CheckFailed:
        pairs = enumerate(zip(weights, wanted.weights, strict=True))
        parameter = next(place for place, pair in pairs if excess(*pair) > 0)
        weight, right = weights[parameter], wanted.weights[parameter]
        place = worst(weight, right)
        start = self.script.weights(rank)[parameter]
        said = f"parameter {parameter}, {short(weight.dtype)}, element {place}: {shown(start, place)}"
        if shown(start, place) == shown(weight, place):
            said += " has not moved"
        else:
            said += f" has become {shown(weight, place)}"
        return self.failed("values", rank, said, shown(right, place), self._explained(rank, weights, wanted))

    def _explained(self, rank: int, weights: list[torch.Tensor], wanted: Expected) -> str:
        """The words of the variation that gives what was seen, if one does; else what the engine's state tells."""
        for how, words in VARIATIONS.items():
            if how in self.script.accepts:
                continue
            other = expected(self.script, rank, len(self.right), how)[self.number].weights
            if all(weight.isfinite().all() for weight in other) and self._agree(weights, other):
                return words
        kept = self.seen(rank).state.kept
        before = self.seen_at(rank, self.number - 1).state.kept if self.number else []
        told = about_moments(self.script, self.number, kept, before, wanted)
        if told:
            return told
        for parameter, weight in enumerate(weights):
            if not weight.isfinite().all():
                return (
                    f"parameter {parameter} holds inf or NaN, both moments are right: a division by zero? The first"
                    " step is t = 1"
                )
        return about_weights(kept, weights, wanted)

    @property
    def _scale_before(self) -> float:
        if not self.number:
            return float(self.script.option("scale"))
        return self.right[0][self.number - 1].scale
