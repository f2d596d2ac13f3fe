"""Checks of labs 06 to 08 beside the zoo: what they measure against, and the words for what is no engine at all."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
from torch import nn

from shardlab import theory
from shardlab.checks import check
from shardlab.checks.zero_cases import DECAYING, ZeroCase
from shardlab.checks.zero_lives import single, values
from shardlab.checks.zero_mirror import VARIATIONS, expected, loss_at
from shardlab.checks.zero_models import build
from shardlab.checks.zero_order import Happened, overlapping
from shardlab.checks.zero_partition import PartitionCase, partition_cases
from shardlab.checks.zero_stage import ZERO1, ZERO2, ZERO3, Stage
from shardlab.errors import CheckFailed


@pytest.mark.parametrize("stage", [ZERO1, ZERO2, ZERO3], ids=lambda stage: stage.strategy)
def test_what_a_stage_may_hold_is_the_papers_formula(stage: Stage) -> None:
    for n in (1, 2, 3, 5, 64):
        assert stage.held(1000, n) == pytest.approx(theory.model_state_bytes(stage.strategy, 1000, n))


def test_the_mirror_plays_adamw_on_the_mean_gradient() -> None:
    case = ZeroCase("", options=DECAYING)
    model = build("layers", torch.float32, 0)
    options = {name: value for name, value in DECAYING.items() if name != "scale"}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for number, step in enumerate(case.steps):
        optimizer.zero_grad()
        for rank in range(3):
            (loss_at(model, case, rank, number, 0, step.micros[0]) / 3).backward()
        optimizer.step()
        for weight, right in zip(model.parameters(), expected(case, 3)[number].weights, strict=True):
            torch.testing.assert_close(weight.detach().double(), right, atol=1e-5, rtol=1e-5)


def test_every_known_mistake_shows_in_some_case() -> None:
    cases = [*values(ZERO1), *single()]
    for how in VARIATIONS:
        assert any(_differs(case, how) for case in cases if how not in case.accepts), how


def _differs(case: ZeroCase, how: str) -> bool:
    right, other = (expected(case, 3, each, rank=1)[-1].weights for each in ("", how))
    return any(not torch.allclose(a, b, atol=1e-3, rtol=0) for a, b in zip(right, other, strict=True))


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (None, "returned None"),
        ([[(0, 0, 7)]], "1 lists"),
        ([[(0, 0, 4)], [(0, 3, 7)]], "element 3 of parameter 0 belongs to rank 0 and to rank 1"),
        ([[(0, 0, 3)], [(0, 3, 6)]], "element 6 of parameter 0 .* belongs to nobody"),
        ([[(0, 0, 2)], [(0, 2, 7)]], "rank 1 has 5 elements"),
        ([[(0, 0, 4)], [(0, 4, 7), (0, 7, 7)]], r"the piece \(0, 7, 7\)"),
        ([[(0, 0, 4)], [(1, 0, 3)]], r"the piece \(1, 0, 3\)"),
        ([[(0, 0, 3.5)], [(0, 4, 7)]], r"the piece \(0, 0, 3.5\)"),
        ([[(0, 0, 4)], [(0, 4, 8)]], "has 7 elements"),
    ],
)
def test_a_wrong_partition_in_words(returned: object, says: str) -> None:
    finding = PartitionCase((7,), 2).finding(returned)
    assert finding is not None
    assert re.search(says, finding.seen), finding


def test_pieces_in_any_order_are_right() -> None:
    assert PartitionCase((4, 4), 2).finding([[(1, 2, 4), (0, 0, 2)], ((0, 2, 4), [1, 0, 2])]) is None
    assert len({case.name for case in partition_cases()}) == len(partition_cases())


def test_a_reduction_overlaps_when_another_layer_comes_before_its_wait() -> None:
    ready = Happened("ready", 0)
    issued, gather = (Happened("issued", number, op, 8) for number, op in ((1, "reduce_scatter"), (2, "all_gather")))
    waits = Happened("waits", 1)
    assert overlapping([ready, issued, ready, waits]) == 1
    assert overlapping([ready, issued, waits, ready]) == 0
    assert overlapping([ready, gather, ready, waits]) == 0


def test_an_object_instead_of_a_class() -> None:
    with pytest.raises(CheckFailed, match=r"(?s)signature.*object of type Parameter.*the class itself"):
        check("06.Zero1", nn.Linear(1, 1).weight)  # type: ignore[arg-type]


class Replicated(nn.Module):
    """DDP and AdamW, dressed up as an engine."""

    def __init__(self, model, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, groups=None, max_norm=None,
                 bucket_bytes=0, scale=1.0, growth_interval=2000, communicator=None):  # fmt: skip
        super().__init__()
        self.module, self.scale = model, scale
        self.ddp = nn.parallel.DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(
            groups or model.parameters(), lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, foreach=False
        )
        self.param_groups = self.optimizer.param_groups
        self.masters = [p.detach().float().clone() for p in model.parameters()]

    def forward(self, *inputs):
        return self.ddp(*inputs)

    def backward(self, loss):
        loss.backward()

    def step(self):
        self.optimizer.step()
        return True

    def zero_grad(self):
        self.optimizer.zero_grad()

    @contextlib.contextmanager
    def gathered(self):
        yield


@pytest.mark.parametrize("exercise", ["06.Zero1", "07.Zero2", "08.Zero3"])
def test_replicas_dressed_up_as_an_engine(exercise: str) -> None:
    with pytest.raises(CheckFailed, match=r"rank \d holds .* psi bytes") as failed:
        check(exercise, Replicated)
    assert failed.value.reason == "memory"
