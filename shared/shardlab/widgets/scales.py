"""A loss scale over the steps of a run: where a step was skipped, and where the scale grew."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from shardlab.errors import UsageError
from shardlab.widgets.charts import INK, new_axes
from shardlab.widgets.colours import WRONG, rank_look


def scale_steps(scales: Sequence[float], stepped: Sequence[bool], *, title: str = "loss scale") -> Figure:
    """scales[i]: the scale that step i used. stepped[i]: whether the step was made; if not, it was skipped."""
    if not scales or len(scales) != len(stepped):
        raise UsageError(f"scale_steps: {len(scales)} scales and {len(stepped)} steps; expected as many, one at least")
    figure, axes = new_axes(7.2, 3)
    steps = range(len(scales))
    axes.step(steps, scales, where="mid", color=INK, linewidth=1)
    made = [step for step in steps if stepped[step]]
    skipped = [step for step in steps if not stepped[step]]
    grown = [step for step in steps if step and scales[step] > scales[step - 1]]
    axes.plot(made, [scales[step] for step in made], "o", color=rank_look(0).fill, markersize=4, label="step made")
    axes.plot(skipped, [scales[step] for step in skipped], "X", color=WRONG, markersize=9, label="overflow: skipped")
    axes.plot(
        grown,
        [scales[step] * 1.35 for step in grown],
        "^",
        color=rank_look(2).fill,
        markeredgecolor=INK,
        markersize=6,
        label="grown: doubled",
    )
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(min(scales) / 2, max(scales) * 3)
    axes.set(xlabel="step", ylabel="scale", title=title)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
