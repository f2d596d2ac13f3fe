"""Who owns what: all parameters end to end, to scale, each piece in the colour of the rank that owns it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from matplotlib.figure import Figure

from shardlab.errors import UsageError
from shardlab.widgets.charts import INK, new_axes
from shardlab.widgets.colours import rank_look

WIDEST_UNLABELLED = 0.04  # share of the whole: in a narrower piece a rank's number would not fit
LETTER = 0.0066  # share of the whole that a letter of a name takes
Pieces = Sequence[Sequence[tuple[int, int, int]]]  # by rank: (index of the parameter, start, stop)


def owners(partitions: Mapping[str, Pieces], sizes: Sequence[int], names: Sequence[str], *, title: str = "") -> Figure:
    """A strip per partition: the elements of all parameters from left to right, coloured by owner.

    partitions: {"in equal parts": for each rank its pieces (index, start, stop)}. sizes, names: of each parameter. What
    nobody owns stays white; what two ranks own shows the later one.
    """
    if not partitions or len(sizes) != len(names) or not sum(sizes):
        raise UsageError("owners: expected at least one partition, and as many names as sizes, not all of them 0")
    total = sum(sizes)
    begins = [0, *accumulate(sizes)]
    figure, axes = new_axes(9.2, 0.9 + 0.75 * len(partitions))
    for row, pieces in enumerate(partitions.values()):
        for rank, mine in enumerate(pieces):
            look = rank_look(rank)
            for start, stop in _joined([(begins[index] + start, begins[index] + stop) for index, start, stop in mine]):
                axes.barh(row, stop - start, 0.62, start, color=look.fill, hatch=look.hatch, edgecolor=INK, linewidth=0)
                if stop - start > WIDEST_UNLABELLED * total:
                    middle, behind = (start + stop) / 2, {"facecolor": look.fill, "edgecolor": "none", "pad": 1.5}
                    axes.text(middle, row, str(rank), color=look.text, ha="center", va="center", bbox=behind, zorder=5)
        axes.barh(row, total, 0.62, 0, fill=False, edgecolor=INK, linewidth=0.8)
        for begin in begins[1:-1]:
            axes.vlines(begin, row - 0.31, row + 0.31, color="white", linewidth=1.6)
            axes.vlines(begin, row - 0.31, row + 0.31, color=INK, linewidth=0.6)
    for name, begin, size in zip(names, begins[:-1], sizes, strict=True):
        if size > LETTER * len(name) * total:
            axes.text(begin + size / 2, -0.42, name, ha="center", va="bottom", fontsize=7, color=INK)
    axes.set_yticks(range(len(partitions)), list(partitions))
    axes.set_ylim(len(partitions) - 0.5, -0.75)
    axes.set_xlim(0, total)
    axes.set(xlabel="elements; the numbers and colours are ranks", title=title)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False)
    return figure


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans that touch become one: a rank's number is written once."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined
