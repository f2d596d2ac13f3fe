"""What the engines of labs 06 to 08 hold and send, to the byte, against the formulas.

psi' is psi with every bucket padded to a multiple of N. Which parameters share a bucket is worked out here once more:
lab 05's plan over the reversed parameters of a group; in ZeRO-3 a bucket for each group of a unit.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Iterator

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardlab import reuse
from shardlab.meters import memory_so_far, on_call
from shardlab.model import GPT
from shardlab.records import Call
from shardlab.runtime import launch
from shardlab.theory import chunk_sizes, collective_cost, ring_volume
from zero_play import COMMUNICATORS, STAGES, Case, start, step_of

cloudpickle.register_pickle_by_value(sys.modules[__name__])

plan_buckets = reuse("05_ddp_overlap").plan_buckets
PATIENCE = 2.0  # seconds
FROZEN = ("norm", "blocks.0.mlp")  # backward goes through all of them
CASES = [
    (Case("float32", groups=True, max_norm=0.3), "library"),
    (Case("float16", groups=True, dtype=torch.float16), "rings"),
    (Case("tied", tied=True), "rings"),
    (Case("frozen float16", frozen=FROZEN, dtype=torch.float16), "library"),
]


# --- the formulas


def padded(parameters: list[nn.Parameter], world_size: int) -> int:
    elements = sum(parameter.numel() for parameter in parameters)
    return -(-elements // world_size) * world_size


def units(model: GPT) -> list[list[nn.Parameter]]:
    """Children, those of lists one by one; then what is the model's own or shared by several of them."""
    children = [model.embedding, *model.blocks, model.norm, model.head]
    shared = [model.positions] + ([model.head.weight] if model.size.tied else [])
    apart = {id(parameter) for parameter in shared}
    return [[each for each in child.parameters() if id(each) not in apart] for child in children] + [shared]


def of_groups(parameters: list[nn.Parameter], case: Case, model: nn.Module) -> Iterator[list[nn.Parameter]]:
    for group in case.groups_of(model):
        members = {id(each) for each in group["params"]}
        yield [each for each in parameters if id(each) in members]


def sizes(stage: str, case: Case, world_size: int) -> tuple[int, int]:
    """psi' of the trained parameters, and the elements of the frozen ones (padded where they are sharded)."""
    model = case.model()
    backwards = list(reversed(list(model.parameters())))
    if stage == "Zero3":
        buckets = [bucket for unit in units(model) for bucket in of_groups(unit, case, model)]
        still = [[each for each in unit if not each.requires_grad] for unit in units(model)]
        return sum(padded(each, world_size) for each in buckets), sum(padded(each, world_size) for each in still)
    shares = 2 + len(case.groups_of(model))  # ZeRO-2: one of each group fills, one travels, one is autograd's
    budget = case.bucket_bytes // (shares if stage == "Zero2" else 1)
    planned = [
        [group[index] for index in indices]
        for group in of_groups(backwards, case, model)
        for indices in plan_buckets(group, budget)
    ]
    frozen = sum(each.numel() for each in backwards if not each.requires_grad)
    return sum(padded(each, world_size) for each in planned), frozen


def held_by_formula(stage: str, case: Case, n: int) -> dict[str, float]:
    """Bytes of a rank between steps. In float32 the weights are their own master."""
    psi, frozen = sizes(stage, case, n)
    width = case.dtype.itemsize
    held = {
        "parameters": width * (psi + frozen) / (n if stage == "Zero3" else 1),
        "gradients": width * psi / (1 if stage == "Zero1" else n),
        "optimizer": (12 if width == 2 else 8) * psi / n,
    }
    return {**held, "live": sum(held.values())}


def sent_by_formula(stage: str, case: Case, communicator: str, n: int, rank: int) -> float:
    """Bytes that a rank sends in a step: whole buckets, and one float64 for the norm and the overflow."""
    psi, frozen = sizes(stage, case, n)
    elements = 3 * psi + 2 * frozen if stage == "Zero3" else 2 * psi
    if communicator == "rings":
        norm = 8 * ring_volume("all_reduce", chunk_sizes(1, n, "balanced"), rank).sent
    else:
        norm = collective_cost("all_reduce", 8, n).sent
    return case.dtype.itemsize * elements * (n - 1) / n + norm


# --- between steps, and on the way


def live() -> dict[str, int]:
    gc.collect()
    now = memory_so_far().at_end
    return {kind: getattr(now, kind) for kind in ("parameters", "gradients", "optimizer", "live")}


def more_than(before: dict[str, int], expected: dict[str, float]) -> dict[str, int]:
    """What is held now and was not before. Gloo's thread lets go of a tensor some time after wait() has returned."""
    deadline = time.monotonic() + PATIENCE
    while True:
        more = {kind: size - before[kind] for kind, size in live().items()}
        if more == expected or time.monotonic() > deadline:
            return more
        time.sleep(0.01)


