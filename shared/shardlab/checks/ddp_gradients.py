"""Lab 03: models with gradients that differ between ranks, and how the averages are judged, inside each rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .ddp_modules import F16, F32, F64, GRADIENTS, KINDS, Spec, build, gradient, value
from .ddp_words import Guess, averaging_guesses, close, numbers, recognise
from .notes import Finding, Judged, Prepared
from .trial import digest_of

# Who has no gradient, of which parameters: (rank, world size, name) -> whether it is missing. By the words for it.
HOLES: dict[str, Callable[[int, int, str], bool]] = {
    "rank 1 has no gradient of 'second'": lambda rank, n, name: rank == 1 and name == "second",
    "rank 0 has no gradient of 'second'": lambda rank, n, name: rank == 0 and name == "second",
    "only the last rank has a gradient of 'first'": lambda rank, n, name: rank < n - 1 and name == "first",
    "no rank has a gradient of 'second'": lambda rank, n, name: name == "second",
    "rank 0 has no gradients at all": lambda rank, n, name: rank == 0,
    "no rank has any gradient": lambda rank, n, name: True,
}
OF_SIZES = tuple(HOLES)  # the model that these are tried on
OF_DTYPES = "rank 1 has no gradient of 'of_double', a float64"
HOLES[OF_DTYPES] = lambda rank, n, name: rank == 1 and name == "of_double"

_latest: dict[str, nn.Module] = {}  # of this rank: the model of the last case of a kind


@dataclass(frozen=True)
class GradientCase:
    """kind: of ddp_modules.KINDS. gradients: of ddp_modules.GRADIENTS. hole: of HOLES. again: the same model as in the
    case before, with new gradients: added in place onto zeros, as after zero_grad(set_to_none=False)."""

    kind: str
    about: str
    gradients: str = "exact"
    hole: str = ""
    again: bool = False

    @property
    def name(self) -> str:
        return self.about

    def _missing(self, rank: int, world_size: int, spec: Spec) -> bool:
        return spec.frozen or bool(self.hole and HOLES[self.hole](rank, world_size, spec.name))

    def prepare(self, rank: int, world_size: int) -> Prepared:
        specs, salt = KINDS[self.kind], int(self.again)
        module = _latest[self.kind] if self.again else build(self.kind, rank)
        _latest[self.kind] = module
        made = GRADIENTS[self.gradients]
        given = {
            spec.name: [
                None if self._missing(other, world_size, spec) else made(spec, other, salt)
                for other in range(world_size)
            ]
            for spec in specs
        }
        handed = [(spec, module.get_parameter(spec.name)) for spec in specs]
        for spec, parameter in handed:
            mine = given[spec.name][rank]
            if mine is None:
                parameter.grad = None
            elif self.again and parameter.grad is not None:
                parameter.grad.zero_().add_(gradient(spec, mine))
            else:
                parameter.grad = gradient(spec, mine)
        before = {spec.name: parameter.detach().clone() for spec, parameter in handed}
        parameters = {spec.name: [value(spec, other).double() for other in range(world_size)] for spec in specs}
        judge = _Judge(self, rank, module, handed, given, before, parameters)

        def spoil() -> None:
            if not self.again:
                for _, parameter in handed:
                    if parameter.grad is not None:
                        parameter.grad = parameter.grad.detach()

        return Prepared((module,), judge, spoil)


@dataclass(frozen=True)
class _Judge:
    case: GradientCase
    rank: int
    module: nn.Module
    handed: list[tuple[Spec, nn.Parameter]]
    given: dict[str, list[torch.Tensor | None]]
    before: dict[str, torch.Tensor]
    parameters: dict[str, list[torch.Tensor]]

    def __call__(self, returned: Any) -> Judged:
        finding = next((found for spec, p in self.handed if (found := self._finding(spec, p))), None)
        gradients = [p.grad for _, p in self.handed if isinstance(p.grad, torch.Tensor)]
        unusable = any(bool(one.isnan().any()) for one in gradients)
        return Judged(finding, digest_of(gradients), unusable)

    def _finding(self, spec: Spec, parameter: nn.Parameter) -> Finding | None:
        name, given = spec.name, self.given[spec.name]
        if self.module.get_parameter(name) is not parameter:
            words = f"the parameter '{name}' is another object now"
            return Finding(words, "the same parameters: the optimizer holds these", "change p.grad, not the module")
        if not torch.equal(parameter.detach(), self.before[name]):
            held = recognise(parameter.detach(), spec.dtype, self._of_parameters(name))
            words = f"the parameter '{name}' itself has changed" + (f": it is {held.words}" if held else "")
            return Finding(words, "parameters as they were; only .grad changes", "p.grad is what is averaged, not p")
        if spec.frozen:
            if parameter.grad is None:
                return None
            return Finding(
                f"the frozen parameter '{name}' (requires_grad=False) has a gradient now",
                "None, as before: with weight decay an optimizer would change the parameter",
                "skip parameters that do not require gradients",
            )
        return self._gradient(spec, parameter, given)

    def _of_parameters(self, name: str) -> list[Guess]:
        everybodys = torch.stack(self.parameters[name])
        mean, total = everybodys.mean(0), everybodys.sum(0)
        return [Guess(mean, "the mean of the ranks' parameters"), Guess(total, "the sum of the ranks' parameters")]

    def _gradient(self, spec: Spec, parameter: nn.Parameter, given: list[torch.Tensor | None]) -> Finding | None:
        name, n, seen = spec.name, len(given), parameter.grad
        nobody = all(one is None for one in given)
        if seen is None:
            if nobody:
                return None
            look = "a rank without a gradient takes part with zeros, and keeps the result as its p.grad"
            return Finding(f"'{name}'.grad is None", "the mean over the ranks, on every rank", look)
        zeros = torch.zeros_like(self.before[name], dtype=torch.float64)
        mean = torch.stack([zeros if one is None else one for one in given]).sum(0) / n
        seen = seen.detach()
        if close(seen, mean, spec.dtype):
            return None
        expected = f"the mean over the ranks: {numbers(mean)}"
        if spec.dtype is F64 and close(seen, mean, F32):
            look = "float64 values went through a smaller type on their way"
            return Finding(f"'{name}'.grad is the mean, but digits were lost", "all digits of float64", look)
        guesses = averaging_guesses(given, self.rank, self.parameters[name])
        guess = recognise(seen, spec.dtype, [*self._earlier(spec, n), *guesses])
        if guess is not None:
            return Finding(f"'{name}'.grad is {guess.words}", expected, guess.look)
        return Finding(f"'{name}'.grad is {numbers(seen)}", expected, self._look(spec, seen, mean))

    def _look(self, spec: Spec, seen: torch.Tensor, mean: torch.Tensor) -> str:
        if seen.numel() and not bool(seen.isfinite().all()):
            if spec.dtype is F16:
                return "float16 ends at 65,504: divide before summing, or sum in float32"
            return "memory is read that nothing was written to"
        others = [
            other.name
            for other, _ in self.handed
            if other.name != spec.name and other.shape == spec.shape and self._is_mean_of(other.name, seen, spec.dtype)
        ]
        if others:
            return f"these are the values of '{others[0]}': ranks or slices do not line up"
        return "divided once, summed once, each piece back where it came from?"

    def _earlier(self, spec: Spec, n: int) -> list[Guess]:
        if not self.case.again:
            return []
        before = torch.stack([GRADIENTS[self.case.gradients](spec, rank, 0) for rank in range(n)]).sum(0) / n
        return [
            Guess(before, "the mean of the gradients of the call before", "what is kept from one call to the next?")
        ]

    def _is_mean_of(self, name: str, seen: torch.Tensor, dtype: torch.dtype) -> bool:
        present = [one for one in self.given[name] if one is not None]
        return bool(present) and close(seen, torch.stack(present).sum(0) / len(self.given[name]), dtype)


def gradient_cases(n: int) -> list[GradientCase]:
    """Cases at world size n, the simplest first. Index 1 is the one whose calls and bytes are judged."""
    first = [
        GradientCase("two", "two parameters"),
        GradientCase("many", "9 parameters, one frozen, one tied"),
        GradientCase("many", "the same model with new gradients", again=True),
        GradientCase("sizes", "gradients as a training step makes them", gradients="normal"),
    ]
    if n == 1:
        return [*first, GradientCase("none", "a model without parameters")]
    holes = [GradientCase("sizes", hole, hole=hole) for hole in OF_SIZES[: len(OF_SIZES) if n <= 3 else 2]]
    if n > 3:
        return [*first, *holes]
    return [
        *first,
        *holes,
        GradientCase("equal", f"equal sizes, {OF_SIZES[0]}", hole=OF_SIZES[0]),
        GradientCase("frozen", "a frozen parameter between two others"),
        GradientCase("shapes", "0-d, empty and transposed parameters"),
        GradientCase("dtypes", "float32, 16, 64 and bfloat16 in one model"),
        GradientCase("dtypes", OF_DTYPES, hole=OF_DTYPES),
        GradientCase("none", "a model without parameters"),
        # At N = 3, dividing by sqrt(N) before and after would overflow too, which is right everywhere else.
        *([GradientCase("half", "float16 gradients of 40,000 on every rank", gradients="large")] if n == 2 else []),
    ]


MEASURED = 1  # the case whose calls and bytes are judged
DTYPES = "dtypes"  # the kind whose calls are judged for the flat way too
