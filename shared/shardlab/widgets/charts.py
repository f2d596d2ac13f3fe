"""Charts of measurements, by matplotlib. Plain data in, a Figure out: return it as the last line of a cell.

The background is opaque and light, so a chart reads the same in a dark theme. Ranks have the course's colours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import pyplot
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from shardlab.errors import UsageError
from shardlab.records import Run
from shardlab.theory import format_bytes, format_seconds
from shardlab.widgets.colours import rank_look, text_on

INK = "#111111"


def new_axes(width: float, height: float, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A new figure that only its return value shows: pyplot forgets it at once, so no notebook shows it twice."""
    figure, axes = pyplot.subplots(1, columns, figsize=(width, height), layout="constrained", **options)
    pyplot.close(figure)
    figure.set_facecolor("white")
    for each in figure.axes:
        each.set_facecolor("white")
        each.spines[["top", "right"]].set_visible(False)
        each.tick_params(colors=INK)
    return figure, axes


def traffic_heatmap(run: Run) -> Figure:
    """Who sent how many bytes to whom, and what each rank sent and received in all.

    A library collective does not tell whom it talks to: its bytes are in the bars and not on the map, and the chart
    says so.
    """
    traffic = run.traffic
    if not traffic:
        raise UsageError("show: this run has no record of its traffic. Launch it with meter=True.")
    ranks = range(run.world_size)
    sent_to = [
        [traffic[source].by_peer[peer].sent if peer in traffic[source].by_peer else 0 for peer in ranks]
        for source in ranks
    ]
    size = max(2.6, 0.62 * run.world_size + 1)
    figure, (grid, bars) = new_axes(2 * size + 1.5, size, 2, width_ratios=(1, 1.15))
    _draw_map(grid, sent_to, run.noun)
    _draw_bars(bars, run.noun, [row.sent for row in traffic], [row.received for row in traffic])
    unmapped = sum(row.sent for row in traffic) - sum(map(sum, sent_to))
    if unmapped > 0:
        note = f"{format_bytes(unmapped)} of library collectives\n(who talks to whom is not told)"
        grid.set_title(f"{grid.get_title()}\n{note}", fontsize=8)
    return figure


def _draw_map(axes: Any, sent_to: list[list[float]], noun: str) -> None:
    most = max(map(max, sent_to)) or 1
    image = axes.imshow(sent_to, cmap="Blues", vmin=0, vmax=most)  # one hue: lightness alone carries it
    for source, row in enumerate(sent_to):
        for destination, sent in enumerate(row):
            red, green, blue, _ = image.cmap(image.norm(sent))
            fill = f"#{int(red * 255):02X}{int(green * 255):02X}{int(blue * 255):02X}"
            text = format_bytes(sent) if sent else "·"
            axes.text(destination, source, text, ha="center", va="center", fontsize=8, color=text_on(fill))
    _label_ranks(axes.xaxis, len(sent_to))
    _label_ranks(axes.yaxis, len(sent_to))
    axes.set(xlabel=f"to {noun}", ylabel=f"from {noun}", title="bytes sent, by pair")


def _draw_bars(axes: Any, noun: str, sent: list[float], received: list[float]) -> None:
    for rank in range(len(sent)):
        look = rank_look(rank)
        style = {"color": look.fill, "edgecolor": INK, "linewidth": 0.8}
        axes.bar(rank - 0.2, sent[rank], 0.38, hatch=look.hatch, **style)
        axes.bar(rank + 0.2, received[rank], 0.38, alpha=0.45, **style)
    _label_ranks(axes.xaxis, len(sent))
    bytes_axis(axes.yaxis)
    axes.set_ylim(0, (max(sent + received) or 1) * 1.25)
    axes.set(xlabel=noun, title="bytes in all")
    keys = [Patch(facecolor="#777777", edgecolor=INK), Patch(facecolor="#777777", edgecolor=INK, alpha=0.45)]
    axes.legend(
        keys, ["sent (left, full colour)", "received (right, pale)"], fontsize=8, frameon=False, loc="upper left"
    )


