"""The lives that an engine of lab 01 is put through, the simplest first."""

from __future__ import annotations

import itertools
import math

from .states_script import GOOD, SHAPES, Bad, EngineCase, Script, Step

INF, NAN, HUGE = math.inf, math.nan, 1e6  # 1e6 times a scale of 2 and more is finite in float32 and inf in float16
LAST = len(SHAPES) - 1
EXACT = {"lr": 0.125, "betas": (0.75, 0.875), "eps": 0.5, "scale": 2.0**10}  # a large eps hides no factor
DECAYING = {**EXACT, "lr": 0.25, "weight_decay": 0.25}
SMALL_UPDATE = 1e-4
UPDATES = 60
ROWS, PARAMETERS = 512, 4  # of the case in which memory is measured


def one(name: str, script: Script, **how: bool) -> EngineCase:
    return EngineCase(name, (script,), **how)


def overflow(parameter: int, element: int, value: float, ranks: tuple[int, ...] | None = None) -> Step:
    return Step(bad=(Bad(parameter, element, value, ranks),))


PLACES = [
    overflow(*place)
    for place in (
        (0, 0, INF),
        (LAST, 5, NAN),
        (1, 2, -INF),
        (2, 0, NAN),
        (0, 11, HUGE),
        (LAST, 0, -HUGE),
        (1, 4, NAN),
        (0, 5, -INF),
    )
]


def basics() -> list[EngineCase]:
    """For one rank: the update, in all dtypes."""
    good = (GOOD,) * 3
    return [
        one("float32 weights", Script(good, options=EXACT)),
        one("weight_decay=0.25", Script(good, options=DECAYING)),
        one("default arguments", Script(good, options={})),
        *(
            one(
                f"{UPDATES} updates of {SMALL_UPDATE:g} on {dtype} weights of 1",
                Script(
                    (GOOD,) * UPDATES, (dtype,), {"lr": SMALL_UPDATE}, ((2,),), weight=1.0, gradient=-0.5, every=UPDATES
                ),
            )
            for dtype in ("float16", "bfloat16")
        ),
        one("float16 weights", Script(good, ("float16",), DECAYING)),
        one("bfloat16 weights", Script(good, ("bfloat16",), DECAYING)),
        one("parameters as a generator", Script(good, ("float16", "float32"), EXACT, generator=True)),
    ]


