"""Lab 05: what one process would get: every rank's replica, played side by side in this process without messages."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from .overlap_cases import Micro, OverlapCase, Step
from .overlap_models import build, inputs, loss_of

RATE = 0.02  # learning rate of the SGD between steps


@dataclass(frozen=True)
class Expected:
    """Of one parameter after one step's backward. local[r]: what rank r had accumulated, None if it has no gradient.

    mean: over the ranks, float64; None when no rank has one. last[r]: of the last micro-step alone.
    """

    local: list[torch.Tensor | None]
    last: list[torch.Tensor | None]
    mean: torch.Tensor | None
    parameters: list[torch.Tensor]


@dataclass
class Mirror:
    """The replicas of all ranks, which begin as rank 0's."""

    case: OverlapCase
    world_size: int
    twin: int = 0
    replicas: list[nn.Module] = field(init=False)

    def __post_init__(self) -> None:
        self.replicas = [build(self.case.kind, 0, self.twin) for _ in range(self.world_size)]

    def initial(self) -> dict[str, torch.Tensor]:
        """Rank 0's parameters and buffers, as every rank must have them."""
        return {name: tensor.detach().clone() for name, tensor in self.replicas[0].state_dict().items()}

    def step(self, number: int) -> dict[str, Expected]:
        """Plays a step up to and with backward; by the name of each parameter that is trained."""
        step = self.case.steps[number]
        for replica in self.replicas:
            clear(replica, step)
        before: list[list[torch.Tensor | None]] = []
        for place, micro in enumerate(step.micros):
            before = [_gradients(replica) for replica in self.replicas]
            if micro.sync:
                self._share_buffers()
            for rank, replica in enumerate(self.replicas):
                micro_loss(replica, micro, rank, number, place, self.twin).backward()
        after = [_gradients(replica) for replica in self.replicas]
        parameters = [list(replica.parameters()) for replica in self.replicas]
        expected = {}
        for place, (name, parameter) in enumerate(self.replicas[0].named_parameters()):
            if not parameter.requires_grad:
                continue
            local = [gradients[place] for gradients in after]
            last = [_difference(now[place], then[place]) for now, then in zip(after, before, strict=True)]
            weights = [each[place].detach().double().clone() for each in parameters]
            expected[name] = Expected(local, last, _mean(local), weights)
        return expected

    def finish(self, expected: dict[str, Expected], model: nn.Module) -> None:
        """Every replica gets the mean, and the weights that `model` has after its step: rounding must not add up."""
        for replica in self.replicas:
            for (name, parameter), stepped in zip(replica.named_parameters(), model.parameters(), strict=True):
                if name in expected:
                    mean = expected[name].mean
                    parameter.grad = None if mean is None else mean.to(parameter.dtype).clone()
                parameter.data.copy_(stepped.detach())

    def _share_buffers(self) -> None:
        source = list(self.replicas[0].buffers())
        for replica in self.replicas[1:]:
            for buffer, right in zip(replica.buffers(), source, strict=True):
                buffer.data.copy_(right)


def clear(model: nn.Module, step: Step) -> None:
    """What `optimizer.zero_grad(...)` does before a step."""
    for parameter in model.parameters():
        if step.clear == "None":
            parameter.grad = None
        elif step.clear == "zeros" and parameter.grad is not None:
            parameter.grad.zero_()


def micro_loss(model: nn.Module, micro: Micro, rank: int, step: int, place: int, twin: int) -> torch.Tensor:
    """The loss of one micro-step, summed over its forwards. model: a replica, or an engine around one."""
    losses = [
        loss_of(model(inputs(rank, step, 10 * place + forward, twin), micro.choice(rank)))
        for forward in range(micro.forwards)
    ]
    return torch.stack(losses).sum() if len(losses) > 1 else losses[0]


@torch.no_grad()
def descend(model: nn.Module) -> None:
    """Plain SGD: an optimizer that hides a wrong factor would hide the fault."""
    for parameter in model.parameters():
        if parameter.grad is not None and parameter.requires_grad:
            parameter.sub_(RATE * parameter.grad)


def _gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if each.grad is None else each.grad.detach().double().clone() for each in model.parameters()]


def _difference(now: torch.Tensor | None, then: torch.Tensor | None) -> torch.Tensor | None:
    return now if now is None or then is None else now - then


def _mean(local: list[torch.Tensor | None]) -> torch.Tensor | None:
    present = [one for one in local if one is not None]
    return torch.stack(present).sum(0) / len(local) if present else None
