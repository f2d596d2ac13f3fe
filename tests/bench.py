"""What the course promises, measured: `make bench`. Prints a table and ends with 1 if a bound is missed.

Every figure that can be is a ratio of two ways measured side by side in one run, in turns, by their medians, so that a
slow or busy machine slows both. A missed bound is measured again, twice at most: other work on the machine only ever
spoils a figure. Run it on a quiet machine all the same.
"""

from __future__ import annotations

import operator
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

from bench_ddp import ddp_against_torchs
from bench_zero import held_against_torchs, step_against_torchs
from shardlab.errors import UsageError
from shardlab.runtime import launch

ELEMENTS = 4_000_000  # 16 MB of float32
TRIES = 3


@dataclass(frozen=True)
class Promise:
    """One line of the table. measure() gives the figure, and what it was made from, in words."""

    name: str
    measure: Callable[[], tuple[float, str]]
    sign: str  # "<" or ">="
    bound: float
    unit: str = ""

    def kept(self, figure: float) -> bool:
        return {"<": operator.lt, "<=": operator.le, ">=": operator.ge}[self.sign](figure, self.bound)


def median(times: Iterable[float]) -> float:
    return statistics.median(times)


# --- starting ranks


def hello() -> torch.Tensor:
    return torch.full((1000,), float(dist.get_rank()))


def spawned(rank: int, folder: str, world_size: int) -> None:
    """What a course without a launcher of its own does: init, work, leave the result in a file."""
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    torch.save(hello(), f"{folder}/{rank}")
    dist.destroy_process_group()


def by_spawn(world_size: int) -> float:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(spawned, (folder, world_size), nprocs=world_size)
        results = [torch.load(f"{folder}/{rank}") for rank in range(world_size)]
    assert [float(result[0]) for result in results] == list(range(world_size))
    return time.perf_counter() - began


def by_launch(world_size: int) -> float:
    began = time.perf_counter()
    results = launch(hello, world_size, device="cpu").results
    assert [float(result[0]) for result in results] == list(range(world_size))
    return time.perf_counter() - began


def launch_speed() -> tuple[float, str]:
    by_launch(4)  # the first one also starts the forkserver
    slow, fast = [], []
    for _ in range(3):
        slow.append(by_spawn(4))
        fast += [by_launch(4) for _ in range(5)]
    return median(slow) / median(fast), f"{median(fast):.2f} s against {median(slow):.1f} s"


def sum_and_memory() -> tuple[float, float]:
    """The sum over ranks of 1, and this rank's private memory in MB."""
    ones = torch.ones(1)
    dist.all_reduce(ones)
    fields = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()]
    return float(ones), sum(int(field[1]) for field in fields if field[0].startswith("Private_")) * 1024 / 1e6


def many_ranks() -> tuple[float, str]:
    began = time.perf_counter()
    sums = [total for total, _ in launch(sum_and_memory, 64, device="cpu").results]
    return sums.count(64.0), f"{time.perf_counter() - began:.1f} s"


def idle_memory() -> tuple[float, str]:
    sizes = [size for _, size in launch(sum_and_memory, 4, device="cpu").results]
    return max(sizes), "the largest of 4, after an all-reduce of one element"


# --- moving data


def plain_ring() -> Callable[[torch.Tensor], None]:
    """A learner-style ring, for when the lab's own is not there."""

    def ring_all_reduce(tensor: torch.Tensor) -> None:
        rank, n = dist.get_rank(), dist.get_world_size()
        chunks = tensor.view(-1).tensor_split(n)
        buffer = torch.empty_like(chunks[0])
        for step in range(2 * (n - 1)):
            outgoing, mine = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
            incoming = buffer[: mine.numel()] if step < n - 1 else mine
            receiving = dist.irecv(incoming, (rank - 1) % n)
            sending = dist.isend(outgoing, (rank + 1) % n)
            receiving.wait()
            if step < n - 1:
                mine += incoming
            sending.wait()

    return ring_all_reduce


def learners_ring() -> Callable[[torch.Tensor], None]:
    """The ring of lab 04's solution."""
    from shardlab import reuse

    try:
        return reuse("04_ring_all_reduce").ring_all_reduce
    except UsageError as error:
        print(f"(lab 04 is not here, so a plain ring is measured: {error})")
        return plain_ring()


def timed(ways: list[Callable[[torch.Tensor], None]], rounds: int) -> list[list[float]]:
    """Seconds of each way in each round, in turns, each between two barriers."""
    tensor = torch.empty(ELEMENTS)
    times: list[list[float]] = [[] for _ in ways]
    for turn in range(rounds + 2):  # two to warm up
        order = range(len(ways)) if turn % 2 else reversed(range(len(ways)))
        for way in order:
            tensor.fill_(1)
            dist.barrier()
            began = time.perf_counter()
            ways[way](tensor)
            dist.barrier()
            times[way].append(time.perf_counter() - began)
            assert tensor[0] == tensor[-1] == dist.get_world_size()
    return [each[2:] for each in times]


