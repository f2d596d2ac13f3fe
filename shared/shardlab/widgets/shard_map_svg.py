"""The static picture of a shard map: three moments of the step beside each other, a row per rank and kind of state.

It must survive strict sanitizers (GitHub's), so it has no <style>, no ids, no clip paths: only shapes with attributes.
The background is opaque and light, so it reads the same in a dark theme.
"""

from __future__ import annotations

from collections import defaultdict
from html import escape

from shardlab.errors import UsageError
from shardlab.shard_map import MapFrame, Ranges, ShardMap
from shardlab.theory import format_bytes
from shardlab.widgets.colours import WRONG, rank_look
from shardlab.widgets.shard_words import LOOKS, complaints, heading, percent, summary, too_much
from shardlab.widgets.timeline_ink import DIM, FONT, INK, LINE, PAGE

WIDTH, LEFT, TOP, MARGIN = 940, 62, 78, 14
NUMBERS = 44  # right of a row: how much of the state is held
ROW, BETWEEN, BAR, GAP = 9, 2, 9, 13  # heights: of a row, the space after it, the bar, the space between ranks
NEUTRAL = "#BDBDBD"  # held, and nobody's own
LARGEST_WORLD = 16
PARTS = (("parameters", "weights"), ("gradients", "gradients"), ("optimizer", "master"))  # of the bar, and their look


def shard_map_svg(shards: ShardMap) -> str:
    """SVG text. UsageError for more than 16 ranks."""
    if shards.world_size > LARGEST_WORLD:
        raise UsageError(
            f"show: a map of {shards.world_size} ranks; the picture is readable for 1 to {LARGEST_WORLD}. "
            "Run the same step on fewer ranks: the pattern is the same."
        )
    numbers = moments(shards)
    block = len(shards.kinds) * (ROW + BETWEEN) + BAR + GAP
    height = TOP + shards.world_size * block + 30
    wrong = complaints(shards)
    said = f"{summary(shards)}. " + "; ".join(wrong)
    ink = _Ink()
    ink.text(MARGIN, 20, shards.title, 14, INK, weight="bold")
    ink.text(MARGIN, 36, summary(shards), 11.5, INK)
    if wrong:
        ink.text(MARGIN, 51, "! " + "; ".join(wrong)[:150], 11.5, WRONG, weight="bold")
    width = (WIDTH - LEFT - MARGIN) / len(numbers)
    for place, number in enumerate(numbers):
        _Panel(ink, shards, number, LEFT + place * width, width - NUMBERS).draw()
    for rank in range(shards.world_size):
        _head(ink, shards, rank, TOP + rank * block)
    _legend(ink, shards, height - 10)
    return "".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" role="img" aria-label="{escape(f"{shards.title}: {said}")}">',
            f'<rect width="{WIDTH}" height="{height}" fill="{PAGE}"/>',
            *ink.parts(),
            "</svg>",
        ]
    )


