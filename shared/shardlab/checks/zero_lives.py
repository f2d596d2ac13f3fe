"""Labs 06 to 08: the lives that an engine is put through, the cheapest first.

What takes time is the number of collectives: models are small, and each case has the steps that it needs.
"""

from __future__ import annotations

from dataclasses import replace

from .zero_cases import DECAYING, INF, NAN, PLAIN, Bad, Micro, Step, ZeroCase
from .zero_models import SIDE, Sizes
from .zero_stage import WEIGHT, Stage

CHAIN = "16 layers of 64 x 64, bfloat16"
ORDER = "16 layers, with a communicator of the check's own"
LAYER = 2 * SIDE * (SIDE + 1)  # bytes of a chain's layer, and of a bucket: in its weights all buckets are a sixteenth
GOOD = Step()
NOTHING = Step(())  # no backward
TWICE = Step((Micro(), Micro()))
SLOWLY = {"lr": 2.0**-6, "eps": 2.0**-6}


def first(stage: Stage) -> list[ZeroCase]:
    """What most wrong engines fail in. Completions are not late."""
    return [ZeroCase("float32 weights", options=DECAYING, peeked=True), chain(stage), whole(stage)]


def chain(stage: Stage, kind: str = "chain", about: str = CHAIN) -> ZeroCase:
    return _at_rest(stage, ZeroCase(about, kind, "bfloat16", options=SLOWLY, bucket_bytes=LAYER, measured=True))


def whole(stage: Stage) -> ZeroCase:
    """Is only made: what is too much for a moment is not hidden by there being many buckets."""
    return _at_rest(
        stage, ZeroCase("all in one bucket", "chain", "bfloat16", (), SLOWLY, bucket_bytes=None, measured=True)
    )


def _at_rest(stage: Stage, case: ZeroCase) -> ZeroCase:
    sizes = Sizes.of(case)
    frozen = WEIGHT * sizes.frozen
    shared = (0.0, frozen) if stage.splits("parameters") else (frozen, 0.0)
    return replace(case, rest=(stage.whole() * sizes.psi + shared[0], stage.split() * sizes.psi + shared[1]))


def values(stage: Stage) -> list[ZeroCase]:
    """Values of all kinds, at N = 3."""
    return [
        ZeroCase("float32 weights, late completions", steps=(GOOD,) * 3, options=DECAYING, peeked=True),
        ZeroCase("bfloat16 weights", dtype="bfloat16", options=DECAYING),
        *_gradients(),
        *_options(),
        *_overflows(3),
        *_models(stage),
    ]


def _gradients() -> list[ZeroCase]:
    kept = Step(clear=False)
    between = Step((Micro(forwards=2, peeks=True),))
    return [
        ZeroCase("two backwards, then a step", steps=(TWICE, GOOD), options=PLAIN),
        ZeroCase("two backwards, float16", "two", "float16", (TWICE, GOOD), PLAIN),
        ZeroCase("a step without zero_grad() before it", "two", steps=(kept, kept), options=PLAIN),
        ZeroCase("two forwards and an evaluation before backward", steps=(between, GOOD), options=PLAIN),
    ]


def _options() -> list[ZeroCase]:
    rates = (GOOD, Step(rates=(0.25, 0.125)), Step(rates=(0.125, 0.5)))
    groups = ({"weight_decay": 0.25}, {"lr": 0.25, "betas": (0.5, 0.75), "eps": 0.5})
    slow = {"lr": 2.0**-9, "betas": (0.5, 0.75), "eps": 2.0**-6, "scale": 64.0}
    clipped = {**PLAIN, "max_norm": 0.5}
    return [
        ZeroCase("max_norm=0.5", options=clipped),
        ZeroCase("max_norm=1000", "two", steps=(GOOD,), options={**PLAIN, "max_norm": 1000.0}),
        ZeroCase("two groups, and a learning rate that changes", steps=rates, options=PLAIN, groups=groups),
        ZeroCase("two groups and max_norm=0.5", "two", options=clipped, groups=groups),
        ZeroCase("10 small updates", "two", "bfloat16", (GOOD,) * 10, slow, steady=True),
        ZeroCase("default arguments", "terms", bucket_bytes=None),
    ]


