"""Curves over training steps: losses beside each other, or how far replicas have drifted apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from shardlab.errors import UsageError
from shardlab.widgets.charts import INK, new_axes
from shardlab.widgets.colours import rank_look

STYLES = ("-", "--", "-.", ":")


def curves(
    series: Mapping[str, Sequence[float]],
    *,
    ylabel: str,
    xlabel: str = "step",
    title: str = "",
    log: bool = False,
    floor: float | None = None,
) -> Figure:
    """One line per name, which differ in colour, dash and mark. Lengths may differ; the first value is step 0.

    log: y by powers of ten. floor: with log, values below it (zero above all) are drawn at the floor, which a dotted
    line marks as "0 to ...": what is exactly equal stays on the picture.
    """
    if not series or not all(len(values) for values in series.values()):
        raise UsageError("curves: nothing to draw; expected a non-empty sequence of numbers per name")
    figure, axes = new_axes(6.4, 3.2)
    for place, (name, values) in enumerate(series.items()):
        shown = [max(value, floor) if floor is not None else value for value in values]
        every = max(1, len(shown) // 8)
        axes.plot(
            range(len(shown)),
            shown,
            STYLES[place % len(STYLES)],
            marker="osD^vPX*"[place % 8],
            markevery=(place % every, every),
            color=rank_look(place).fill,
            markeredgecolor=INK,
            markersize=5,
            label=name,
        )
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if log:
        axes.set_yscale("log")
    if floor is not None:
        axes.axhline(floor, color=INK, linestyle=":", linewidth=1)
        # At the right end and below the line: the marks of what lies on it stay free.
        end = max(len(values) for values in series.values()) - 1
        axes.annotate(
            f"0 to {floor:g}",
            (end, floor),
            (0, -4),
            textcoords="offset points",
            ha="right",
            va="top",
            fontsize=7,
            color=INK,
        )
        axes.set_ylim(bottom=floor / 3 if log else None)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
