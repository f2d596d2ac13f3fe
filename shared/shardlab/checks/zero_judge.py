"""Labs 06 to 08: judges the values that an engine showed: weights, decisions, the scale, losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import CheckFailed
from .ddp_words import numbers
from .observe import Trial, line_at
from .zero_cases import ZeroCase
from .zero_explain import explained
from .zero_mirror import Expected, expected
from .zero_models import initial, parameters_of
from .zero_play import Played, StepSeen

# Of the update of one step, and of a weight: what the order of sums and the dtype's rounding may change.
RELATIVE = {"float32": 1e-4, "float16": 6e-3, "bfloat16": 4e-2}
SPACING = {"float32": 1e-5, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class Judge:
    """One case of one trial. played[r]: what rank r showed. `all()` raises CheckFailed at the first fault."""

    trial: Trial
    index: int
    case: ZeroCase
    played: Sequence[Played]

    def all(self) -> None:
        for rank, one in enumerate(self.played):
            if one.lacks:
                needed = "backward, step, zero_grad, gathered, module, scale and param_groups; forward or __call__"
                raise self.failed("signature", rank, one.lacks, needed)
        if self.case.measured:
            return  # bytes are looked at
        self._start()
        right = expected(self.case, len(self.played))
        for number, wanted in enumerate(right):
            self._decisions(number, wanted)
            self._losses(number, wanted)
            self._weights(number, right)
            if self.case.peeked:
                self._peek(number, wanted)

    def failed(self, reason: str, rank: int | None, seen: str, wanted: str = "", look: str = "") -> CheckFailed:
        return self.trial.failed(self.index, reason, f"{self.trial.at(self.index, rank)}: {seen}", wanted, look)

    def step(self, rank: int, number: int) -> StepSeen:
        return self.played[rank].steps[number]

    def name(self, place: int) -> str:
        return names(self.case)[place]

    def when(self, number: int) -> str:
        return f"step {number + 1}" if len(self.case.steps) > 1 else "the step"

    def _start(self) -> None:
        """After construction every parameter and buffer is rank 0's."""
        right = initial(self.case.kind, self.case.torch_dtype, 0)
        for rank, one in enumerate(self.played):
            own = initial(self.case.kind, self.case.torch_dtype, rank)
            for name, wanted in right.items():
                seen = one.start[name]
                if seen.shape != wanted.shape or seen.dtype != wanted.dtype:
                    said = f"after construction '{name}' is {_kind(seen)}, inside gathered()"
                    raise self.failed("values", rank, said, _kind(wanted))
                if not torch.equal(seen, wanted):
                    held = "still this rank's own" if torch.equal(seen, own[name]) else numbers(seen)
                    look = "rank 0's parameters and buffers are broadcast when the engine is made, before they are cut"
                    other = seen[seen != wanted].nan_to_num(0.0)
                    if not bool(other.any()):
                        look = "memory that nobody wrote to: each rank puts its own part in its place before all_gather"
                    said = f"after construction '{name}' is {held}"
                    raise self.failed("values", rank, said, f"rank 0's: {numbers(wanted)}", look)

    def _decisions(self, number: int, wanted: Expected) -> None:
        answers = [self.step(rank, number).returned for rank in range(len(self.played))]
        bad = " and ".join(map(str, self.case.steps[number].bad[:2]))
        for rank, answer in enumerate(answers):
            if isinstance(answer, str):
                raise self.failed("values", rank, f"step() returned {answer}", "True: a step; False: skipped")
        wrong = [rank for rank, answer in enumerate(answers) if answer == wanted.overflow]
        if wrong:
            said = [f"rank {rank} {'stepped' if answer else 'skipped'}" for rank, answer in enumerate(answers)]
            told = f"{self.when(number)}: {bad or 'all gradients are finite'}; {', '.join(said[:4])}"
            rule = "False, on every rank: inf or NaN in any gradient of any rank is an overflow"
            look = (
                "the verdict is agreed on: one all-reduce over what each rank sees in its own part; inf counts as well"
                " as nan (isfinite), and also where max_norm is None"
            )
            if not wanted.overflow:
                look = (
                    "nan marks memory that nobody wrote to (padding and missing gradients are zeros), or that was read"
                    " before wait()"
                )
            raise self.failed("values", wrong[0], told, rule if wanted.overflow else "True: a step", look)
        for rank in range(len(self.played)):
            scale = self.step(rank, number).scale
            if scale != wanted.scale:
                raise self._scale(rank, number, scale, wanted)

    def _scale(self, rank: int, number: int, scale: float, wanted: Expected) -> CheckFailed:
        rule = "an overflow halves the scale, never below 1"
        if not wanted.overflow:
            interval = self.case.option("growth_interval")
            rule = f"it doubles after growth_interval = {interval} steps in a row without overflow, counted anew"
        seen = [self.step(rank, each) for each in range(max(0, number - 4), number + 1)]
        told = ", ".join(f"{'good' if each.returned else 'overflow'} {each.scale:g}" for each in seen)
        return self.failed(
            "values", rank, f"{self.when(number)}: scale {scale:g} after {told}", f"{wanted.scale:g}: {rule}"
        )

    def _losses(self, number: int, wanted: Expected) -> None:
        if wanted.overflow:
            return
        for rank in range(len(self.played)):
            for place, loss in enumerate(self.step(rank, number).losses):
                right = wanted.losses[place][rank]
                if math.isfinite(loss) and self._near(loss, right):
                    continue
                said = f"{self.when(number)}: the loss is {loss:.6g}"
                look = "are the weights that forward uses those of now, all of them, and the buffers?"
                if number:
                    look = "are the weights that forward uses those after the step before? " + look.capitalize()
                    look = (
                        "does forward use the weights as they are after the step before, or what was gathered earlier?"
                    )
                raise self.failed("values", rank, said, f"{right:.6g}, as in one process", look)

    def _peek(self, number: int, wanted: Expected) -> None:
        for rank in range(len(self.played)):
            loss = self.step(rank, number).peek
            if not (math.isfinite(loss) and self._near(loss, wanted.peek)):
                said = f"{self.when(number)}: evaluated afterwards under no_grad, the model's loss is {loss:.6g}"
                look = "forward must use the new weights, those that gathered() shows"
                raise self.failed("values", rank, said, f"{wanted.peek:.6g}, as in one process", look)

    def _near(self, loss: float, right: float) -> bool:
        return abs(loss - right) <= 20 * RELATIVE[self.case.dtype] * (1 + abs(right))

    def _weights(self, number: int, right: list[Expected]) -> None:
        wanted = right[number]
        for rank in range(len(self.played)):
            seen = self.step(rank, number).weights
            for place, (weight, target) in enumerate(zip(seen, wanted.weights, strict=True)):
                if weight.shape != target.shape:
                    said = f"{self.when(number)}: '{self.name(place)}' has the shape {tuple(weight.shape)}"
                    raise self.failed("values", rank, said, str(tuple(target.shape)))
            if wanted.overflow:
                self._unchanged(rank, number)
        if not any(self.agree(number, each) for each in self._accepted(number, wanted)):
            raise self._wrong(number, wanted)
        for rank, _ in enumerate(self.played):
            pairs = zip(self.step(rank, number).weights, self.step(0, number).weights, strict=True)
            for place, (weight, first) in enumerate(pairs):
                if not torch.equal(weight, first):
                    said = f"{self.when(number)}: '{self.name(place)}' is not the same bits as on rank 0"
                    raise self.failed("values", rank, said, "the same on all ranks, to the last bit, or they drift")

    def _accepted(self, number: int, wanted: Expected) -> list[Expected]:
        return [wanted, *(expected(self.case, len(self.played), how)[number] for how in self.case.accepts)]

    def agree(self, number: int, wanted: Expected) -> bool:
        return all(
            excess(self.case, weight, target) <= 0
            for rank in range(len(self.played))
            for weight, target in zip(self.step(rank, number).weights, wanted.weights, strict=True)
        )

    def before(self, rank: int, number: int, place: int) -> torch.Tensor:
        """A parameter on this rank before the step."""
        if number:
            return self.step(rank, number - 1).weights[place]
        return list(parameters_of(self.case.kind, self.case.torch_dtype).values())[place].detach()

    def _unchanged(self, rank: int, number: int) -> None:
        for place, weight in enumerate(self.step(rank, number).weights):
            then = self.before(rank, number, place)
            if not torch.equal(weight, then):
                at = int((weight.double() - then.double()).abs().nan_to_num(math.inf).reshape(-1).argmax())
                said = f"{self.when(number)} was skipped, yet '{self.name(place)}', element {at}, went from"
                said += f" {float(then.reshape(-1)[at]):.6g} to {float(weight.reshape(-1)[at]):.6g}"
                raise self.failed("values", rank, said, "a skipped step changes no weight, not by one bit")

    def _wrong(self, number: int, wanted: Expected) -> CheckFailed:
        for rank in range(len(self.played)):
            for place, (weight, target) in enumerate(zip(self.step(rank, number).weights, wanted.weights, strict=True)):
                if excess(self.case, weight, target) <= 0:
                    continue
                off = (weight.double() - target).abs().nan_to_num(math.inf, math.inf).reshape(-1)
                at = int(off.argmax())
                values = [each.double().reshape(-1)[at] for each in (self.before(rank, number, place), weight, target)]
                old, new, goal = (f"{float(each):.6g}" for each in values)
                moved = "has not moved" if old == new else f"has become {new}"
                said = f"{self.when(number)}: '{self.name(place)}', element {at}: {old} {moved}"
                look = explained(self, number, rank, place, at) or line_at(self.step(rank, number).where)
                return self.failed("values", rank, said, f"{goal}, as in one process", look)
        raise AssertionError("some weight is off")


def names(case: ZeroCase) -> list[str]:
    return list(parameters_of(case.kind, case.torch_dtype))


def excess(case: ZeroCase, weight: torch.Tensor, right: torch.Tensor) -> float:
    """By how much the worst element is off beyond what rounding explains. 0 or less is right, NaN is infinite."""
    if not weight.numel():
        return 0.0
    rate = max([float(case.option("lr")), *(rate for step in case.steps for rate in step.rates)])
    rate = max([rate, *(float(group.get("lr", 0)) for group in case.groups)])
    room = rate * RELATIVE[case.dtype] + SPACING[case.dtype] * (right.abs() + (case.dtype == "float32"))
    off = (weight.double() - right).abs() - room
    return math.inf if bool(off.isnan().any()) else float(off.max())


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