def _overflows(n: int) -> list[ZeroCase]:
    """Elements 0 and 7 are in the shards of different ranks, however the model is cut."""
    places = [Bad(0, INF, (1,)), Bad(7, NAN, (0,)), Bad(7, -INF, (n - 1,)), Bad(0, NAN, (n - 1,)), Bad(3, INF)]
    skips = [Step((Micro(bad=(place,)),)) for place in places]
    growing = {**DECAYING, "growth_interval": 2, "scale": 4.0}
    bad, good = skips[0], GOOD
    twice = Step((Micro(bad=(places[1],)), Micro()))
    clipped = {**DECAYING, "max_norm": 0.5}
    return [
        # Two buckets: looking into one of them is not enough.
        ZeroCase("overflow on some ranks only", "two", "float16", (good, *skips, good, good), DECAYING, bucket_bytes=8),
        ZeroCase("growth_interval=2", "two", "float16", (good, good, good, bad, good, good, bad, bad, good), growing),
        ZeroCase("a low scale", "two", "float32", (bad, bad, good), {**growing, "scale": 2.0}),
        ZeroCase("overflow in the first of two backwards", "two", "float32", (twice, good), DECAYING),
        ZeroCase("overflow with max_norm=0.5", "two", "float16", (bad, skips[1], good), clipped),
    ]


def _models(stage: Stage) -> list[ZeroCase]:
    small = 200
    both, left, neither = (Step((Micro((choice,)),)) for choice in ("both", "left", "neither"))
    apart = Step((Micro(("both", "left")),))
    unused = ("unused skipped",)
    cases = [
        ZeroCase("a tied matrix, and a layer that runs twice", "tied", options=PLAIN, bucket_bytes=small),
        ZeroCase("frozen parameters", "frozen", options=DECAYING, bucket_bytes=small),
        ZeroCase("parameters of 0 and 1 elements, and transposed", "shapes", options=PLAIN, bucket_bytes=100),
        ZeroCase("a parameter larger than a bucket", "large", steps=(GOOD,), options=PLAIN, bucket_bytes=256),
        ZeroCase("buffers", "buffers", steps=(GOOD,), options=PLAIN),
        ZeroCase("all parameters frozen", "all frozen", steps=(NOTHING,), options=PLAIN, peeked=True),
        ZeroCase("layers that run in the reverse of their order", "backwards", steps=(GOOD,), options=PLAIN),
        ZeroCase("checkpoints, not re-entrant", "checkpoint", steps=(GOOD,), options=PLAIN, bucket_bytes=160),
        ZeroCase(
            "branches that change from step to step",
            "branches",
            steps=(both, left, neither, both),
            options=PLAIN,
            bucket_bytes=small,
            accepts=unused,
        ),
    ]
    if not stage.splits("parameters"):  # with weights split, all ranks must run the same layers
        cases.append(
            ZeroCase("rank 1 leaves out a layer", "branches", steps=(apart,), options=PLAIN, bucket_bytes=small)
        )
    return cases


def paired(stage: Stage) -> list[ZeroCase]:
    """At N = 2. Reductions go through the check's own communicator, whose completions are late."""
    ordered = {**PLAIN, **SLOWLY}
    return [
        ZeroCase("float32 weights", steps=(GOOD,), options=DECAYING),
        ZeroCase(ORDER, "chain", "float32", (GOOD,), ordered, bucket_bytes=2 * 3 * LAYER, plugged=True),
        chain(stage, "frozen chain", "16 layers, every second one frozen, bfloat16"),
    ]


def single() -> list[ZeroCase]:
    return [
        ZeroCase("float16 weights", "terms", "float16", options=DECAYING),
        ZeroCase("max_norm=0.5", options={**PLAIN, "max_norm": 0.5}),
    ]


def many(stage: Stage) -> list[ZeroCase]:
    """At N = 5."""
    return [
        ZeroCase("float32 weights", steps=(GOOD,), options=DECAYING),
        ZeroCase("fewer elements than ranks", "few", options=DECAYING),
        replace(chain(stage), steps=(GOOD,)),
    ]
