"""Training as labs 06 to 08 do it, to be compared: on an engine, in one process, on torch's own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch import nn

from shardlab import reuse
from shardlab.communicator import Library
from shardlab.model import GPT, Size, loss_function
from shardlab.text import batch

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a rank need not know this folder

RINGS = reuse("06_zero1").Rings
STAGES = {
    "Zero1": reuse("06_zero1").Zero1,
    "Zero2": reuse("07_zero2").Zero2,
    "Zero3": reuse("08_zero3").Zero3,
}
COMMUNICATORS = {"library": Library, "rings": RINGS}
MixedPrecisionAdam = reuse("01_model_states").MixedPrecisionAdam
ROWS = 30  # of each micro-batch of all ranks together: a multiple of 2, 3, 5
STEPS = 4


@dataclass(frozen=True)
class Case:
    """A model and how it is trained. Everything that the engines promise occurs in one of them."""

    name: str
    tied: bool = False
    frozen: tuple[str, ...] = ()  # what the names of frozen parameters begin with
    dtype: torch.dtype = torch.float32
    micro: int = 1  # backwards before a step
    groups: bool = False  # matrices decay, the rest does not and learns more slowly
    schedule: bool = False  # the learning rate falls with every step
    max_norm: float | None = None
    ahead: bool = False  # all forwards of a step before its first backward, and an evaluation between them
    bucket_bytes: int = 6000

    def model(self) -> GPT:
        """5,472 parameters, 4,680 when tied, in tensors of many sizes."""
        model = GPT(Size(layers=2, width=12, heads=2, context=8, tied=self.tied)).to(self.dtype)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(self.frozen) if self.frozen else True)
        return model

    def groups_of(self, model: nn.Module) -> list[dict[str, Any]]:
        """As torch.optim takes them. lr and eps are such that a wrong factor in a gradient moves weights elsewhere."""
        options = {"lr": 0.02, "betas": (0.9, 0.99), "eps": 1e-2, "weight_decay": 0.1}
        trained = [each for each in model.parameters() if each.requires_grad]
        if not self.groups:
            return [{**options, "params": trained}]
        matrices = [each for each in trained if each.dim() > 1]
        others = [each for each in trained if each.dim() < 2]
        return [
            {**options, "params": matrices},
            {**options, "params": others, "lr": 0.01, "weight_decay": 0.0},
        ]

    @property
    def scale(self) -> float:
        """In float16 small enough for the sum of these gradients, large enough for the smallest of them."""
        return 2.0**16 if self.dtype == torch.float32 else 2.0**8

    def rates(self, first: float) -> Iterator[float]:
        for step in range(STEPS):
            yield first * (1 - step / STEPS) if self.schedule else first

    def batches(self, step: int, rank: int, world_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's rows of each micro-batch."""
        for micro in range(self.micro):
            inputs, targets = batch(step * self.micro + micro, ROWS, 8, 0)
            yield inputs[rank::world_size], targets[rank::world_size]


CASES = [
    Case("plain"),
    Case("everything", micro=2, groups=True, schedule=True, max_norm=0.3),
    Case("tied", tied=True, groups=True, micro=2, ahead=True),
    Case("frozen", frozen=("embedding", "blocks.0.mlp"), groups=True, max_norm=0.3),
    Case("all but 12 elements frozen", frozen=("embedding", "positions", "blocks", "norm.weight", "head")),
    Case("float16", dtype=torch.float16, groups=True, max_norm=0.3),
]


def flat_weights(model: nn.Module) -> torch.Tensor:
    """All weights end to end, in float32, copied."""
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
    return torch.cat([each.detach().float().flatten() for each in whole])


def seeded(case: Case, seed: int) -> GPT:
    torch.manual_seed(seed)
    return case.model()


def start(case: Case, stage: str, communicator: str) -> Any:
    """The engine of this stage. Ranks have different weights: it makes them rank 0's."""
    model = seeded(case, dist.get_rank())
    return STAGES[stage](
        model,
        groups=case.groups_of(model),
        max_norm=case.max_norm,
        bucket_bytes=case.bucket_bytes,
        scale=case.scale,
        communicator=COMMUNICATORS[communicator](),
    )


def step_of(trained: Any, case: Case, step: int) -> bool:
    """One step of an engine on this rank's part of the batch."""
    trained.zero_grad()
    batches = case.batches(step, dist.get_rank(), dist.get_world_size())
    if not case.ahead:
        for inputs, targets in batches:
            trained.backward(loss_function(trained(inputs), targets))
        return trained.step()
    losses = []
    for inputs, targets in batches:
        losses.append(loss_function(trained(inputs), targets))
        with torch.no_grad():
            trained(inputs[:1])
    for loss in losses:
        trained.backward(loss)
    return trained.step()


def on_engine(case: Case, stage: str, communicator: str) -> torch.Tensor:
    trained = start(case, stage, communicator)
    rates = [case.rates(group["lr"]) for group in trained.param_groups]
    for step in range(STEPS):
        for group, rate in zip(trained.param_groups, rates, strict=True):
            group["lr"] = next(rate)
        assert step_of(trained, case, step), "a step was skipped"
    with trained.gathered():
        return flat_weights(trained.module)


def in_one_process(case: Case) -> torch.Tensor:
    """The optimizer of lab 01, one for each group, on the whole batch."""
    model = seeded(case, 0)
    groups = case.groups_of(model)
    optimizers = [
        MixedPrecisionAdam(group["params"], **{key: value for key, value in group.items() if key != "params"})
        for group in groups
    ]
    trained = [each for each in model.parameters() if each.requires_grad]
    rates = [case.rates(group["lr"]) for group in groups]
    for step in range(STEPS):
        model.zero_grad()
        for inputs, targets in case.batches(step, 0, 1):
            (loss_function(model(inputs), targets) * case.scale).backward()
        squares = [(each.grad.double() / case.scale).square().sum() for each in trained if each.grad is not None]
        norm = torch.stack(squares).sum().sqrt().item()
        factor = 1.0 if case.max_norm is None else min(1.0, case.max_norm / (norm + 1e-6))
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.lr, optimizer.scale = next(rate), case.scale / factor  # so it is clipped in float32
            assert optimizer.step()
    return flat_weights(model)


def on_torchs(case: Case, way: str) -> torch.Tensor:
    """The same on torch's own. way: "ddp", with ZeroRedundancyOptimizer, or "fsdp2"."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = seeded(case, 0)
    trained, make_optimizer = (replicated if way == "ddp" else sharded)(model)
    optimizer = make_optimizer(case.groups_of(model))  # of the parameters as they are now: fully_shard makes new ones
    rates = [case.rates(group["lr"]) for group in optimizer.param_groups]
    for step in range(STEPS):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = next(rate)
        optimizer.zero_grad()
        for inputs, targets in case.batches(step, rank, world_size):
            loss_function(trained(inputs), targets).backward()
        if case.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
        optimizer.step()
    return flat_weights(model)


def replicated(model: nn.Module) -> tuple[nn.Module, Callable[[list], Any]]:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model), lambda groups: ZeroRedundancyOptimizer(groups, torch.optim.AdamW)


def sharded(model: GPT) -> tuple[nn.Module, Callable[[list], Any]]:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model), torch.optim.AdamW
