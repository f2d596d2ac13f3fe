"""What a timeline's static picture is made of: boxes, lines and texts, collected so that each kind is one element."""

from __future__ import annotations

import math
from collections import defaultdict
from html import escape

from shardlab.widgets.colours import WRONG, rank_look

INK, DIM, LINE, PAGE = "#111111", "#595959", "#767676", "#FFFFFF"
FONT = 'font-family="sans-serif"'
LETTER = 5.4  # the width of a letter of the labels, in pixels, on average
THINNEST = 0.4  # pixels: what is shorter is still seen


class Ink:
    """Collects shapes, and gives them out as one path or one text for each kind."""

    def __init__(self) -> None:
        self._boxes: dict[tuple[int, str, str], list[str]] = defaultdict(list)  # (level, fill, stroke) -> of a path
        self._lines: dict[str, list[str]] = defaultdict(list)
        self._texts: dict[str, list[str]] = defaultdict(list)
        self._cards: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, fill: str, stroke: str, level: int = 0) -> None:
        """level: what lies on what. Waits lie on all layers."""
        width = max(width, THINNEST)
        stroke = stroke if width > 2.5 else "none"
        if stroke == "none" and fill == PAGE:
            fill = LINE  # too thin for a frame
        self._boxes[level, fill, stroke].append(f"M{_n(x)} {_n(y)}h{_n(width)}v{_n(height)}h{_n(-width)}z")

    def line(self, x0: float, y0: float, x1: float, y1: float, kind: str = "grid") -> None:
        self._lines[kind].append(f"M{_n(x0)} {_n(y0)}L{_n(x1)} {_n(y1)}")

    def hatch(self, x: float, y: float, width: float, height: float) -> None:
        """Slanted lines, clipped by hand."""
        if width < 2:
            self.line(x + width / 2, y, x + width / 2, y + height, "thin")
            return
        offset = 3.0
        while offset < width + height:
            x0, y0 = max(0.0, offset - height), min(offset, height)
            x1, y1 = min(offset, width), max(0.0, offset - width)
            self._lines["hatch"].append(f"M{_n(x + x0)} {_n(y + y0)}l{_n(x1 - x0)} {_n(y1 - y0)}")
            offset += 6

    def dots(self, x: float, y: float, width: float, height: float) -> None:
        for row in (0.3, 0.7):
            if width > 4:
                self.line(x + 2, y + row * height, x + width - 1, y + row * height, "dots")

    def text(self, text: str, x: float, y: float, kind: str) -> None:
        self._texts[kind].append(f'<tspan x="{_n(x)}" y="{_n(y)}">{escape(text)}</tspan>')

    def tag(self, text: str, x: float, y: float, colour: str) -> None:
        """Text on a pattern: in a white box of its own."""
        width = len(text) * LETTER + 3
        self._cards.append(f"M{_n(x - width / 2)} {_n(y - 5)}h{_n(width)}v10h{_n(-width)}z")
        self.text(text, x, y + 3.5, f"tag {colour}")

    def parts(self) -> list[str]:
        lines = {
            "grid": f'stroke="{LINE}" stroke-width=".5" stroke-dasharray="2 3"',
            "hatch": f'stroke="{WRONG}" stroke-width="1"',
            "thin": f'stroke="{WRONG}" stroke-width=".6"',
            "dots": f'stroke="{LINE}" stroke-width="1.5" stroke-dasharray="1.5 3"',
        }
        texts = {
            "axis": (9, DIM, "middle"),
            "label": (10, INK, "start"),
            "legend": (10, DIM, "start"),
        }
        found = [f'<path d="{"".join(self._lines.pop("grid", []))}" {lines["grid"]}/>']
        for (_, fill, stroke), pieces in sorted(self._boxes.items(), key=lambda box: box[0][0]):
            edge = "" if stroke == "none" else f' stroke="{stroke}" stroke-width=".7"'
            found.append(f'<path d="{"".join(pieces)}" fill="{fill}"{edge}/>')
        found += [f'<path d="{"".join(pieces)}" fill="none" {lines[kind]}/>' for kind, pieces in self._lines.items()]
        found.append(f'<path d="{"".join(self._cards)}" fill="{PAGE}"/>')
        for kind, spans in self._texts.items():
            if kind.startswith("tag"):
                size, colour, anchor = 10, kind.removeprefix("tag "), "middle"
            elif kind.startswith("on"):
                size, colour, anchor = 10, rank_look(int(kind.removeprefix("on "))).text, "middle"
            else:
                size, colour, anchor = texts[kind]
            found.append(
                f'<text {FONT} font-size="{size}" fill="{colour}" text-anchor="{anchor}">{"".join(spans)}</text>'
            )
        return found


def ticks(seconds: float, most: int = 10) -> list[float]:
    """Round times from 0 to `seconds`, at most `most` + 1 of them."""
    if seconds <= 0:
        return [0.0]
    rough = seconds / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [number * step for number in range(int(seconds / step + 1e-9) + 1)]


def tick_text(seconds: float) -> str:
    return f"{seconds:.4g} s" if seconds >= 1 else f"{1e3 * seconds:.4g} ms"


def _n(number: float) -> str:
    """A number with one decimal at most, as short as it can be written."""
    text = f"{number:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def text_at(
    x: float, y: float, text: str, size: float, colour: str, anchor: str = "start", weight: str = "normal"
) -> str:
    return (
        f'<text {FONT} x="{_n(x)}" y="{_n(y)}" font-size="{size:g}" fill="{colour}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )
