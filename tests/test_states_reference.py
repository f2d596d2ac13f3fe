"""The engine that checks of lab 01 compare with: it is AdamW, and each known mistake gives other numbers somewhere."""

from __future__ import annotations

import pytest
import torch

from shardlab.checks.states_cases import DECAYING, EXACT, PLACES, basics, life, together
from shardlab.checks.states_close import excess
from shardlab.checks.states_reference import VARIATIONS, expected, scales
from shardlab.checks.states_script import GOOD, Script, Step


def test_it_is_torchs_adamw() -> None:
    script = Script((GOOD, Step(none=(1,)), GOOD), options=DECAYING)
    parameters = [torch.nn.Parameter(weight) for weight in script.weights(0)]
    options = {name: DECAYING[name] for name in ("lr", "betas", "eps", "weight_decay")}
    optimizer = torch.optim.AdamW(parameters, **options)
    for number, right in enumerate(expected(script, 0, 1)):
        for parameter, gradient in zip(parameters, script.gradients(number, 0), strict=True):
            parameter.grad = gradient
        optimizer.step()
        for parameter, weight in zip(parameters, right.weights, strict=True):
            torch.testing.assert_close(parameter.detach(), weight)


def test_a_skip_leaves_everything() -> None:
    with_skip = expected(Script((GOOD, PLACES[0], Step(data=1)), options=EXACT), 0, 1)
    without = expected(Script((GOOD, GOOD), options=EXACT), 0, 1)
    assert [one.overflow for one in with_skip] == [False, True, False]
    for first, second in zip(with_skip[-1].weights, without[-1].weights, strict=True):
        assert torch.equal(first, second)


def test_scales_by_hand() -> None:
    script = Script((GOOD, GOOD, PLACES[0], GOOD, GOOD, PLACES[0]), options={"scale": 1.5, "growth_interval": 2})
    assert scales(script, 1) == [
        (1.5, False, 1.5),
        (1.5, False, 3.0),
        (3.0, True, 1.5),
        (1.5, False, 1.5),
        (1.5, False, 3.0),
        (3.0, True, 1.5),
    ]


def test_one_ranks_overflow_is_everybodys() -> None:
    (case,) = [case for case in together(3) if case.name == "overflow on some ranks only"]
    for rank in range(3):
        found = expected(case.scripts[0], rank, 3)
        assert [one.overflow for one in found][:5] == [False, True, True, True, False]


@pytest.mark.parametrize("how", VARIATIONS)
def test_each_mistake_shows_in_some_case(how: str) -> None:
    """Beyond the tolerance, in a case where it is not one of two right ways."""
    for case in [*basics(), *life()]:
        for script in case.scripts:
            if how in script.accepts:
                return  # two right ways: the script is there to allow both
            pairs = zip(expected(script, 0, 1)[-1].weights, expected(script, 0, 1, how)[-1].weights, strict=True)
            for place, (right, wrong) in enumerate(pairs):
                if not wrong.isfinite().all() or excess(wrong.to(script.dtype(place)), right) > 0:
                    return
    raise AssertionError(f"no case tells {how!r} from the right way")
