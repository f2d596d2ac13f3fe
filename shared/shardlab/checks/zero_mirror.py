"""Labs 06 to 08: what one process would get, with every rank's part of the batch and AdamW in float64.

A variation is a mistake by name: when what was seen agrees with it, the verdict can say what was done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from . import states_reference
from .zero_cases import Micro, ZeroCase
from .zero_models import CHAINS, SHAPES, build, inputs, loss_of

# What a learner reads when the numbers are those of the variation.
VARIATIONS = {
    "no clipping": "these are the numbers of gradients that were not clipped",
    "clipped up": "these are the numbers of gradients that were made larger: clipping shrinks, its factor is at most 1",
    "clipped scaled": "these are the numbers of clipping by the norm of gradients that are still scaled",
    "clipped by group": "these are the numbers of clipping each group by its own norm: one norm over all groups",
    "clipped by sum": "these are the numbers of clipping by the norm of the sum over the ranks, not of the mean",
    "sum": "these are the numbers of the sum of the ranks' gradients: it has to be divided by N, once",
    "divided twice": "these are the numbers of gradients divided by N twice",
    "reduced again": "these are the numbers of the first backward's sums reduced again with the second's: what has been"
    " reduced stays out of the next reduction",
    "one rank": "each element follows one rank's own gradient: nothing was reduced",
    "never unscaled": states_reference.VARIATIONS["never unscaled"],
    "unscaled twice": states_reference.VARIATIONS["unscaled twice"],
    "new scale": states_reference.VARIATIONS["new scale"],
    "options lost": "these are the numbers of the constructor's arguments for all groups: each group has options of its"
    " own",
    "first group": "these are the numbers of the first group's options for all groups",
    "no schedule": 'these are the numbers of the first "lr": param_groups is read anew at every step',
    "last backward": "these are the numbers of the last backward alone: gradients add up until zero_grad()",
    "micros averaged": "these are the numbers of gradients averaged over the backwards: they add up",
    "never cleared": "these are the numbers of gradients that zero_grad() did not clear",
    "count over skips": states_reference.VARIATIONS["count over skips"],
    "moments over skips": "these are the numbers of moments and a step count that moved in the skipped step",
    "rounded": states_reference.VARIATIONS["rounded"],
    "no decay": states_reference.VARIATIONS["no decay"],
    "coupled decay": states_reference.VARIATIONS["coupled decay"],
    "decay without lr": states_reference.VARIATIONS["decay without lr"],
    "no correction": states_reference.VARIATIONS["no correction"],
    "count per parameter": states_reference.VARIATIONS["count per parameter"],
    "count ahead": states_reference.VARIATIONS["count ahead"],
    "default eps": states_reference.VARIATIONS["default eps"],
    "default betas": states_reference.VARIATIONS["default betas"],
    "default lr": states_reference.VARIATIONS["default lr"],
    "eps inside": states_reference.VARIATIONS["eps inside"],
    "betas swapped": states_reference.VARIATIONS["betas swapped"],
    "uphill": states_reference.VARIATIONS["uphill"],
}


@dataclass(frozen=True)
class Expected:
    """After one step. weights: float64, before they are rounded to the model's dtype. losses[micro][rank]."""

    weights: list[torch.Tensor]
    overflow: bool
    scale: float
    losses: list[list[float]]
    norm: float  # of the mean gradient
    peek: float  # the loss of an evaluation after the step


_known: dict[str, list[Expected]] = {}


def expected(case: ZeroCase, world_size: int, how: str = "", rank: int = 0) -> list[Expected]:
    """Step by step, what must be seen. how: a variation's name, to see what that would give. rank: of "one rank".

    Played once and kept: it does not depend on the engine.
    """
    key = repr((case, world_size, how, rank))
    if key not in _known:
        _known[key] = _Mirror(case, world_size, how, rank).play()
    return _known[key]