def moments(shards: ShardMap) -> list[int]:
    """Three telling frames: in the middle of forward, in backward when most is in flight, and after the step.

    For more than 8 ranks the forward is left out, which keeps the picture small.
    """
    frames = shards.frames
    last = len(frames) - 1
    forward = [n for n, frame in enumerate(frames) if frame.kind == "forward" and not frame.ends]
    first = next((n for n, frame in enumerate(frames) if frame.kind == "backward"), last)
    gradients = [n for n, frame in enumerate(frames) if frame.kind == "gradient"]
    backward = range(first, gradients[-1] + 1) if gradients else range(first, last)
    middle = (backward.start + backward.stop) / 2
    chosen = {last}
    if forward and shards.world_size <= 8:
        chosen.add(forward[(len(forward) - 1) // 2])
    if len(backward):
        chosen.add(max(backward, key=lambda n: (_in_flight(frames[n]), -abs(n - middle))))
    return sorted(chosen)


def _in_flight(frame: MapFrame) -> int:
    return sum(b - a for rank in frame.ranks for ranges in rank.flying.values() for a, b in ranges)


class _Panel:
    """One frame, drawn at x, `width` pixels for all parameters."""

    def __init__(self, ink: _Ink, shards: ShardMap, number: int, x: float, width: float) -> None:
        self.ink, self.shards, self.number, self.x, self.width = ink, shards, number, x, width
        self.scale = width / (shards.psi or 1)
        self.frame = shards.frames[number]
        self.over = number == len(shards.frames) - 1  # the step is over: what is left is wrong

    def draw(self) -> None:
        ink, shards = self.ink, self.shards
        words = heading(self.frame)
        ink.text(self.x, TOP - 8, words if len(words) < 48 else words[:46] + "…", 10.5, INK, weight="bold")
        y = float(TOP)
        for rank in range(shards.world_size):
            for kind in shards.kinds:
                self._row(rank, kind, y)
                y += ROW + BETWEEN
            self._bar(rank, y)
            y += BAR + GAP

    def _row(self, rank: int, kind: str, y: float) -> None:
        ink, holding = self.ink, self.frame.ranks[rank]
        held = holding.held.get(kind, ())
        ink.box(self.x, y, self.width, ROW, "none", LINE, 0.4)
        for start, stop, owner in owned(self.shards, held):
            left, width = self.x + start * self.scale, (stop - start) * self.scale
            ink.box(left, y, max(width, 0.4), ROW, NEUTRAL if owner is None else rank_look(owner).fill)
            if owner is not None and owner >= 8 and width > 2:
                ink.line(left, y + ROW / 2, left + width, y + ROW / 2, rank_look(owner).text)
            if owner is not None and width >= 5.5 * len(str(owner)) + 1.5:
                ink.digit(left + width / 2, y + ROW - 1.8, str(owner), rank_look(owner).text)
        for start, stop in holding.flying.get(kind, ()):
            ink.hatch(self.x + start * self.scale, y, (stop - start) * self.scale, ROW, INK)
        left_over = self.shards.left_over(rank).get(kind, ()) if self.over else ()
        for start, stop in left_over:
            ink.box(self.x + start * self.scale, y, max(1.0, (stop - start) * self.scale), ROW, "none", WRONG, 1.4)
        share = f"{percent(self.shards.share(self.number, rank, kind))} %"
        colour = WRONG if left_over else DIM
        ink.text(self.x + self.width + 3, y + ROW - 1, f"{share} !" if left_over else share, 9, colour)

    def _bar(self, rank: int, y: float) -> None:
        """Live bytes of model states, by kind, and the line of the formula."""
        ink, shards, memory = self.ink, self.shards, self.frame.ranks[rank].memory
        scale = 0.98 * self.width / byte_scale(shards)
        at = self.x
        for name, look in PARTS:
            width = getattr(memory, name) * scale
            ink.box(at, y + 1, width, BAR - 2, LOOKS[look].fill, INK, 0.5)
            at += width
        line = self.x + shards.formula * scale
        wrong = self.over and too_much(shards, rank)
        if at > line + 0.75:
            ink.box(line, y + 1, at - line, BAR - 2, "none", WRONG if wrong else INK, 1.4)
        if wrong:
            ink.hatch(line, y + 1, at - line, BAR - 2, WRONG)
        ink.box(line - 0.75, y - 1, 1.5, BAR + 2, INK)
        held = format_bytes(self.frame.ranks[rank].state_bytes)
        colour = WRONG if wrong else INK
        ink.text(self.x + self.width + 3, y + BAR - 1, f"{held} !" if wrong else held, 9, colour)


def owned(shards: ShardMap, ranges: Ranges) -> list[tuple[int, int, int | None]]:
    """The ranges, cut where the owner changes: (start, stop, owner)."""
    pieces = []
    for start, stop in ranges:
        for first, last, owner in shards.owners:
            if first < stop and start < last:
                pieces.append((max(start, first), min(stop, last), owner))
    return pieces


def byte_scale(shards: ShardMap) -> float:
    """The bytes that a bar's full width stands for."""
    return max(shards.formula, *(shards.most(rank) for rank in range(shards.world_size)), 1.0)


def _head(ink: _Ink, shards: ShardMap, rank: int, y: float) -> None:
    look = rank_look(rank)
    ink.box(MARGIN, y, 20, 15, look.fill, INK, 0.5)
    ink.text(MARGIN + 10, y + 11.5, str(rank), 11, look.text, "middle", "bold")
    for number, kind in enumerate(shards.kinds):
        ink.text(LEFT - 7, y + number * (ROW + BETWEEN) + ROW - 1, LOOKS[kind].sign, 9.5, INK, "end")
    ink.text(LEFT - 7, y + len(shards.kinds) * (ROW + BETWEEN) + BAR - 1, "bytes", 9, DIM, "end")


def _legend(ink: _Ink, shards: ShardMap, y: float) -> None:
    kinds = ", ".join(f"{LOOKS[kind].sign} {LOOKS[kind].name}" for kind in shards.kinds)
    across = f"Across: all {shards.psi:,} parameters. {kinds}. Colour and number: who owns it."
    ink.text(MARGIN, y - 12, across, 10, DIM)
    x = float(MARGIN)
    for words in ("nobody's own", "in flight", "left over", "bytes: weights", "gradients", "optimizer", "formula"):
        fill = {"nobody's own": NEUTRAL, "bytes: weights": LOOKS["weights"].fill, "gradients": LOOKS["gradients"].fill}
        fill["optimizer"] = LOOKS["master"].fill
        if words == "formula":
            ink.box(x + 9, y - 10, 1.5, 12, INK)
        else:
            wrong = words == "left over"
            ink.box(x, y - 9, 20, 9, fill.get(words, PAGE), WRONG if wrong else LINE, 1.4 if wrong else 0.5)
        if words == "in flight":
            ink.hatch(x, y - 9, 20, 9, INK)
        ink.text(x + 25, y - 1, words, 10, DIM)
        x += 25 + 5.4 * len(words) + 14


class _Ink:
    """Collects shapes; those that look alike become one path."""

    def __init__(self) -> None:
        self._paths: dict[tuple[int, str, str, float], list[str]] = defaultdict(list)
        self._digits: dict[tuple[str, float], list[tuple[float, str]]] = defaultdict(list)
        self._texts: dict[tuple[float, str, str, str], list[str]] = defaultdict(list)

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "none", line: float = 0
    ) -> None:
        level = 2 if fill == "none" and stroke in (WRONG, INK) else 0
        shape = f"M{_n(x)} {_n(y)}h{_n(width)}v{_n(height)}h{_n(-width)}z"
        self._paths[level, fill, stroke, line].append(shape)

    def line(self, x0: float, y0: float, x1: float, y1: float, stroke: str) -> None:
        self._paths[1, "none", stroke, 0.8].append(f"M{_n(x0)} {_n(y0)}L{_n(x1)} {_n(y1)}")

    def hatch(self, x: float, y: float, width: float, height: float, stroke: str) -> None:
        """Slanted lines from bottom to top, as many as fit: each begins where the pen is after the one before."""
        slant = min(width, height)
        count = int((width - slant) / 5) + 1
        step = f"m{_n(5 - slant)} {_n(height)}"
        shape = f"l{_n(slant)} {_n(-height)}"
        self._paths[1, "none", stroke, 0.8].append(f"M{_n(x)} {_n(y + height)}{step.join([shape] * count)}")

    def digit(self, x: float, y: float, text: str, fill: str) -> None:
        self._digits[fill, y].append((x, text))

    def text(
        self, x: float, y: float, text: str, size: float, fill: str, anchor: str = "start", weight: str = "normal"
    ) -> None:
        self._texts[size, fill, anchor, weight].append(f'<tspan x="{_n(x)}" y="{_n(y)}">{escape(text)}</tspan>')

    def parts(self) -> list[str]:
        found = []
        for (_, fill, stroke, line), pieces in sorted(self._paths.items(), key=lambda path: path[0][0]):
            edge = "" if stroke == "none" else f' stroke="{stroke}" stroke-width="{line:g}"'
            found.append(f'<path d="{"".join(pieces)}" fill="{fill}"{edge}/>')
        for (fill, y), digits in self._digits.items():
            self._texts[7.5, fill, "middle", "normal"] += _spans(digits, y)
        for (size, fill, anchor, weight), spans in self._texts.items():
            look = f'font-size="{size:g}" fill="{fill}" text-anchor="{anchor}" font-weight="{weight}"'
            found.append(f"<text {FONT} {look}>{''.join(spans)}</text>")
        return found


def _n(number: float) -> str:
    """A number with one decimal at most, as short as it can be written."""
    text = f"{number:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def _spans(digits: list[tuple[float, str]], y: float) -> list[str]:
    """Single digits of a row share an element: each character has an x of its own."""
    single = [(x, text) for x, text in digits if len(text) == 1]
    spans = [f'<tspan x="{_n(x)}" y="{_n(y)}">{text}</tspan>' for x, text in digits if len(text) > 1]
    if single:
        places = " ".join(_n(x) for x, _ in single)
        spans.append(f'<tspan x="{places}" y="{_n(y)}">{"".join(text for _, text in single)}</tspan>')
    return spans
