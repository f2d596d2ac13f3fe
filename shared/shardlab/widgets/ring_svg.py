"""The static picture of a ring run: a few steps side by side, as SVG made without a browser.

It must survive strict sanitizers (GitHub's), so it has no <style>, no ids, no clip paths: only shapes with attributes.
All shapes of a kind in a panel are one path, which keeps the picture small. The background is opaque and light, so it
reads the same in a dark theme.
"""

from __future__ import annotations

from collections import defaultdict
from html import escape

from shardlab.records import RingTrace
from shardlab.widgets.colours import DONE, STATES, WRONG, rank_look
from shardlab.widgets.ring_frames import Cell, Frame, frames_of

HEIGHT, GAP, SIGN = 13, 6, 17  # a cell's height, the space between cells, the width of the sign in a cell
LEFT, TOP, MARGIN, WIDEST = 28, 46, 14, 1120
PANELS = (8, 4, 3, 2)  # the most that keeps the picture small is taken
LARGEST = 38_000  # bytes
DETAILED_WORLD = 8  # beyond, a cell shows how much of the sum is there, not whose
INK, DIM, LINE, PAGE = "#111111", "#595959", "#767676", "#FFFFFF"
FONT = 'font-family="sans-serif"'


def ring_svg(trace: RingTrace, frames: list[Frame] | None = None) -> str:
    """SVG text, under 40 kB for every trace that can be drawn. UsageError as in `frames_of`."""
    frames = frames if frames is not None else frames_of(trace)
    for most in PANELS:
        picture = _picture(trace.title, frames, _chosen(len(frames), most))
        if len(picture.encode()) <= LARGEST:
            break
    return picture


def segment(world_size: int) -> int:
    """The width of one rank's share of a cell."""
    return 7 if world_size <= 5 else 5


def _chosen(steps: int, most: int) -> list[int]:
    """Which steps to draw: the first, the last, and others evenly between."""
    return sorted({round(i * (steps - 1) / (most - 1)) for i in range(most)})


