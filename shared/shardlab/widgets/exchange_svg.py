"""The picture of a collective operation: who had whose data before, and who has it after.

SVG that survives strict sanitizers, drawn with the cells of `ring_svg`.
"""

from __future__ import annotations

from collections import defaultdict
from html import escape

from shardlab.errors import UsageError
from shardlab.exchange import NOTHING, Exchange, Rows, in_short
from shardlab.widgets.colours import rank_look, state_of
from shardlab.widgets.ring_frames import Cell
from shardlab.widgets.ring_svg import DETAILED_WORLD, DIM, GAP, HEIGHT, INK, PAGE, SIGN, draw_cell, segment, text

LEFT, TOP, MARGIN, ARROW = 54, 66, 14, 46
LARGEST_WORLD = 12
PROBLEMS_NAMED = 3
FAINT = "#D0D0D0"


class ExchangePicture:
    """What `show` gives for an Exchange: a picture in a notebook, a table of letters elsewhere."""

    def __init__(self, exchange: Exchange) -> None:
        """UsageError when the record cannot be drawn."""
        if not 1 <= exchange.world_size <= LARGEST_WORLD:
            raise UsageError(f"show: {exchange.world_size} ranks; the picture is readable for 1 to {LARGEST_WORLD}")
        sizes = {len(rows) for rows in (exchange.before, exchange.after, *exchange.before, *exchange.after)}
        if sizes != {exchange.world_size}:
            raise UsageError(f"show: expected {exchange.world_size} rows of as many pieces, got sizes {sorted(sizes)}")
        self.exchange = exchange

    def _repr_svg_(self) -> str:
        return exchange_svg(self.exchange)

    def __repr__(self) -> str:
        both = (self.exchange.before, self.exchange.after)
        sides = [[[in_short(cell) for cell in row] for row in rows] for rows in both]
        wide = max(len(cell) for rows in sides for row in rows for cell in row)
        lines = [self.exchange.title, "before".rjust(16).ljust(12 + (wide + 1) * self.exchange.world_size) + "after"]
        for rank, rows in enumerate(zip(*sides, strict=True)):
            before, after = (" ".join(cell.ljust(wide) for cell in row) for row in rows)
            lines.append(f"  rank {rank:<2} {before}  {after}".rstrip())
        return "\n".join([*lines, f"  {verdict(self.exchange)}"])


def verdict(exchange: Exchange) -> str:
    """In one line: whether every rank has what the operation promises it."""
    wrong = exchange.wrong
    if not wrong:
        return "as promised"
    named = [
        f"piece {piece} on rank {rank} is {in_short(exchange.after[rank][piece])}, "
        f"not {in_short(exchange.promised[rank][piece])}"
        for rank, piece in wrong[:PROBLEMS_NAMED]
    ]
    more = f"; and {len(wrong) - PROBLEMS_NAMED} more" if len(wrong) > PROBLEMS_NAMED else ""
    return f"wrong: {'; '.join(named)}{more}"


def exchange_svg(exchange: Exchange) -> str:
    """SVG text: before, an arrow, after. A red cell with a sign does not hold what the operation promises."""
    n = exchange.world_size
    cell_width = segment(n) * min(n, DETAILED_WORLD) + 3 + SIGN
    panel = LEFT + n * (cell_width + GAP)
    width, height = max(2 * panel + ARROW + 2 * MARGIN, 640), TOP + n * (HEIGHT + GAP) + (48 if exchange.wrong else 34)
    middle = TOP + n * (HEIGHT + GAP) / 2 - GAP / 2
    start = MARGIN + panel + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(f"{exchange.title}: {verdict(exchange)}")}">',
        f'<rect width="{width}" height="{height}" fill="{PAGE}"/>',
        text(MARGIN, 20, exchange.title, 14, INK, weight="bold"),
        *_panel("before", exchange, exchange.before, None, MARGIN, cell_width),
        f'<path d="M{start} {middle}h{ARROW - 22}m-6 -5l7 5l-7 5" fill="none" stroke="{INK}" stroke-width="2"/>',
        *_panel("after", exchange, exchange.after, exchange.promised, MARGIN + panel + ARROW, cell_width),
    ]
    legend = "A block in rank r's colour: rank r's data is in the piece. ✓ as promised, no sign: nothing is promised"
    if exchange.wrong:
        parts.append(text(MARGIN, height - 24, legend, 10, DIM))
        legend = "! not what is promised, × some rank's data more than once, ? something else"
    parts += [text(MARGIN, height - 10, legend, 10, DIM), "</svg>"]
    return "".join(parts)


def _panel(heading: str, exchange: Exchange, rows: Rows, promised: Rows | None, x: int, cell_width: int) -> list[str]:
    n = exchange.world_size
    parts = [text(x, 40, heading, 12, INK, weight="bold"), text(x + LEFT - 4, TOP - 16, "piece", 9, DIM, anchor="end")]
    paths: dict[tuple[str, str], list[str]] = defaultdict(list)
    signs: list[str] = []
    for rank, row in enumerate(rows):
        look, top = rank_look(rank), TOP + rank * (HEIGHT + GAP)
        parts.append(text(x, top + 10, "rank", 9, DIM))
        parts.append(f'<rect x="{x + 24}" y="{top}" width="18" height="{HEIGHT}" rx="3" fill="{look.fill}"/>')
        parts.append(text(x + 33, top + 9.5, str(rank), 10, look.text, anchor="middle"))
        for piece, counts in enumerate(row):
            left = x + LEFT + piece * (cell_width + GAP)
            if rank == 0:
                parts.append(text(left + cell_width / 2, TOP - 16, str(piece), 9, DIM, anchor="middle"))
            wanted = promised[rank][piece] if promised else NOTHING
            if counts == NOTHING and wanted == NOTHING:
                paths["none", f' stroke="{FAINT}" stroke-width="0.7"'].append(
                    f"M{left} {top}h{cell_width}v{HEIGHT}h-{cell_width}z"
                )
                continue
            cell = Cell(counts, _state(counts, wanted), False)
            draw_cell(cell, left, top, cell_width, n, paths, signs)
    parts += [f'<path d="{"".join(pieces)}" fill="{fill}"{stroke}/>' for (fill, stroke), pieces in paths.items()]
    if signs:
        parts.append(
            '<text font-family="sans-serif" font-size="10" fill="#FFFFFF" text-anchor="middle" font-weight="bold">'
            f"{''.join(signs)}</text>"
        )
    return parts


def _state(counts: tuple[int, ...] | None, wanted: tuple[int, ...] | None) -> str:
    """A name in colours.STATES, whose sign says whether the cell holds what was promised."""
    if wanted == NOTHING:  # nothing is promised, so nothing is judged
        return "unfilled" if counts is None else "partial"
    if counts == wanted:
        return "complete"
    state = state_of(counts).name
    return state if state == "repeated" or counts is None else "missing"
