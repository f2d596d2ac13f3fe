"""Who waited for whom when a launch failed, as a static picture: ranks as nodes, waits as arrows.

Plain SVG shapes with attributes only, on an opaque light page, as in ring_svg.py: it looks the same in a notebook, in a
dark theme, in exported HTML and on GitHub.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING

from shardlab.records import Standing
from shardlab.widgets.colours import WRONG, rank_look

if TYPE_CHECKING:
    from shardlab.errors import LaunchError

INK, DIM, LINE, PAGE = "#111111", "#595959", "#767676", "#FFFFFF"
NODE, MARGIN, ROW, WIDTH = 17, 34, 34, 860
MOST_ROWS = 16  # ranks described beside the picture
WORDS = {
    "waiting": "waits",
    "computing": "computes",
    "starting": "starts",
    "finished": "finished",
    "raised": "raised an exception",
    "died": "died",
}


class WaitsPicture:
    """What a notebook shows for `error.why()`. No HTML: where SVG is not trusted, the text says more than its rest."""

    def __init__(self, error: LaunchError) -> None:
        self.title = error.report.splitlines()[0]
        self.ranks = innocent(error.ranks) if error.kind == "deadlock" else error.ranks

    def _repr_svg_(self) -> str:
        return waits_svg(self.ranks, self.title)

    def __repr__(self) -> str:
        return "\n".join([self.title, *(f"  {sentence(standing)}" for standing in self.ranks)])


def innocent(ranks: Sequence[Standing]) -> tuple[Standing, ...]:
    """Nobody is blamed where every rank waits, and each for one other: whom a circle is read from first is chance."""
    circle = all(standing.doing == "waiting" and len(standing.waits_for) == 1 for standing in ranks)
    alike = len({standing.call.split()[0] for standing in ranks if standing.call}) == 1
    awaited = {other for standing in ranks for other in standing.waits_for}
    if not (circle and alike and len(awaited) == len(ranks)):
        return tuple(ranks)
    return tuple(replace(standing, blamed=False) for standing in ranks)


def sentence(standing: Standing) -> str:
    """ "rank 1 waits for rank 2: send to rank 2 (8 float32)" """
    waits = f" for {_ranks(standing.waits_for)}" if standing.waits_for else ""
    call = f": {standing.call}" if standing.call else ""
    return f"rank {standing.rank} {WORDS[standing.doing]}{waits}{call}"


def waits_svg(ranks: Sequence[Standing], title: str) -> str:
    """SVG text. Ranks on a circle, an arrow from each one that waits to those it waits for, a ring round the blamed."""
    radius = max(70.0, (NODE + 5) * len(ranks) / math.pi)
    centre = MARGIN + radius
    rows = sorted(ranks, key=lambda standing: (not standing.blamed, not standing.waits_for))[:MOST_ROWS]
    rows.sort(key=lambda standing: standing.rank)
    height = max(2 * centre, 40 + ROW * (len(rows) + 1)) + 24
    width = max(WIDTH, 2 * centre + 420)
    places = {
        standing.rank: (
            centre + radius * math.sin(2 * math.pi * position / len(ranks)),
            24 + centre - radius * math.cos(2 * math.pi * position / len(ranks)),
        )
        for position, standing in enumerate(ranks)
    }
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" aria-label="{escape(title)}">',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="{PAGE}"/>',
        _text(14, 20, _short(title, 110), 14, weight="bold"),
    ]
    for standing in ranks:
        parts += [_arrow(places[standing.rank], places[other]) for other in standing.waits_for]
    parts += [_node(standing, *places[standing.rank]) for standing in ranks]
    for row, standing in enumerate(rows):
        parts += _row(standing, 2 * centre + 10, 52 + ROW * row)
    if len(rows) < len(ranks):
        parts.append(_text(2 * centre + 10, 52 + ROW * len(rows), f"and {len(ranks) - len(rows)} more ranks", 12, DIM))
    return "".join([*parts, "</svg>"])


def _node(standing: Standing, x: float, y: float) -> str:
    look = rank_look(standing.rank)
    idle = "" if standing.doing in ("waiting", "computing", "starting") else ' fill-opacity="0.35"'
    ring = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{NODE + 4}" fill="none" stroke="{WRONG}" stroke-width="3"/>'
    return (
        (ring if standing.blamed else "")
        + f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{NODE}" fill="{look.fill}"{idle} stroke="{INK}"/>'
        + _text(x, y + 5, str(standing.rank), 14, INK if idle else look.text, anchor="middle", weight="bold")
    )


def _row(standing: Standing, x: float, y: float) -> list[str]:
    where = f"{standing.place}: {standing.source}" if standing.source else standing.place
    colour = WRONG if standing.blamed else INK
    return [_text(x, y, _short(sentence(standing), 75), 13, colour), _text(x + 12, y + 15, _short(where, 80), 11, DIM)]


def _arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    """From the rim of one node to the rim of the other, bent to the right so that two opposite arrows stay apart."""
    (x0, y0), (x1, y1) = start, end
    length = math.hypot(x1 - x0, y1 - y0)
    along, across = ((x1 - x0) / length, (y1 - y0) / length), ((y0 - y1) / length, (x1 - x0) / length)
    bend = 0.12 * length
    bx, by = (x0 + x1) / 2 + bend * across[0], (y0 + y1) / 2 + bend * across[1]
    sx, sy = x0 + along[0] * NODE + across[0] * 4, y0 + along[1] * NODE + across[1] * 4
    direction = math.atan2(y1 - by, x1 - bx)
    ex, ey = x1 - math.cos(direction) * (NODE + 6), y1 - math.sin(direction) * (NODE + 6)
    head = [
        (ex, ey),
        *((ex - 9 * math.cos(direction + turn), ey - 9 * math.sin(direction + turn)) for turn in (0.45, -0.45)),
    ]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in head)
    return (
        f'<path d="M{sx:.1f} {sy:.1f} Q{bx:.1f} {by:.1f} {ex:.1f} {ey:.1f}" fill="none" stroke="{LINE}" '
        f'stroke-width="2"/><polygon points="{points}" fill="{INK}"/>'
    )


def _text(
    x: float, y: float, text: str, size: int, colour: str = INK, anchor: str = "start", weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-family="sans-serif" font-size="{size}" fill="{colour}" '
        f'text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'
    )


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(str(rank) for rank in ranks[:4])
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return f"rank{'s' * (len(ranks) > 1)} {named}{more}"
