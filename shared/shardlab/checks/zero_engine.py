"""Labs 06 to 08: the check of an engine of any stage: launches its trials and judges them, the cheap ones first."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import CheckFailed
from .haste import ended_well
from .observe import Trial, check_signature, observe
from .overlap_calls import apart
from .zero_cases import DEFAULTS, ZeroCase
from .zero_haste import hasty
from .zero_held import HeldJudge
from .zero_judge import Judge
from .zero_lives import CHAIN, ORDER, first, many, paired, single, values
from .zero_models import Sizes
from .zero_play import Played, Player
from .zero_sent import SentJudge
from .zero_stage import Stage

ALIKE = (
    "the same calls on every rank, in one order: a bucket without gradients sends zeros, then the one number of the"
    " norm; did one rank skip the step while others made it?"
)
FREED = (  # what torch says of memory that is not there
    "is out of bounds for storage of size 0",
    "storage of size 0",
    "vec (0)",
)
OPTIONS = [*DEFAULTS, "groups", "bucket_bytes", "communicator"]


def judge_engine(stage: Stage, solution: Any) -> str:
    """Raises CheckFailed at the first fault, and returns the lines of the verdict otherwise."""
    _check_class(stage, solution)
    trials = [_trial(stage, solution, first(stage), 3, late=False)]
    # Messages that complete late make rings wait at every step, for seconds: those are lab 04's affair.
    late = not _by_messages(trials[0])
    trials.append(_trial(stage, solution, values(stage), 3, late))
    trials.append(_trial(stage, solution, paired(stage), 2, late=True))
    trials.append(_trial(stage, solution, many(stage), 5, late=False))
    trials.append(_trial(stage, solution, single(), 1, late=False))
    index = next(place for place, case in enumerate(trials[0].cases) if case.name == CHAIN)
    case = trials[0].cases[index]
    assert isinstance(case, ZeroCase)
    played = _played(trials[0], index)
    sizes, n = Sizes.of(case), trials[0].world_size
    rest = max(held.live for one in played for held in one.held if held.moment in ("backward", "step", "rest"))
    peak = max(held.peak for one in played for held in one.held if held.moment != "rest")
    passes = SentJudge(trials[0], index, stage, case, played).passes()
    price = ""
    if passes > stage.passes * 1.2:
        price = f": {stage.passes} would do, with reduce_scatter instead of all_reduce"
    count = sum(len(trial.cases) for trial in trials)
    world_sizes = ", ".join(sorted({str(trial.world_size) for trial in trials}))
    return lines(
        trials,
        [
            f"weights: as AdamW in one process, in {count} cases, N = {world_sizes}",
            f"memory at N = {n}: {rest / sizes.psi:.2f} psi bytes at rest ({stage.formula} ="
            f" {stage.held(sizes.psi, n) / sizes.psi:.2f} psi), at most {peak / sizes.psi:.2f} psi at any time",
            f"sent per rank and step: {passes:.2f} (N-1)/N psi elements{price}",
        ],
    )


def _check_class(stage: Stage, solution: Any) -> None:
    expected = f"the class itself, made with (model, {', '.join(OPTIONS)})"
    if not callable(solution):
        said = f"an object of type {type(solution).__name__}"
        raise CheckFailed(stage.exercise, "signature", said, expected, "without ()")
    check_signature(stage.exercise, solution, ["model"])
    try:
        signature = inspect.signature(solution)
        signature.bind(None, **dict.fromkeys(OPTIONS))
    except ValueError:
        return  # it has none to be looked at; using it will show
    except TypeError as error:
        name = getattr(solution, "__name__", "it")
        raise CheckFailed(stage.exercise, "signature", f"{name}{signature}: {error}", expected) from None


def _trial(stage: Stage, solution: Callable, cases: Sequence[ZeroCase], n: int, late: bool) -> Trial:
    """Runs the cases of one launch and raises CheckFailed at the first fault."""
    trial = observe(
        stage.exercise,
        Player(solution),
        cases,
        n,
        slow=range(n) if late else (),
        meter=any(case.measured or case.watched for case in cases),
    )
    for index, case in enumerate(cases):
        played = _played(trial, index)
        if not played:
            break
        try:
            Judge(trial, index, case, played).all()
        except CheckFailed as failed:
            raise hasty(trial, index, Player(solution), failed, late) or failed from None
        if case.measured:
            HeldJudge(trial, index, stage, case, played).all()
            SentJudge(trial, index, stage, case, played).all()
        if case.name == ORDER:
            SentJudge(trial, index, stage, case, played).order()
    unlike = apart(trial, ALIKE)
    if unlike is not None:
        raise unlike
    try:
        ended_well(trial)
    except CheckFailed as failed:
        broken = next((index for index in range(len(cases)) if not _played(trial, index)), 0)
        raise hasty(trial, broken, Player(solution), failed, late) or _freed(failed) or failed from None
    return trial


def _freed(failed: CheckFailed) -> CheckFailed | None:
    """Other words for a crash over weights that had been let go."""
    if failed.reason != "crash" or not any(words in failed.seen for words in FREED):
        return None
    goal = "weights are whole while their layer runs, forward and backward: gathered before, let go after"
    look = "forward or backward read freed weights: gather again before a layer's backward; is each user counted?"
    return CheckFailed(failed.exercise, "crash", failed.seen, goal, f"{look} {failed.look}".strip())


def _by_messages(trial: Trial) -> bool:
    """Whether data travels by send and recv."""
    observed = trial.observations(0) or []
    return any(call.point_to_point for one in observed for call in one.calls)


def _played(trial: Trial, index: int) -> list[Played]:
    return [one.judged for one in trial.observations(index) or [] if isinstance(one.judged, Played)]


def lines(trials: list[Trial], lines: list[str]) -> str:
    printed = sum(trial.lines_printed for trial in trials)
    if printed:
        lines.append(f"your code printed {printed:,} line{'s' * (printed > 1)}; they are not shown here")
    return "\n".join(f"  {line}" for line in lines)