def weigh(case: Case, stage: str, communicator: str) -> tuple[dict[str, int], dict[str, int], float]:
    """Bytes held when the engine is made, and after two steps; bytes sent in the second."""
    list(case.batches(0, 0, 1))  # the text is read
    before, expected = live(), held_by_formula(stage, case, dist.get_world_size())
    trained = start(case, stage, communicator)
    made = more_than(before, expected)
    step_of(trained, case, 0)
    calls: list[Call] = []
    with on_call(lambda call, _: calls.append(call)):
        step_of(trained, case, 1)
    return made, more_than(before, expected), sum(call.sent for call in calls)


def weigh_all() -> dict[tuple[str, str], tuple]:
    return {(case.name, stage): weigh(case, stage, comm) for case, comm in CASES for stage in STAGES}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
def test_bytes_held_and_sent_are_the_formulas(world_size: int) -> None:
    for rank, found in enumerate(launch(weigh_all, world_size, device="cpu").results):
        for case, communicator in CASES:
            for stage in STAGES:
                made, later, sent = found[case.name, stage]
                what = (case.name, stage, rank)
                held = held_by_formula(stage, case, world_size)
                assert (made, later) == (held, held), what
                expected = sent_by_formula(stage, case, communicator, world_size, rank)
                assert sent == pytest.approx(expected, rel=1e-12), what


def test_the_formulas_are_the_papers() -> None:
    """Where N divides everything: 4 psi + 12 psi/N, 2 psi + 14 psi/N, 16 psi/N (ZeRO, sections 5.1 to 5.3)."""
    case = Case("float16", dtype=torch.float16)
    psi = case.model().parameter_count
    totals = [held_by_formula(stage, case, 2)["live"] for stage in STAGES]
    assert totals == [4 * psi + 12 * psi / 2, 2 * psi + 14 * psi / 2, 16 * psi / 2]


# --- during a step

WIDTH = 128
LAYER = 4 * WIDTH * WIDTH  # bytes of each weight; activations of one row are 1/128 of it
SLACK = LAYER // 4  # activations and small change


class Stack(nn.Module):
    """Six layers of one matrix each, and a matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(WIDTH, WIDTH) / 16)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.own
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def most(stage: str, bucket_bytes: int, communicator: str) -> dict[str, int]:
    """The most that a rank held above what it holds between steps: in forward, without gradients too, in backward.

    Of several steps the least: a library's thread that lets go late only ever adds.
    """
    trained = STAGES[stage](Stack(), bucket_bytes=bucket_bytes, communicator=COMMUNICATORS[communicator]())
    x = torch.ones(1, WIDTH)
    found: dict[str, int] = {}
    for step in range(4):
        trained.zero_grad()
        gc.collect()
        rest = memory_so_far().at_end
        with torch.no_grad():
            trained(x)
        evaluated = memory_so_far().at_end
        loss = trained(x).sum()
        forwarded = memory_so_far().at_end
        trained.backward(loss)
        del loss
        backwarded = memory_so_far().at_end
        trained.step()
        times = [rest.time, evaluated.time, forwarded.time, backwarded.time]
        samples = memory_so_far().samples
        for name, began, ended in zip(("no_grad", "forward", "backward"), times, times[1:], strict=False):
            within = [sample.live - rest.live for sample in samples if began < sample.time <= ended]
            if step > 0:  # the first does not know the order of the layers
                found[name] = min(found.get(name, max(within)), max(within))
    return found


BUDGETS = [3 * LAYER, 6 * LAYER, 1000]


def most_of_all(communicator: str) -> list[tuple[str, int, dict[str, int]]]:
    return [(stage, budget, most(stage, budget, communicator)) for stage in ("Zero2", "Zero3") for budget in BUDGETS]


@pytest.mark.parametrize(("communicator", "world_size"), [("library", 2), ("rings", 3)])
def test_bytes_in_the_middle_of_a_step(communicator: str, world_size: int) -> None:
    """ZeRO-2 may hold `bucket_bytes` of gradients beside its shard: a third fills, a third travels, a third is what
    autograd has just made; a parameter that is larger than a third takes its place. ZeRO-3 may hold two units and the
    model's own, and a unit of gradients more, for the model's own. Rings receive into a buffer of one chunk; gloo's
    thread may let go of a bucket some time after wait() has returned.
    """
    results = launch(most_of_all, world_size, args=(communicator,), device="cpu").results
    for rank, found in enumerate(results):
        for stage, budget, seen in found:
            part = max(budget // 3, LAYER) if stage == "Zero2" else LAYER
            gradients = (3 if stage == "Zero2" else 4) * part
            buffer = math.ceil(part / world_size) if communicator == "rings" else part
            weights = 0 if stage == "Zero2" else 3 * LAYER
            what = (stage, budget, rank, {name: round(size / LAYER, 2) for name, size in seen.items()})
            assert seen["no_grad"] <= weights + SLACK, what
            assert seen["forward"] <= weights + SLACK, what
            assert seen["backward"] <= weights + gradients + buffer + SLACK, what
            assert seen["backward"] >= LAYER, what  # so something was seen
