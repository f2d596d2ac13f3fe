"""A chart as an SVG, the same to the byte each time: for the pictures that README and the labs' folder show."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure

# Letters stay letters, ids depend on the drawing alone, and no date is written.
_SETTINGS: Any = {"svg.fonttype": "none", "svg.hashsalt": "shardlab", "font.family": "sans-serif"}


@dataclass(frozen=True)
class SvgPicture:
    """What a cell shows: the drawing; pixels where a drawing is not trusted; `text` where no picture can be shown."""

    svg: str
    png: str  # base64
    text: str

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        return {"image/svg+xml": self.svg, "image/png": self.png, "text/plain": self.text}


def as_svg(figure: Figure, text: str) -> SvgPicture:
    """A chart made by this package's functions, drawn once. text: what it shows, in a sentence."""
    file, pixels = io.StringIO(), io.BytesIO()
    with matplotlib.rc_context(_SETTINGS):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Title": text})
        figure.savefig(pixels, format="png", metadata={"Software": None})
    drawing = file.getvalue()
    return SvgPicture(drawing[drawing.index("<svg") :], base64.b64encode(pixels.getvalue()).decode(), text)