def life() -> list[EngineCase]:
    """For one rank: gradients of all kinds, overflows, the scale, several engines."""
    good = (GOOD,) * 3
    skips = tuple(itertools.chain.from_iterable((bad, GOOD) for bad in PLACES))
    growing = {**EXACT, "growth_interval": 3}
    ups_and_downs = (*(GOOD,) * 4, PLACES[0], GOOD, GOOD, PLACES[1], *(GOOD,) * 7, PLACES[2], PLACES[2], *(GOOD,) * 3)
    return [
        one(
            "gradients of 2**-30",
            Script(
                (Step(power=-27), Step(power=-28), Step(power=-27)),
                ("float16",),
                {"lr": 2.0**-6, "eps": 2.0**-28, "scale": 2.0**20, "betas": (0.5, 0.75)},
            ),
        ),
        one("two backwards, then a step", Script((Step(backwards=2),) * 2, ("float16", "float32"), EXACT)),
        one(
            ".grad changed between backward and step",
            Script((Step(between="halved in place"), Step(between="replaced by half")), ("float16", "float32"), EXACT),
        ),
        one(
            "parameters without a gradient",
            Script(
                (Step(none=(1,)), Step(none=(1, 2)), Step(none=(0, LAST)), GOOD),
                ("float16", "float32"),
                DECAYING,
                accepts=("global count",),
            ),
        ),
        one(
            "no gradient at all",
            Script((Step(none=tuple(range(len(SHAPES)))), GOOD), options=DECAYING, accepts=("global count",)),
        ),
        one("large gradients that are finite", Script((Step(power=14),) * 2, ("float16",), {**EXACT, "scale": 1.0})),
        one("overflow in the first step", Script((PLACES[3], GOOD, GOOD), options=DECAYING)),
        one("overflows, float32 weights", Script(skips, options=DECAYING | {"scale": 2.0**32})),
        one("overflows, float16 weights", Script(skips, ("float16",), DECAYING | {"scale": 2.0**12})),
        one(
            "an overflow beside parameters without a gradient",
            Script(
                (
                    Step(bad=PLACES[1].bad, none=(0, 2)),
                    Step(bad=PLACES[2].bad, none=(0, 2, LAST)),
                    Step(bad=PLACES[0].bad, none=(1, 2, LAST)),
                ),
                ("float16",),
                EXACT,
            ),
        ),
        one("growth_interval=3", Script(ups_and_downs, options=growing)),
        one("growth_interval=3, float16 weights", Script(ups_and_downs, ("float16",), {**growing, "scale": 64.0})),
        one("growth_interval=1", Script(good, options={**EXACT, "growth_interval": 1})),
        one("a low scale", Script((PLACES[0],) * 4 + good, options={**growing, "scale": 4.0})),
        one("scale=1.5", Script((PLACES[0], PLACES[0], GOOD), options={**growing, "scale": 1.5})),
        EngineCase(
            "skipped steps",
            (
                Script((GOOD, PLACES[1], GOOD, PLACES[2], PLACES[0], GOOD), options=DECAYING),
                Script(tuple(Step(data=data) for data in (0, 2, 5)), options=DECAYING),
            ),
            same_end=True,
        ),
        EngineCase(
            "two engines in turn",
            (
                Script((GOOD, PLACES[1], GOOD, GOOD), ("float16",), {**growing, "scale": 256.0}),
                Script((GOOD, GOOD, GOOD, GOOD), options=DECAYING),
            ),
        ),
        one("without a process group", Script((GOOD, PLACES[1], GOOD), ("float16",), EXACT), group=False),
    ]


def memory() -> list[EngineCase]:
    """For one rank: what is held."""
    shapes = ((ROWS, 2),) * PARAMETERS
    # Numbers that are given, not drawn: what is drawn stays in memory.
    script = Script((GOOD, PLACES[0], GOOD, GOOD), ("float16",), {"scale": 64.0}, shapes, weight=1.0, gradient=0.25)
    return [one("memory", script, memory=True)]


def together(world_size: int) -> list[EngineCase]:
    """For several ranks, each with weights and gradients of its own."""
    ranks = range(world_size)
    single = [overflow(rank % len(SHAPES), 0, NAN if rank % 2 else INF, (rank,)) for rank in ranks]
    all_but_one = [overflow(LAST, 1, -INF, tuple(other for other in ranks if other != rank)) for rank in ranks]
    everywhere = overflow(1, 1, NAN)
    steps = (GOOD, *single, GOOD, *all_but_one, everywhere, *(GOOD,) * 4)
    nobody = tuple(range(len(SHAPES)))
    lonely = [
        Step(none=nobody, none_on=(world_size - 1,)),
        Step(none=nobody, none_on=(world_size - 1,), bad=(Bad(0, 1, INF, (0,)),)),
        Step(none=(0, LAST), none_on=(0,), bad=(Bad(1, 1, INF, (world_size - 1,)),)),
        Step(none=nobody),
        GOOD,
    ]
    options = {**EXACT, "growth_interval": 3}
    return [
        one("overflow on some ranks only", Script(steps, options=options | {"scale": 2.0**20})),
        one("overflow on some ranks only, float16 weights", Script(steps, ("float16",), options | {"scale": 2.0**13})),
        one(
            "a rank without gradients",
            Script(tuple(lonely), ("float16", "float32"), {**EXACT}, accepts=("global count",)),
        ),
    ]