def _picture(title: str, frames: list[Frame], chosen: list[int]) -> str:
    world_size, columns = len(frames[0].cells), len(frames[0].cells[0])
    cell_width = segment(world_size) * min(world_size, DETAILED_WORLD) + 3 + SIGN
    panel_width = max(LEFT + columns * (cell_width + GAP) + MARGIN, 150)
    panel_height = TOP + world_size * (HEIGHT + GAP) + MARGIN
    in_row = max(1, min(len(chosen), WIDEST // panel_width))
    lines = -(-len(chosen) // in_row)
    width, height = max(in_row * panel_width + MARGIN, 560), 28 + lines * panel_height + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(frames[-1].caption)}">',
        f'<rect width="{width}" height="{height}" fill="{PAGE}"/>',
        text(MARGIN, 20, title, 14, INK, weight="bold"),
    ]
    for place, number in enumerate(chosen):
        x, y = MARGIN + place % in_row * panel_width, 28 + place // in_row * panel_height
        parts += _panel(frames[number], number, x, y, cell_width)
    signs = "✓ complete, × added more than once, ? garbage, ! incomplete"
    legend = f"A block in rank r's colour: rank r's data is in the chunk. {signs}"
    parts += [text(MARGIN, height - 8, legend, 10, DIM), "</svg>"]
    return "".join(parts)


def _panel(frame: Frame, number: int, x: int, y: int, cell_width: int) -> list[str]:
    world_size = len(frame.cells)
    phase = frame.heading.partition(", ")[2]
    messages = f"{len(frame.arrows)} message{'s' if len(frame.arrows) != 1 else ''}" if number else ""
    sub = ", ".join(filter(None, [phase, messages]))
    parts = [text(x, y + 16, f"step {number}" if number else "before", 12, INK, weight="bold")]
    parts += [text(x, y + 30, sub, 10, DIM)] if sub else []
    paths: dict[tuple[str, str], list[str]] = defaultdict(list)  # (fill, stroke attributes) -> pieces of one path
    signs: list[str] = []
    for rank, row in enumerate(frame.cells):
        look = rank_look(rank)
        top = y + TOP + rank * (HEIGHT + GAP)
        parts.append(f'<rect x="{x}" y="{top}" width="18" height="{HEIGHT}" rx="3" fill="{look.fill}"/>')
        parts.append(text(x + 9, top + 9.5, str(rank), 10, look.text, anchor="middle"))
        for chunk, cell in enumerate(row):
            left = x + LEFT + chunk * (cell_width + GAP)
            if rank == 0:
                parts.append(text(left + cell_width / 2, top - 4, str(chunk), 9, DIM, anchor="middle"))
            draw_cell(cell, left, top, cell_width, world_size, paths, signs)
    parts += [f'<path d="{"".join(pieces)}" fill="{fill}"{stroke}/>' for (fill, stroke), pieces in paths.items()]
    if signs:
        spans = "".join(signs)
        parts.append(
            f'<text {FONT} font-size="10" fill="#FFFFFF" text-anchor="middle" font-weight="bold">{spans}</text>'
        )
    return parts


def draw_cell(
    cell: Cell,
    left: int,
    top: int,
    width: int,
    world_size: int,
    paths: dict[tuple[str, str], list[str]],
    signs: list[str],
) -> None:
    """Adds a cell to `paths`, by (fill, stroke attributes), and its sign, if it is written, to `signs`."""

    def box(at: int, wide: int, grow: int = 0) -> str:
        wide, high = (wide + 2 * grow, HEIGHT + 2 * grow) if grow > 0 else (wide, HEIGHT + 2 * grow)
        return f"M{at - max(grow, 0)} {top - grow}h{wide}v{high}h-{wide}z"

    counts = cell.counts or ()
    wide_share = segment(world_size)
    if world_size <= DETAILED_WORLD:
        for source, count in enumerate(counts):
            if count:
                paths[rank_look(source).fill, ""].append(box(left + 2 + source * wide_share, wide_share - 1, -1))
    elif any(counts):
        share = round((width - SIGN - 2) * sum(count > 0 for count in counts) / world_size)
        paths["#9CC3DE", ""].append(box(left + 2, share, -1))
    sign = left + width - SIGN  # the left edge of the sign
    if cell.changed:
        paths["none", _stroke(INK, 1.6)].append(box(left, width, 2))
    if cell.state == "complete":
        paths["none", _stroke(DONE, 1.6)].append(box(left, width))
        paths["none", _stroke(DONE, 2.4)].append(f"M{sign + 4} {top + 7}l3 3l6 -8")
    elif cell.state == "unfilled":
        paths["none", _stroke(LINE, 0.7)].append(_slashes(left, top, width) + box(left, width))
    elif cell.state == "partial":
        paths["none", _stroke(LINE, 0.7)].append(box(left, width))
    else:
        if cell.state != "missing":
            paths["none", _stroke(WRONG, 1.2)].append(_slashes(left, top, width - SIGN))
        paths["none", _stroke(WRONG, 1.8)].append(box(left, width))
        paths[WRONG, ""].append(f"M{sign} {top}h{SIGN}v{HEIGHT}h-{SIGN}z")
        mark = f"×{max(counts)}" if cell.state == "repeated" else STATES[cell.state].sign
        signs.append(f'<tspan x="{sign + SIGN // 2}" y="{top + 10}">{mark}</tspan>')


def _slashes(left: int, top: int, width: int) -> str:
    return "".join(f"M{left + i} {top + HEIGHT}l6 -{HEIGHT}" for i in range(0, width - 6, 8))


def _stroke(colour: str, width: float) -> str:
    return f' stroke="{colour}" stroke-width="{width}"'


def text(x: float, y: float, words: str, size: int, fill: str, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" {FONT} font-size="{size}" fill="{fill}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(words)}</text>'
    )
