"""Model states as stacked bars: how many bytes of each kind, measured, beside what the formula says."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from shardlab.errors import UsageError
from shardlab.theory import format_bytes
from shardlab.widgets.charts import INK, bytes_axis, new_axes
from shardlab.widgets.colours import KINDS

WIDEST_NAME = 13  # characters under a bar; longer names go on in a second line
SMALLEST_LABELLED = 0.05  # of the highest bar: in a thinner piece a number would not fit


def state_bars(
    bars: Mapping[str, Mapping[str, float]], *, predicted: Mapping[str, float] | None = None, title: str = "bytes held"
) -> Figure:
    """A bar per name, stacked of kinds of state, in the order given.

    bars: {"device 0": {"weights": bytes, "gradients": bytes, "optimizer": bytes}}; the kinds are those of
    `colours.KINDS`. predicted: bytes of a whole bar, drawn as a dashed line across it.
    """
    unknown = {kind for bar in bars.values() for kind in bar} - set(KINDS)
    if not bars or unknown:
        what = f"no kind of state is called {min(unknown)!r}" if unknown else "no bar to draw"
        raise UsageError(f"state_bars: {what}; there are {', '.join(KINDS)}")
    figure, axes = new_axes(max(4.5, 1.1 * len(bars) + 2.6), 3.4)
    highest = max(sum(bar.values()) for bar in bars.values()) or 1
    for place, bar in enumerate(bars.values()):
        bottom = 0.0
        for kind, size in bar.items():
            look = KINDS[kind]
            axes.bar(place, size, 0.7, bottom, color=look.fill, edgecolor=INK, linewidth=0.8, hatch=look.hatch)
            if size > SMALLEST_LABELLED * highest:
                axes.text(
                    place,
                    bottom + size / 2,
                    f"{look.sign} {format_bytes(size)}",
                    ha="center",
                    va="center",
                    fontsize=8,
                    color=INK,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.2},
                )
            bottom += size
    for place, name in enumerate(bars):
        if predicted and name in predicted:
            axes.hlines(predicted[name], place - 0.45, place + 0.45, color="#D55E00", linewidth=2.2, linestyle="--")
    axes.set_xticks(range(len(bars)), [textwrap.fill(name, WIDEST_NAME) for name in bars])
    bytes_axis(axes.yaxis)
    axes.set_ylim(0, max([highest, *(predicted or {}).values()]) * 1.12)
    axes.set_title(title)
    used = [kind for kind in KINDS if any(kind in bar for bar in bars.values())]
    keys = [
        Patch(facecolor=KINDS[kind].fill, edgecolor=INK, hatch=KINDS[kind].hatch, label=f"{KINDS[kind].sign}: {kind}")
        for kind in reversed(used)
    ]
    if predicted:
        (line,) = axes.plot([], [], color="#D55E00", linewidth=2.2, linestyle="--", label="formula")
        keys.append(line)
    axes.legend(handles=keys, fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
