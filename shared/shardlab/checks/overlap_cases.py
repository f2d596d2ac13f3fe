"""Lab 05: what a DistributedDataParallel is put through, as plain data; `overlap_play.py` does it inside each rank."""

from __future__ import annotations

from dataclasses import dataclass

from .notes import Prepared

DEFAULT = None  # bucket_bytes that are not given
SMALL = 4 * 130  # bytes: a few buckets for the model "layers"


@dataclass(frozen=True)
class Micro:
    """One forward and backward. choices: rank r's is choices[r % len]. sync: False inside no_sync().

    raises: an exception leaves no_sync() after the backward. forwards: so many losses are added up first.
    nested: another no_sync() has begun and ended inside this one, before the forward.
    """

    choices: tuple[str, ...] = ("both",)
    sync: bool = True
    raises: bool = False
    forwards: int = 1
    nested: bool = False

    def choice(self, rank: int) -> str:
        return self.choices[rank % len(self.choices)]


@dataclass(frozen=True)
class Step:
    """Micro-steps, then the optimizer. clear: before it, gradients become "None", "zeros", or are "kept"."""

    micros: tuple[Micro, ...] = (Micro(),)
    clear: str = "None"


@dataclass(frozen=True)
class OverlapCase:
    """kind: of overlap_models.KINDS. plugged: reductions go through an all_reduce of the check's, which sees them.

    twins: two models at once, each with its own engine, by turns. growth: only live bytes are looked at.
    """

    about: str
    kind: str = "layers"
    steps: tuple[Step, ...] = (Step(), Step())
    bucket_bytes: int | None = SMALL
    plugged: bool = False
    twins: bool = False
    growth: bool = False
    watched: bool = False  # whether it is looked for tensors that are used too early, which takes its time

    @property
    def name(self) -> str:
        return self.about

    def prepare(self, rank: int, world_size: int) -> Prepared:
        return Prepared((self, rank, world_size), lambda played: played, lambda: None)


BOTH, LEFT, RIGHT, NEITHER = ("both",), ("left",), ("right",), ("neither",)
LOCAL = Micro(sync=False)
MANY = 20  # steps in which live memory must not grow
ORDER = "6 layers, with an all_reduce of the check's own"  # the case in which the order of events is looked at
PLAIN = "6 layers"  # the case whose bytes are told
STUCK = "a bucket that completes when others behind it are complete already"
INTERRUPTED = "an exception inside no_sync()"
NESTED = "no_sync() inside no_sync()"


def cases_at(n: int) -> list[OverlapCase]:
    """The cases at world size n, the simplest first. What does not depend on the number of ranks is tried at N = 2."""
    branching = _branching(("left", "right"), BOTH, ("right", "left"))
    first = [
        OverlapCase(PLAIN, watched=True),
        OverlapCase("two micro-steps in no_sync(), the third outside", steps=(Step((LOCAL, LOCAL, Micro())), Step())),
        OverlapCase("ranks that take different branches", "branches", branching, bucket_bytes=200),
    ]
    if n > 3:
        return first
    more = [
        OverlapCase(ORDER, plugged=True, watched=True),
        OverlapCase("gradients set to zero instead of None", steps=(Step(), Step(clear="zeros"))),
        OverlapCase("buffers: batch norm, and one that gradients depend on", "buffers", steps=(Step(),) * 3),
    ]
    if n == 3:
        return [*first, *more, *_branches()]
    if n == 1:
        return [*first, *more, OverlapCase("a model that trains nothing", "nothing")]
    return [*first, *more, *_sizes(), *_models(), *_branches(), *_accumulation(), *_lives()]


def _branching(*choices: tuple[str, ...]) -> tuple[Step, ...]:
    return tuple(Step((Micro(choices=each),)) for each in choices)


def _sizes() -> list[OverlapCase]:
    return [
        OverlapCase("bucket_bytes as by default", bucket_bytes=DEFAULT),
        OverlapCase("a bucket of one byte", bucket_bytes=1),
        OverlapCase("a parameter larger than a bucket", "large", bucket_bytes=256),
    ]


def _models() -> list[OverlapCase]:
    return [
        OverlapCase("a tied matrix, and a layer that runs twice", "tied", bucket_bytes=200),
        OverlapCase("frozen parameters", "frozen", bucket_bytes=200),
        OverlapCase("layers that run in the reverse of their order", "backwards"),
        OverlapCase(STUCK, "stuck", bucket_bytes=200, plugged=True),
        OverlapCase("float32, 64, 16 and bfloat16 in one model", "dtypes", bucket_bytes=400),
        OverlapCase("0-d, empty and transposed parameters", "shapes", bucket_bytes=100),
        OverlapCase("checkpoints, not re-entrant", "checkpoint", bucket_bytes=160),
        OverlapCase("re-entrant checkpoints", "re-entrant", bucket_bytes=160),
        OverlapCase(
            "a layer in two re-entrant checkpoints: its hooks are called twice",
            "shared",
            steps=(Step(), Step(clear="zeros")),
            bucket_bytes=160,
        ),
        OverlapCase(
            "hooks are called twice before their bucket leaves",
            "shared",
            steps=(Step((Micro(("both", "neither")),)), Step(clear="zeros")),
            bucket_bytes=DEFAULT,
        ),
        OverlapCase(
            "hooks are called twice on rank 0, once on the others",
            "shared",
            steps=_branching(("both", "once"), ("both", "once")),
            bucket_bytes=160,
        ),
    ]


def _branches() -> list[OverlapCase]:
    return [
        OverlapCase(
            "branches that change from step to step",
            "branches",
            steps=_branching(LEFT, RIGHT, NEITHER, BOTH),
            bucket_bytes=200,
        ),
        OverlapCase("rank 1 leaves out a layer", "branches", steps=_branching(("both", "left")), bucket_bytes=1),
        OverlapCase(
            "branches that change from step to step and from rank to rank",
            "branches",
            steps=_branching(("left", "neither"), ("right", "left"), ("neither", "right"), BOTH),
            bucket_bytes=200,
        ),
    ]


def _accumulation() -> list[OverlapCase]:
    return [
        OverlapCase("two steps without zero_grad() between them", steps=(Step(), Step(clear="kept"))),
        OverlapCase(INTERRUPTED, steps=(Step((Micro(sync=False, raises=True), Micro())), Step())),
        OverlapCase(NESTED, steps=(Step((Micro(sync=False, nested=True), Micro())), Step())),
        OverlapCase("two forwards before one backward", steps=(Step((Micro(forwards=2),)),) * 2),
        OverlapCase(
            "a layer used only in an earlier micro-step",
            "branches",
            steps=(Step((Micro(BOTH, sync=False), Micro(NEITHER))),) * 2,
            bucket_bytes=200,
        ),
        OverlapCase(
            "a layer used only in an earlier micro-step, on one rank only",
            "branches",
            steps=(Step((Micro(("right", "neither"), sync=False), Micro(NEITHER))),) * 2,
            bucket_bytes=200,
        ),
    ]


def _lives() -> list[OverlapCase]:
    return [
        OverlapCase("two engines in one process", steps=(Step(), Step()), twins=True),
        OverlapCase(f"{MANY} steps", "branches", steps=(Step(),) * MANY, growth=True, watched=True),
    ]