class _Mirror:
    def __init__(self, case: ZeroCase, world_size: int, how: str, rank: int) -> None:
        self.case, self.n, self.how, self.rank = case, world_size, how, rank
        self.model = build(case.kind, case.torch_dtype, 0)
        self.replicas = [build(case.kind, case.torch_dtype, 0) for _ in range(world_size)]
        self.parameters = list(self.model.parameters())
        self.trained = [place for place, each in enumerate(self.parameters) if each.requires_grad]
        self.master = [each.detach().double().clone() for each in self.parameters]
        self.first = [torch.zeros_like(each) for each in self.master]
        self.second = [torch.zeros_like(each) for each in self.master]
        self.counts = [0] * len(self.master)
        self.scale, self.good = float(case.option("scale")), 0
        self.kept: list[torch.Tensor | None] = [None] * len(self.master)

    def play(self) -> list[Expected]:
        with torch.random.fork_rng(devices=[]):
            return [self._step(number) for number in range(len(self.case.steps))]

    def _step(self, number: int) -> Expected:
        step = self.case.steps[number]
        if step.clear and self.how != "never cleared":
            self.kept = [None] * len(self.master)
        losses, overflow = [], False
        for place, micro in enumerate(step.micros):
            own, told = self._gradients(number, place, micro)
            losses.append(told)
            overflow = overflow or any(
                each is not None and not bool(each.isfinite().all()) for one in own for each in one
            )
            if self.how == "last backward":
                self.kept = [None] * len(self.master)
            for at, mean in enumerate(self._reduced(own)):
                before = self.kept[at]
                if self.how == "reduced again" and before is not None:
                    before = before * self.n
                self.kept[at] = mean if before is None else before if mean is None else before + mean
        scale = self.scale
        if overflow:
            self.scale, self.good = max(self.scale / 2, 1.0), 0
        else:
            self.good += 1
            if self.good == self.case.option("growth_interval"):
                self.scale, self.good = self.scale * 2, 0
        norm = self._norm(self.trained)
        if not overflow or self.how in ("count over skips", "moments over skips"):
            self._update(number, scale, overflow)
        seen_by = 0.0
        if self.case.peeked:
            self._load(self.replicas[0])
            seen_by = float(peek(self.replicas[0], self.case))
        return Expected([each.clone() for each in self.master], overflow, self.scale, losses, norm, seen_by)

    def _load(self, replica: nn.Module) -> None:
        with torch.no_grad():
            for parameter, master in zip(replica.parameters(), self.master, strict=True):
                parameter.copy_(master.to(parameter.dtype))
                parameter.grad = None

    def _gradients(self, number: int, place: int, micro: Micro) -> tuple[list[list[torch.Tensor | None]], list[float]]:
        """own[rank][parameter], unscaled, float64; and each rank's loss."""
        own, losses = [], []
        for rank, replica in enumerate(self.replicas):
            self._load(replica)
            total = loss_at(replica, self.case, rank, number, place, micro)
            losses.append(float(total.detach()))
            factor = self.scale / self.n
            (total * factor).backward()
            own.append([None if each.grad is None else each.grad.double() / factor for each in replica.parameters()])
        return own, losses

    def _reduced(self, own: list[list[torch.Tensor | None]]) -> list[torch.Tensor | None]:
        found: list[torch.Tensor | None] = []
        for at, parts in enumerate(zip(*own, strict=True)):
            present = [each for each in parts if each is not None]
            if at not in self.trained or not present:
                found.append(None)
                continue
            total = torch.stack(present).sum(0)
            if self.how in ("one rank", "one rank's share"):
                part = parts[self.rank]
                share = 1.0 if self.how == "one rank" else 1 / self.n
                found.append(torch.zeros_like(total) if part is None else part * share)
            else:
                factor = {"sum": 1.0, "divided twice": 1 / self.n**2}.get(self.how, 1 / self.n)
                found.append(total * factor)
        return found

    def _norm(self, places: list[int]) -> float:
        squares = [float(each.square().sum()) for at in places if (each := self.kept[at]) is not None]
        return sum(squares) ** 0.5

    def _clip(self, places: list[int], scale: float) -> float:
        most = self.case.option("max_norm")
        if most is None or self.how == "no clipping":
            return 1.0
        norm = self._norm(places)
        norm *= {"clipped scaled": scale, "clipped by sum": float(self.n)}.get(self.how, 1.0)
        factor = most / (norm + 1e-6)
        return factor if self.how == "clipped up" else min(1.0, factor)

    def _update(self, number: int, scale: float, overflow: bool) -> None:
        step, how = self.case.steps[number], self.how
        groups = max(1, len(self.case.groups))
        clip = self._clip(self.trained, scale)
        for at in self.trained:
            group = at % groups
            gradient = self.kept[at]
            if gradient is None:
                if how == "unused skipped":
                    continue
                gradient = torch.zeros_like(self.master[at])
            if how == "clipped by group":
                clip = self._clip([each for each in self.trained if each % groups == group], scale)
            gradient = gradient * clip
            gradient = gradient * {"never unscaled": scale, "unscaled twice": 1 / scale}.get(how, 1.0)
            if how == "new scale":
                gradient = gradient * scale / self.scale
            if how == "micros averaged":
                gradient = gradient / len(step.micros)
            self.counts[at] += 1
            if overflow and how == "count over skips":
                continue
            if overflow:
                gradient = gradient.nan_to_num(0.0, 0.0, 0.0)
            options: Any = _Options(self.case, self._source(group), self._rate(number, group))
            count = self.counts[at]
            if how == "count per parameter":
                count = (count - 1) * len(self.trained) + self.trained.index(at) + 1
            new, self.first[at], self.second[at] = states_reference._update(
                options, self.master[at], self.first[at], self.second[at], gradient, count, how
            )
            if not overflow:
                self.master[at] = new
            if how == "rounded":
                self.master[at] = self.master[at].to(self.case.torch_dtype).double()

    def _source(self, group: int) -> int | None:
        return {"options lost": None, "first group": 0}.get(self.how, group)

    def _rate(self, number: int, group: int) -> float | None:
        if self.how in ("no schedule", "options lost"):
            return None
        set_so_far = [step.rates for step in self.case.steps[: number + 1] if step.rates]
        return set_so_far[-1][0 if self.how == "first group" else group] if set_so_far else None


