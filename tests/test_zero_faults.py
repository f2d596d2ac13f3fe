"""One rank fails in the middle of a ZeRO step: the launch ends, the report names the cause, no process is left."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn

from launching import line_of, nothing_left
from shardlab import launch
from shardlab.errors import LaunchError
from zero_play import RINGS, STAGES

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Fragile(nn.Module):
    """Four layers; what `strike` does happens between the second and the third, in "forward" or in "backward"."""

    def __init__(self, where: str, strike: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.where, self.strike = where, strike

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if place == 1 and self.where == "forward":
                self.strike()
            if place == 1 and self.where == "backward":
                x.register_hook(lambda _: self.strike())
        return x


def raises() -> None:
    raise ArithmeticError("in the middle")


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(stage: type, where: str, strike: Any) -> None:
    """Two steps; in the second, rank 1 fails."""
    model = Fragile("", strike)
    trained = stage(model, bucket_bytes=100, communicator=RINGS())
    for step in range(2):
        model.where = where if step == 1 and dist.get_rank() == 1 else ""
        trained.zero_grad()
        trained.backward(trained(torch.ones(2, 6)).sum())
        trained.step()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("where", "strike", "kind"),
    [("forward", raises, "raised"), ("backward", raises, "raised"), ("backward", dies, "died")],
)
def test_a_rank_fails_in_the_middle_of_a_step(stage: str, where: str, strike: Any, kind: str) -> None:
    with nothing_left(), pytest.raises(LaunchError) as caught:
        launch(train, 3, (STAGES[stage], where, strike), device="cpu", timeout=20)
    error = caught.value
    assert (error.kind, error.rank) == (kind, 1), error.report
    if strike is raises:
        assert error.report.startswith("Rank 1 raised ArithmeticError: in the middle")
        assert line_of(raises, "ArithmeticError") in error.report
    else:
        assert error.report.startswith("Rank 1 was ended by SIGKILL")
    assert len(error.report.splitlines()) <= 20, error.report
