"""Labs 06 to 08 beside torch's own: time of a training step and bytes held, in turns on the same ranks.

ZeRO-1 and ZeRO-2 against DDP with ZeroRedundancyOptimizer, ZeRO-3 against FSDP2 (`fully_shard` on each block and on the
root, which is the lab's own division into units). AdamW, fp32, the same GPT and the same batches.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from shardlab import reuse
from shardlab.meters import memory_so_far
from shardlab.model import GPT, TEN_MILLION, loss_function
from shardlab.runtime import launch
from shardlab.text import batch

ROUNDS = 12
WARM = 3  # rounds that do not count: buckets are planned anew after the first, and ZeRO-3 learns the order of its units
PASSAGES = 4  # of 64 characters, on each rank
LABS = {"Zero1": "06_zero1", "Zero2": "07_zero2", "Zero3": "08_zero3"}

Step = Callable[[torch.Tensor, torch.Tensor], None]


def own(stage: str, engine: type, rings: type) -> Step:
    """A training step of the lab's engine, on the rings of lab 04."""
    trained: Any = engine(GPT(TEN_MILLION), communicator=rings())

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        trained.zero_grad()
        trained.backward(loss_function(trained(inputs), targets))
        trained.step()

    return step


def torchs(stage: str) -> Step:
    """The same step of torch's own."""
    model = GPT(TEN_MILLION)
    optimizer: torch.optim.Optimizer
    if stage == "Zero3":
        for block in model.blocks:
            fully_shard(block)
        trained: torch.nn.Module = fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    else:
        trained = DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss_function(trained(inputs), targets).backward()
        optimizer.step()

    return step


def examples(turn: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batch(turn, PASSAGES, TEN_MILLION.context, seed=dist.get_rank())


def step_seconds(stage: str, engine: type, rings: type) -> list[tuple[float, float]]:
    """Seconds of a step in each round, between two barriers: the lab's engine, torch's."""
    torch.manual_seed(0)
    steps = [own(stage, engine, rings), torchs(stage)]
    rounds = []
    for turn in range(WARM + ROUNDS):
        inputs, targets = examples(turn)
        seconds = [0.0, 0.0]
        for which in (0, 1) if turn % 2 else (1, 0):
            dist.barrier()
            began = time.perf_counter()
            steps[which](inputs, targets)
            dist.barrier()
            seconds[which] = time.perf_counter() - began
        rounds.append((seconds[0], seconds[1]))
    return rounds[WARM:]


def step_against_torchs(stage: str, world_size: int) -> tuple[float, str]:
    """The median, over the rounds, of the lab's time divided by torch's in the same round."""
    arguments = (stage, *from_the_labs(stage))
    rounds = launch(step_seconds, world_size, args=arguments, device="cpu", meter=False, timeout=120).results[0]
    ratio = statistics.median(mine / theirs for mine, theirs in rounds)
    ours, theirs = (statistics.median(times) for times in zip(*rounds, strict=True))
    return ratio, f"{1e3 * ours:.0f} ms against {1e3 * theirs:.0f} ms"


def bytes_held(stage: str, make: Callable[..., Step], *arguments: Any) -> tuple[int, int]:
    """Live bytes of this rank between two steps, and the most there were in the second."""
    inputs, targets = examples(0)
    gc.collect()
    before = memory_so_far().at_end.live
    step = make(stage, *arguments)
    step(inputs, targets)
    dist.barrier()
    gc.collect()
    rest = memory_so_far().at_end
    step(inputs, targets)
    peak = max(sample.live for sample in memory_so_far().samples if sample.time > rest.time)
    return rest.live - before, peak - before


def both_held(stage: str, engine: type, rings: type) -> list[tuple[int, int]]:
    torch.manual_seed(0)
    return [bytes_held(stage, own, engine, rings), bytes_held(stage, torchs)]


def held_against_torchs(stage: str, world_size: int) -> tuple[float, str]:
    """The lab's bytes between steps divided by torch's, each on its fullest rank. Tells of the peaks too."""
    run = launch(both_held, world_size, args=(stage, *from_the_labs(stage)), device="cpu", timeout=120)
    (ours, our_peak), (theirs, their_peak) = (
        map(max, zip(*ranks, strict=True)) for ranks in zip(*run.results, strict=True)
    )
    peaks = f"peaks {our_peak / 1e6:.0f} and {their_peak / 1e6:.0f} MB"
    return ours / theirs, f"{ours / 1e6:.1f} MB against {theirs / 1e6:.1f} MB; {peaks}"


def from_the_labs(stage: str) -> tuple[type, type]:
    """The engine of this stage, and the rings to run it on."""
    return getattr(reuse(LABS[stage]), stage), reuse(LABS["Zero1"]).Rings