@dataclass(frozen=True)
class _Options:
    """What `states_reference` asks a script for."""

    case: ZeroCase
    group: int | None
    rate: float | None

    def option(self, name: str) -> Any:
        return self.rate if name == "lr" and self.rate is not None else self.case.option(name, self.group)


def loss_at(model: Any, case: ZeroCase, rank: int, number: int, place: int, micro: Micro) -> torch.Tensor:
    """The loss of one backward, summed over its forwards. model: a replica, or an engine around one."""
    losses = []
    for forward in range(micro.forwards):
        x = inputs(case.kind, case.torch_dtype, rank, 0 if case.steady else number, 10 * place + forward)
        for bad in micro.bad:
            if bad.ranks is None or rank in bad.ranks:
                x[bad.element] = bad.value
        losses.append(loss_of(case.kind, model(*arguments(case, x, micro.choice(rank)))))
        if micro.peeks:
            peek(model, case)
    return torch.stack(losses).sum() if len(losses) > 1 else losses[0]


def peek(model: nn.Module, case: ZeroCase) -> torch.Tensor:
    """An evaluation on inputs that are the same on every rank."""
    with torch.no_grad():
        x = inputs(case.kind, case.torch_dtype, 0, 99, 0)
        return loss_of(case.kind, model(*arguments(case, x, "both")))


def arguments(case: ZeroCase, x: torch.Tensor, choice: str) -> tuple:
    return (x,) if case.kind in SHAPES or case.kind in CHAINS else (x, choice)
