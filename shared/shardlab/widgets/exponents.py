"""Where numbers lie between fp16's smallest and largest: a histogram of their exponents."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from shardlab.errors import UsageError
from shardlab.widgets.charts import INK, new_axes
from shardlab.widgets.colours import rank_look

ZERO, NORMAL, OVERFLOW = -25, -14, 16  # 2**-25 and less is rounded to 0; below 2**-14 digits are lost; 2**16 is inf
LOWEST, HIGHEST = -44, 20


def exponents(groups: Mapping[str, Sequence[float]], *, title: str = "") -> Figure:
    """A panel per group: the share of its numbers by power of two, and what fp16 makes of them.

    Zeros are left out; what lies beyond the edges of the panel is drawn at the edge.
    """
    if not groups or not all(len(values) for values in groups.values()):
        raise UsageError("exponents: nothing to draw; expected a non-empty sequence of numbers per name")
    figure, axes = new_axes(3.9 * len(groups), 3.1, len(groups), sharey=True, squeeze=False)
    for place, (name, values) in enumerate(groups.items()):
        _panel(axes[0][place], name, counts(values), place)
    axes[0][0].set_ylabel("share of the numbers")
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def counts(values: Sequence[float]) -> dict[int, float]:
    """The share of the numbers, zeros left out, with each exponent: floor(log2 |x|), kept within the panel."""
    found: dict[int, int] = {}
    for value in values:
        if value:
            exponent = math.frexp(value)[1] - 1 if math.isfinite(value) else HIGHEST
            exponent = min(max(exponent, LOWEST), HIGHEST)
            found[exponent] = found.get(exponent, 0) + 1
    total = sum(found.values()) or 1
    return {exponent: count / total for exponent, count in sorted(found.items())}


def _panel(axes: Any, name: str, shares: Mapping[int, float], place: int) -> None:
    bands = (
        (LOWEST, ZERO, "#F5C6CF", "becomes 0"),
        (ZERO, NORMAL, "#F6EBC8", "loses digits"),
        (NORMAL, OVERFLOW, "#FFFFFF", "fp16's normal range"),
        (OVERFLOW, HIGHEST + 1, "#F5C6CF", "inf"),
    )
    highest = max(shares.values(), default=1.0)
    for low, high, fill, words in bands:
        axes.axvspan(low, high, color=fill, zorder=0)
        axes.text((low + high) / 2, highest * 1.12, words, ha="center", va="center", fontsize=7, color=INK)
    axes.bar(
        [exponent + 0.5 for exponent in shares],
        list(shares.values()),
        0.9,
        color=rank_look(place).fill,
        edgecolor=INK,
        linewidth=0.4,
    )
    axes.set(xlim=(LOWEST, HIGHEST + 1), ylim=(0, highest * 1.2), xlabel="power of two, log2 |x|", title=name)
    axes.set_xticks([ZERO, NORMAL, 0, OVERFLOW])
