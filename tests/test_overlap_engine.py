"""The DistributedDataParallel of lab 05's solution: what no check of a learner's demands, and beside torch's own."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
import torch.distributed as dist

from shardlab import reuse
from shardlab.checks import observe as observing
from shardlab.checks.overlap import ENGINE
from shardlab.checks.overlap_cases import ORDER, PLAIN, cases_at
from shardlab.checks.overlap_judge import overlapping_reductions
from shardlab.checks.overlap_models import build, inputs, loss_of
from shardlab.checks.overlap_play import Player
from shardlab.meters import memory_so_far
from shardlab.model import GPT, loss_function
from shardlab.runtime import launch
from shardlab.text import batch
from zoo.overlap_base import Engine
from zoo.overlap_wrong import ForgetsTheFirst, NeverWaits, WaitsForTheLastOnly

LAB = reuse("05_ddp_overlap")
DDP = LAB.DistributedDataParallel
TIMES = 20


def run(fn, world_size=2, *args, **options):
    return launch(fn, world_size, args=args, device="cpu", timeout=30, **options)


@pytest.mark.parametrize("engine", [DDP, Engine, NeverWaits, WaitsForTheLastOnly, ForgetsTheFirst])
def test_a_missing_wait_shows_every_time(engine) -> None:
    plain = next(case for case in cases_at(2) if case.name == PLAIN)
    trial = observing.observe(ENGINE, Player(engine), [plain] * TIMES, 2, slow=range(2))
    assert trial.error is None
    found = [any(one.judged.finding for one in trial.observations(index) or []) for index in range(TIMES)]
    assert found == [engine not in (DDP, Engine)] * TIMES


def test_most_reductions_overlap_with_backward() -> None:
    case = next(case for case in cases_at(2) if case.name == ORDER)
    trial = observing.observe(ENGINE, Player(DDP), [case], 2, slow=range(2))
    for one in trial.observations(0) or []:
        assert overlapping_reductions(one.judged.happened) >= 3


def fifty_steps():
    model = build("re-entrant", dist.get_rank())
    ddp = DDP(model, bucket_bytes=200)
    live = []
    for step in range(50):
        for parameter in model.parameters():
            parameter.grad = None
        with ddp.no_sync():
            ddp.backward(loss_of(ddp(inputs(dist.get_rank(), step, 0))))
        ddp.backward(loss_of(ddp(inputs(dist.get_rank(), step, 1))))
        gc.collect()
        live.append(memory_so_far().at_end.live)
    return live[4], live[-1]


def test_fifty_steps_without_growth() -> None:
    for early, late in run(fifty_steps).results:
        assert late <= early


class Fragile(torch.nn.Module):
    """A layer whose backward raises when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(4))

    def forward(self, x, fails=False):
        for place, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if fails and place == 1:
                x.register_hook(self.fail)
        return x

    def fail(self, gradient):
        raise ArithmeticError("in the middle of backward")


def backward_after_an_exception(who_fails):
    torch.manual_seed(0)
    model = Fragile()
    ddp = DDP(model, bucket_bytes=100)
    for attempt, fails in enumerate([True, False]):
        for parameter in model.parameters():
            parameter.grad = None
        with contextlib.suppress(ArithmeticError):
            x = inputs(dist.get_rank(), attempt, 0)
            ddp.backward(loss_of(ddp(x, fails and dist.get_rank() in who_fails)))
    got = [parameter.grad.clone() for parameter in model.parameters()]
    means = [torch.zeros_like(gradient) for gradient in got]
    for rank in range(dist.get_world_size()):
        gradients = torch.autograd.grad(loss_of(model(inputs(rank, 1, 0))), list(model.parameters()))
        means = [mean + gradient / dist.get_world_size() for mean, gradient in zip(means, gradients, strict=True)]
    return max((a - b).abs().max().item() for a, b in zip(got, means, strict=True))


@pytest.mark.parametrize("who_fails", [(0, 1, 2), (1,)])
def test_an_exception_in_the_middle_of_backward_leaves_ranks_in_step(who_fails) -> None:
    """On every rank, or on one only: the next step is right."""
    results = run(backward_after_an_exception, 3, who_fails, slow_ranks=range(3)).results
    assert max(results) < 1e-5


def gpt_gradients(make, steps=3):
    torch.manual_seed(dist.get_rank() if make is not None else 0)
    model = GPT()
    if make is None:
        dist.broadcast(torch.zeros(1), 0)
        engine = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.05)
    else:
        engine = make(model)
    for step in range(steps):
        engine.zero_grad()
        tokens, targets = batch(step, 4, 32, seed=dist.get_rank())
        loss = loss_function(engine(tokens), targets)
        loss.backward() if make is None else engine.backward(loss)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    return [parameter.detach().clone() for parameter in model.parameters()]


def on_the_library(model):
    return DDP(model, bucket_bytes=50_000)


def on_own_ring(model):
    ring = LAB.InBackground(reuse("04_ring_all_reduce").ring_all_reduce)
    return DDP(model, bucket_bytes=50_000, all_reduce=ring)


@pytest.mark.parametrize("world_size", [2, 3])
def test_as_torchs_own_on_the_library_and_on_the_ring(world_size) -> None:
    theirs, library, ring = (run(gpt_gradients, world_size, make) for make in (None, on_the_library, on_own_ring))
    for mine in (library, ring):
        for a, b in zip(mine.results[0], theirs.results[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        for rank in range(1, world_size):
            assert all(torch.equal(a, b) for a, b in zip(mine.results[0], mine.results[rank], strict=True))
    assert "all_reduce" not in ring.traffic[0].by_operation
    sent = sum(rank.by_operation["send"].sent for rank in ring.traffic)
    assert sent == pytest.approx(sum(rank.by_operation["all_reduce"].sent for rank in library.traffic), rel=1e-3)


def unused_everywhere():
    model = build("branches", dist.get_rank())
    ddp = DDP(model, bucket_bytes=100)
    ddp.backward(loss_of(ddp(inputs(dist.get_rank(), 0, 0), "left")))
    return model.right.weight.grad is None, model.left.weight.grad is None


def test_what_nobody_used_stays_without_a_gradient() -> None:
    """Zeros would be moved by weight decay."""
    assert run(unused_everywhere).results == [(True, False)] * 2


def outside_of_its_backward():
    model = build("layers", 0)
    DDP(model, bucket_bytes=100)
    loss_of(model(inputs(dist.get_rank(), 0, 0))).backward()
    return 0


def test_hooks_do_nothing_outside_of_the_engines_backward() -> None:
    """Also those of an engine that is no longer used."""
    record = run(outside_of_its_backward)
    assert "all_reduce" not in record.traffic[0].by_operation
