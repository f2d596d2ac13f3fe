"""Lab 05's DistributedDataParallel beside torch's own: the time of a training step, in turns on the same ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shardlab import reuse
from shardlab.model import GPT, TEN_MILLION, loss_function
from shardlab.runtime import launch
from shardlab.text import batch

ROUNDS = 16
WARM = 3  # rounds that do not count: torch's plans its buckets anew after the first
PASSAGES = 4  # of 64 characters, on each rank


def step_seconds(own: Callable[[torch.nn.Module], torch.nn.Module]) -> list[tuple[float, float]]:
    """Seconds of a forward and backward in each round, between two barriers: the lab's engine, torch's."""
    torch.manual_seed(0)
    first, second = GPT(TEN_MILLION), GPT(TEN_MILLION)
    engines = [own(first), DistributedDataParallel(second)]
    rounds = []
    for turn in range(WARM + ROUNDS):
        inputs, targets = batch(turn, PASSAGES, TEN_MILLION.context, seed=dist.get_rank())
        seconds = [0.0, 0.0]
        for which in (0, 1) if turn % 2 else (1, 0):
            engine = engines[which]
            engine.zero_grad()
            dist.barrier()
            began = time.perf_counter()
            loss = loss_function(engine(inputs), targets)
            engine.backward(loss) if which == 0 else loss.backward()
            dist.barrier()
            seconds[which] = time.perf_counter() - began
        rounds.append((seconds[0], seconds[1]))
    return rounds[WARM:]


def ddp_against_torchs(world_size: int) -> tuple[float, str]:
    """The median, over the rounds, of the lab's time divided by torch's in the same round."""
    own = reuse("05_ddp_overlap").DistributedDataParallel
    rounds = launch(step_seconds, world_size, args=(own,), device="cpu", meter=False, timeout=120).results[0]
    ratio = statistics.median(mine / torchs for mine, torchs in rounds)
    ours, theirs = (statistics.median(times) for times in zip(*rounds, strict=True))
    return ratio, f"{1e3 * ours:.0f} ms against {1e3 * theirs:.0f} ms"
