"""Labs 06 to 08: the lives that an engine is put through, the cheapest first."""

from __future__ import annotations

from .zero_cases import DECAYING, INF, NAN, PLAIN, Bad, Micro, Step, ZeroCase
from .zero_models import LAYERS, SIDE

CHAIN = "16 layers of 64, bfloat16"
ORDER = "16 layers, with a communicator of the check's own"
SIXTH = 2 * LAYERS * SIDE * (SIDE + 1) // 6  # bytes: six buckets for the gradients of "chain"
GOOD = Step()
TWICE = Step((Micro(), Micro()))


def first() -> list[ZeroCase]:
    """What most wrong engines fail in."""
    return [
        ZeroCase("float32 weights", options=DECAYING),
        ZeroCase(
            CHAIN, "chain", "bfloat16", (GOOD,) * 3, {"lr": 2.0**-6, "eps": 2.0**-6}, bucket_bytes=SIXTH, measured=True
        ),
    ]


def late() -> list[ZeroCase]:
    """With every completion late."""
    return [
        ZeroCase("float32 weights, late completions", options=DECAYING),
        ZeroCase("bfloat16 weights", "layers", "bfloat16", options=DECAYING),
        ZeroCase("two backwards, then a step", steps=(TWICE, TWICE, GOOD), options=PLAIN),
        ZeroCase("max_norm=0.5", options={**PLAIN, "max_norm": 0.5}),
        ZeroCase(
            "two groups, and a learning rate that changes",
            steps=(GOOD, Step(rates=(0.25, 0.125)), Step(rates=(0.125, 0.5))),
            options=PLAIN,
            groups=({"weight_decay": 0.25}, {"lr": 0.25, "betas": (0.5, 0.75)}),
        ),
        ZeroCase(
            "overflow on one rank",
            "terms",
            "float16",
            (GOOD, Step((Micro(bad=(Bad(0, INF, (1,)),)),)), GOOD, Step((Micro(bad=(Bad(50, NAN, (0,)),)),)), GOOD),
            options=DECAYING,
        ),
        ZeroCase(
            ORDER, "chain", "float32", (GOOD,) * 2, {**PLAIN, "lr": 2.0**-6}, bucket_bytes=2 * SIXTH, plugged=True
        ),
    ]


def single() -> list[ZeroCase]:
    return [ZeroCase("float16 weights", "terms", "float16", options=DECAYING)]


def many() -> list[ZeroCase]:
    return [
        ZeroCase("float32 weights", options=DECAYING),
        ZeroCase("fewer elements than ranks in a parameter", "terms", options=DECAYING),
    ]
