"""Lab 01: checks of the count of model states and of the mixed-precision engine.

The engine is looked at step by step: `.grad` after backward, what step() returned, the scale, every weight against an
AdamW in float64 (see states_reference.py), the calls it makes, and the live bytes that it adds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ..errors import CheckFailed
from ..theory import MIXED_PRECISION_ADAM
from . import exercise
from .breakdown import breakdown
from .observe import Trial, check_signature, observe
from .states_bytes import bytes_cases
from .states_cases import PARAMETERS, ROWS, basics, life, memory, together
from .states_close import definition
from .states_judge import Judge
from .states_play import MemorySeen, Played, Player
from .states_script import DEFAULTS, EngineCase

ENGINE = "01.MixedPrecisionAdam"
BYTES = "01.model_state_bytes"
PER_ELEMENT = MIXED_PRECISION_ADAM.optimizer  # bytes
PER_PARAMETER = 64  # bytes for a step count and the like, which may be tensors
MOST_AT_PEAK = 24  # bytes per element while it steps: twice what the engine holds


@exercise(BYTES, title="Bytes of the model states")
def model_state_bytes(solution: Callable) -> str:
    check_signature(BYTES, solution, ["model", "optimizer"])
    cases = bytes_cases()
    trial = observe(BYTES, solution, cases, 1)
    for index in range(len(cases)):
        for one in trial.observations(index) or []:
            finding = one.judged.finding
            if finding:
                said = f"{cases[index].name}: {finding.seen}"
                raise trial.failed(index, "values", said, finding.expected, finding.look)
    _finish(trial)
    return _lines(
        [trial], [f"right in {len(cases)} cases: fp32, fp16 and bf16, tied weights, shared memory, six optimizers"]
    )


@exercise(ENGINE, title="Mixed-precision Adam")
def mixed_precision_adam(solution: Callable) -> str:
    _check_engine(solution)
    alone = [_trial(solution, cases, 1, meter=False) for cases in (basics(), life())]
    held = _trial(solution, memory(), 1)
    ranks = [_late(solution, 2), _trial(solution, together(3), 3, meter=False)]
    found = _memory(held, 0)
    calls = {len(step.calls) for trial in ranks for played in _played(trial, 0) for step in played.steps[0]}
    cases = [case for trial in alone for case in trial.cases if isinstance(case, EngineCase)]
    steps = sum(len(script.steps) for case in cases for script in case.scripts)
    elements = ROWS * 2 * PARAMETERS
    return _lines(
        [*alone, held, *ranks],
        [
            f"weights: as AdamW in float64, in {steps} steps of {len(cases)} kinds; skips leave every bit alone",
            "ranks: one rank's overflow makes all skip, at N = 2 and 3;"
            f" calls in a step: {' or '.join(map(str, sorted(calls)))}",
            f"memory: {found.at_rest / elements:.4g} bytes per element at rest, and at most"
            f" {found.peak / elements:.3g} more while it steps",
        ],
    )


def _check_engine(solution: Any) -> None:
    expected = f"the class itself, made with (parameters, {', '.join(DEFAULTS)})"
    if not callable(solution):
        raise CheckFailed(ENGINE, "signature", f"an object of type {type(solution).__name__}", expected, "without ()")
    check_signature(ENGINE, solution, ["parameters"])
    try:
        signature = inspect.signature(solution)
        signature.bind([], **DEFAULTS)
    except ValueError:
        return  # it has none to be looked at; using it will show
    except TypeError as error:
        name = getattr(solution, "__name__", "it")
        raise CheckFailed(ENGINE, "signature", f"{name}{signature}: {error}", expected) from None


def _trial(
    solution: Callable, cases: list[EngineCase], world_size: int, slow: tuple[int, ...] = (), meter: bool = True
) -> Trial:
    """Runs the cases and raises CheckFailed at the first fault. slow: ranks whose collectives complete late."""
    trial = observe(ENGINE, Player(solution), cases, world_size, slow, meter=meter)  # type: ignore[arg-type]
    for index, case in enumerate(cases):
        played = _played(trial, index)
        if not played:
            break
        Judge(trial, index, case, played).all()
        if case.memory:
            _judge_memory(trial, index, _memory(trial, index), played)
    _finish(trial)
    return trial


def _late(solution: Callable, world_size: int) -> Trial:
    """The cases for several ranks, of which one's collectives complete as late as they may."""
    cases = together(world_size)
    try:
        return _trial(solution, cases, world_size, slow=(1,), meter=False)
    except CheckFailed as failed:
        if failed.reason != "values":
            raise
        _trial(solution, cases, world_size, meter=False)  # when it is wrong without delay, too, that is its verdict
        raise CheckFailed(
            ENGINE,
            "order",
            f"with a late all-reduce, {failed.seen}; without the delay it is right",
            "the flag is read when its all-reduce is complete: after wait()",
            failed.look,
        ) from None


def _played(trial: Trial, index: int) -> list[Played]:
    """What the ranks showed in this case; empty when some rank did not come to its end."""
    return [one.judged for one in trial.observations(index) or [] if isinstance(one.judged, Played)]


def _memory(trial: Trial, index: int) -> MemorySeen:
    found = _played(trial, index)[0].memory
    assert found is not None
    return found


def _judge_memory(trial: Trial, index: int, seen: MemorySeen, played: list[Played]) -> None:
    elements = ROWS * 2 * PARAMETERS
    where = definition(played[0].steps[0][-1].where)
    extra = seen.at_rest - PER_ELEMENT * elements
    if not 0 <= extra <= PER_PARAMETER * PARAMETERS:
        said = f"{elements:,} float16 elements: the engine holds {seen.at_rest:,} bytes beside weights and gradients"
        said += f" after {len(played[0].steps[0])} steps, {seen.at_rest / elements:.3g} per element"
        wanted = f"{PER_ELEMENT} per element: master weights 4, first moment 4, second moment 4"
        raise trial.failed(index, "memory", said, wanted, _which_state(seen.at_rest / elements))
    if seen.peak > MOST_AT_PEAK * elements:
        said = f"{elements:,} float16 elements: step() needs {seen.peak:,} bytes on top of what is held"
        said += f", {seen.peak / elements:.3g} per element"
        wanted = "a few fp32 temporaries, best of one parameter at a time; no copy of all states"
        raise trial.failed(index, "memory", said, wanted, where)


def _which_state(per_element: float) -> str:
    if per_element < PER_ELEMENT:
        return "are the master weights and both moments float32, and is there one of each per parameter?"
    return "is something kept from step to step that could be made anew, such as fp32 gradients or temporaries?"


def _finish(trial: Trial) -> None:
    if trial.error:
        raise breakdown(trial)


def _lines(trials: list[Trial], lines: list[str]) -> str:
    printed = sum(trial.lines_printed for trial in trials)
    if printed:
        lines.append(f"your code printed {printed:,} line{'s' * (printed > 1)}; they are not shown here")
    return "\n".join(f"  {line}" for line in lines)
