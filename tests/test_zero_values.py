"""The engines of labs 06 to 08 give the weights of one process, of torch's own, and on all ranks the same bits.

How far apart may two right ways be? Both add the same products in another order, so a gradient differs by some 2**-24
of itself in float32, and by some 2**-11 in float16, where the ranks' gradients are rounded before they are added. eps
is about as large as the gradients here, so the optimizer passes such a difference on and does not enlarge it. Measured,
as a part of how far the weights moved: 2.5e-7 in float32, 5e-4 in float16. Ten times that is allowed. A gradient that
is twice too large moves them tens of percent further.
"""

from __future__ import annotations

import math
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from shardlab.model import loss_function
from shardlab.runtime import launch
from zero_play import CASES, STAGES, Case, flat_weights, in_one_process, on_engine, on_torchs, seeded, start, step_of

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # or every rank would run the labs' cells again

APART = {torch.float32: 2.5e-6, torch.float16: 5e-3}
EVERYTHING, HALF = CASES[1], CASES[-1]


def play(cases: list[Case], communicator: str, torchs: tuple[str, ...]) -> dict[tuple[str, str], torch.Tensor]:
    """The weights that each case ends with, by its name and the way."""
    found = {}
    for case in cases:
        for stage in STAGES:
            found[case.name, stage] = on_engine(case, stage, communicator)
            if case.name == EVERYTHING.name:  # another engine in the same process is the first again
                assert torch.equal(on_engine(case, stage, communicator), found[case.name, stage])
        for way in torchs if case.dtype == torch.float32 else ():  # torch's have no master weights
            found[case.name, way] = on_torchs(case, way)
    return found


def apart(mine: torch.Tensor, other: torch.Tensor, at_first: torch.Tensor) -> float:
    """The distance between two results, as a part of how far the weights moved."""
    return ((mine - other).norm() / (other - at_first).norm()).item()


@pytest.mark.parametrize(
    ("world_size", "communicator", "cases", "torchs"),
    [
        (2, "library", CASES, ("ddp", "fsdp2")),
        (3, "rings", CASES[2:], ("ddp",)),
        (5, "rings", [EVERYTHING, HALF], ()),
    ],
)
def test_as_one_process_and_as_torchs(world_size, communicator, cases, torchs) -> None:
    results = launch(play, world_size, args=(cases, communicator, torchs), device="cpu", meter=False).results
    for case in cases:
        whole, at_first = in_one_process(case), flat_weights(seeded(case, 0))
        for stage in STAGES:
            mine = results[0][case.name, stage]
            assert apart(mine, whole, at_first) < APART[case.dtype], (case.name, stage)
            for way in torchs if case.dtype == torch.float32 else ():
                if way == "ddp" or stage == "Zero3":
                    assert apart(mine, results[0][case.name, way], at_first) < APART[case.dtype], (
                        case.name,
                        stage,
                        way,
                    )
            for rank, others in enumerate(results):
                assert torch.equal(others[case.name, stage], mine), (case.name, stage, rank)


def overflows(case: Case, who: int) -> list[tuple[str, bool, float, bool, bool]]:
    """By stage, after a good step and one where rank `who` alone overflows: (stage, whether it was skipped, the scale
    divided by that before, whether weights are the same bits, whether the next step is a good one)."""
    found = []
    for stage in STAGES:
        trained = start(case, stage, "library")
        step_of(trained, case, 0)
        with trained.gathered():
            before, scale = flat_weights(trained.module), trained.scale
        trained.zero_grad()
        for inputs, targets in case.batches(1, dist.get_rank(), dist.get_world_size()):
            factor = math.inf if dist.get_rank() == who else 1.0
            trained.backward(factor * loss_function(trained(inputs), targets))
        done = trained.step()
        with trained.gathered():
            same = torch.equal(before, flat_weights(trained.module))
        found.append((stage, done, trained.scale / scale, same, step_of(trained, case, 2)))
    return found


def test_an_overflow_on_one_rank_is_skipped_by_all() -> None:
    for found in launch(overflows, 2, args=(HALF, 1), device="cpu", meter=False).results:
        assert found == [(stage, False, 0.5, True, True) for stage in STAGES]