def side_by_side(first: list[float], second: list[float]) -> tuple[float, str]:
    ratio = median(first) / median(second)
    return ratio, f"{1e3 * median(first):.1f} ms against {1e3 * median(second):.1f} ms"


def ring_against_library(world_size: int) -> tuple[float, str]:
    ways = [learners_ring(), dist.all_reduce]
    ring, library = launch(timed, world_size, args=(ways, 80), device="cpu", meter=False).results[0]
    return side_by_side(ring, library)


def with_and_without_meter(ring: Callable[[torch.Tensor], None], rounds: int) -> list[list[float]]:
    """The ring with the meter on, and as launch(meter=False) would run it, in turns on the same ranks."""
    from torch.utils._python_dispatch import _disable_current_modes

    from shardlab.meters.instruments import _current

    tap = _current[0].tap

    def off(tensor: torch.Tensor) -> None:
        before, tap.before_call, tap.keep = tap.before_call, None, False
        with _disable_current_modes():
            ring(tensor)
        tap.before_call, tap.keep = before, True

    return timed([ring, off], rounds)


def with_and_without_tap(ring: Callable[[torch.Tensor], None], rounds: int) -> list[list[float]]:
    """The ring under launch(meter=False), where calls are only watched for deadlocks, and on torch's own methods."""
    from shardlab.meters.instruments import _current

    tap = _current[0].tap

    def untouched(tensor: torch.Tensor) -> None:
        tap.remove()
        ring(tensor)
        tap.install()

    return timed([ring, untouched], rounds)


def meter_on_against_off(world_size: int) -> tuple[float, str]:
    run = launch(with_and_without_meter, world_size, args=(learners_ring(), 60), device="cpu")
    return side_by_side(*run.results[0])


def meter_off_against_nothing(world_size: int) -> tuple[float, str]:
    run = launch(with_and_without_tap, world_size, args=(learners_ring(), 60), device="cpu", meter=False)
    return side_by_side(*run.results[0])


PROMISES = [
    Promise("launch of 4 ranks, against spawn", launch_speed, ">=", 20, "times faster"),
    Promise("64 ranks start and all-reduce", many_ranks, ">=", 64, "ranks"),
    Promise("private memory of an idle rank", idle_memory, "<", 15, "MB"),
    *[
        Promise(f"{name}, N = {n}", partial(measure, n), sign, bound)
        for name, measure, sign, bound in [
            ("ring of 16 MB, against gloo's all_reduce", ring_against_library, "<=", 1.1),
            ("ring of 16 MB, meter on against off", meter_on_against_off, "<", 1.1),
            ("ring of 16 MB, meter off against nothing", meter_off_against_nothing, "<", 1.1),
            ("DDP of lab 05, 10M GPT, against torch's", ddp_against_torchs, "<=", 1.05),
            ("ZeRO-1, 10M GPT, against torch's ZeRO-1", partial(step_against_torchs, "Zero1"), "<=", 1.0),
            ("ZeRO-2, 10M GPT, against torch's ZeRO-1", partial(step_against_torchs, "Zero2"), "<=", 1.0),
            ("ZeRO-3, 10M GPT, against FSDP2", partial(step_against_torchs, "Zero3"), "<=", 1.0),
            ("bytes of ZeRO-1, against torch's ZeRO-1", partial(held_against_torchs, "Zero1"), "<=", 1.0),
            ("bytes of ZeRO-3, against FSDP2", partial(held_against_torchs, "Zero3"), "<=", 1.0),
        ]
        for n in (2, 4)
    ],
]


def main() -> int:
    wanted = sys.argv[1:]
    missed = 0
    print(f"{'':46} {'measured':>8}  {'bound':>8}")
    for promise in PROMISES:
        if wanted and not any(word in promise.name for word in wanted):
            continue
        figures = []
        for _ in range(TRIES):
            figures.append(promise.measure())
            if promise.kept(figures[-1][0]):
                break
        figure, made_from = (max if promise.sign == ">=" else min)(figures)
        kept = promise.kept(figure)
        missed += not kept
        again = f", measured {len(figures)} times" if len(figures) > 1 else ""
        bound = f"{promise.sign} {promise.bound:g}"
        verdict = "kept  " if kept else "MISSED"
        print(f"{promise.name:46} {figure:8.2f}  {bound:>8}  {verdict} {promise.unit} ({made_from}{again})", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