def bytes_per_rank(
    rows: Sequence[tuple[int, float | Sequence[float], float | None]],
    *,
    title: str = "bytes sent per rank",
    noun: str = "rank",
) -> Figure:
    """Measured bars beside predicted marks, for several world sizes.

    rows: (world size, measured bytes, predicted bytes); measured is one number, or a list with one number per rank;
    predicted is for each rank, or None. noun: what a bar stands for.
    """
    if not rows:
        raise UsageError("bytes_per_rank: no rows to draw; expected (world size, measured, predicted) tuples.")
    figure, axes = new_axes(max(4.5, 1.1 * len(rows) + 2), 3.2)
    for place, (_, measured, predicted) in enumerate(rows):
        values = [float(value) for value in (measured if isinstance(measured, Sequence) else [measured])]
        width = 0.8 / len(values)
        for rank, value in enumerate(values):
            look = rank_look(rank)
            at = place - 0.4 + width * (rank + 0.5)
            axes.bar(at, value, width * 0.92, color=look.fill, edgecolor=INK, linewidth=0.6, hatch=look.hatch)
        if predicted is not None:
            axes.hlines(predicted, place - 0.47, place + 0.47, color=INK, linewidth=2, linestyle="--")
    axes.set_xticks(range(len(rows)), [f"N = {world_size}" for world_size, *_ in rows])
    bytes_axis(axes.yaxis)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.15)
    axes.set_title(title)
    if any(predicted is not None for *_, predicted in rows):
        axes.plot([], [], color=INK, linewidth=2, linestyle="--", label="predicted")
    axes.bar([0], [0], color="#AAAAAA", edgecolor=INK, label=f"measured, a bar per {noun}")
    axes.legend(fontsize=8, frameon=False, loc="upper left", ncols=2)
    return figure


def alpha_beta_fit(
    points: Sequence[tuple[float, float]],
    alpha: float,
    beta: float,
    *,
    title: str = "time of a message",
    fixed: str = "alpha",
) -> Figure:
    """Measured times against sizes, with the line alpha + beta * size.

    points: (bytes, seconds). alpha: seconds a message takes however small it is. beta: seconds per byte.
    fixed: what the text calls alpha.
    """
    positive = [(size, seconds) for size, seconds in points if size > 0 and seconds > 0]
    if not positive:
        raise UsageError("alpha_beta_fit: no point has a positive size and time, so nothing fits on logarithmic axes.")
    figure, axes = new_axes(5.2, 3.4)
    sizes, times = zip(*sorted(positive), strict=True)
    smallest, largest = sizes[0], sizes[-1]
    line = [smallest * (largest / smallest) ** (i / 60) for i in range(61)] if largest > smallest else [smallest]
    axes.plot(sizes, times, "o", color=rank_look(0).fill, markeredgecolor=INK, label="measured")
    axes.plot(line, [alpha + beta * size for size in line], color=INK, label=f"{fixed} + beta · bytes")
    if alpha > 0:
        axes.axhline(alpha, color=INK, linestyle=":", linewidth=1, label=f"{fixed} = {format_seconds(alpha)}")
    if alpha > 0 and beta > 0 and smallest < alpha / beta < largest:
        crossover = alpha / beta
        axes.axvline(
            crossover, color=INK, linestyle="--", linewidth=1, label=f"half is {fixed} at {format_bytes(crossover)}"
        )
    rate = f", beta = {format_seconds(beta * 10**6)} per MB" if beta > 0 else ""
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="seconds", title=f"{title}{rate}")
    axes.legend(fontsize=8, frameon=False)
    return figure


def steps_against(
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    *,
    xlabel: str,
    ylabel: str = "steps",
    title: str = "",
    log: bool = False,
) -> Figure:
    """A small line chart: one line per name, marked so that the lines differ without colour too. log: x by powers."""
    for name, values in series.items():
        if len(values) != len(x):
            raise UsageError(f"steps_against: {name!r} has {len(values)} values, expected {len(x)}, one per x.")
    figure, axes = new_axes(4.8, 3)
    for place, (name, values) in enumerate(series.items()):
        axes.plot(x, values, "osD^vPX*"[place % 8] + "-", color=rank_look(place).fill, markeredgecolor=INK, label=name)
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title, xscale="log" if log else "linear")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.1)
    if series:
        axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _label_ranks(axis: Any, count: int) -> None:
    axis.set_ticks(range(count), [str(rank) for rank in range(count)])
    for rank, label in enumerate(axis.get_ticklabels()):
        look = rank_look(rank)
        label.set(color=look.text, bbox={"facecolor": look.fill, "edgecolor": INK, "linewidth": 0.5, "pad": 2})


def bytes_axis(axis: Any) -> None:
    axis.set_major_formatter(lambda value, _: format_bytes(max(value, 0)))
