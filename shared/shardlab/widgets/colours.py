"""One colour per rank and one sign per kind of state, the same in every picture of the course.

The colours are Okabe and Ito's (2008, "Color Universal Design"), which people with any of the common colour vision
deficiencies can tell apart; grey stands in for their black, which would vanish on a dark page. No picture relies on
colour alone: a rank's number is always written beside or on its colour, and from the ninth rank on a pattern is added.
"""

from __future__ import annotations

from dataclasses import dataclass

FILLS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442", "#D55E00", "#8C8C8C")
PATTERNS = ("solid", "striped", "dotted", "crossed")
HATCHES = {"solid": "", "striped": "//", "dotted": "..", "crossed": "xx"}  # what matplotlib calls the patterns

DARK, LIGHT = "#000000", "#FFFFFF"
WRONG = "#C4003F"  # always together with a hatch and a sign
DONE = "#00734F"


@dataclass(frozen=True)
class RankLook:
    """How a rank is drawn: fill colour, the text colour that is readable on it, and a pattern."""

    rank: int
    fill: str
    text: str
    pattern: str

    @property
    def hatch(self) -> str:
        return HATCHES[self.pattern]


@dataclass(frozen=True)
class State:
    """A kind of state a piece of data can be in: its sign and what the sign means, in words."""

    name: str
    sign: str
    meaning: str


STATES = {
    state.name: state
    for state in (
        State("partial", "", "the sum of some ranks' data, each once"),
        State("complete", "✓", "the sum of all ranks' data, each once"),
        State("unfilled", "", "what was there before anything was sent, none of the ranks' data"),
        State("missing", "!", "the run has ended, and this should be complete"),
        State("repeated", "×", "some rank's data was added more than once"),
        State("garbage", "?", "none of the ranks' data, or no sum of them"),
    )
}


def rank_look(rank: int) -> RankLook:
    """The look of a rank. Ranks 0..7 differ in colour; 8..15 repeat the colours with stripes, and so on."""
    fill = FILLS[rank % len(FILLS)]
    pattern = PATTERNS[rank // len(FILLS) % len(PATTERNS)]
    return RankLook(rank, fill, text_on(fill), pattern)


def text_on(fill: str) -> str:
    """Black or white, whichever is easier to read on `fill`."""
    return max(DARK, LIGHT, key=lambda text: contrast(text, fill))


def contrast(first: str, second: str) -> float:
    """Contrast ratio of two colours, 1 to 21 (WCAG 2.2, "contrast ratio"). Text needs at least 4.5."""
    darker, lighter = sorted((luminance(first), luminance(second)))
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    """Relative luminance of "#RRGGBB", 0 to 1 (WCAG 2.2, "relative luminance")."""
    red, green, blue = (_linear(int(colour[start : start + 2], 16) / 255) for start in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4


def state_of(counts: tuple[int, ...] | None) -> State:
    """The state of a chunk, from how many times each rank's data is in it (see `records.RingStep.held`)."""
    if counts is None or not any(counts):
        return STATES["garbage"]
    if any(count not in (0, 1) for count in counts):
        return STATES["repeated"]
    return STATES["complete" if all(counts) else "partial"]


@dataclass(frozen=True)
class KindLook:
    """How a kind of model state is drawn: ranks have the colours, so kinds have a grey, a pattern and a sign."""

    name: str
    sign: str
    fill: str
    hatch: str

    @property
    def text(self) -> str:
        return text_on(self.fill)


KINDS = {
    kind.name: kind
    for kind in (
        KindLook("weights", "W", "#F2F2F2", ""),
        KindLook("gradients", "G", "#C9C9C9", "//"),
        KindLook("master weights", "M", "#9B9B9B", "xx"),
        KindLook("first moment", "m", "#6E6E6E", ".."),
        KindLook("second moment", "v", "#444444", "--"),
        KindLook("optimizer", "O", "#7F7F7F", ".."),  # where the three above are told as one
        KindLook("other", "?", "#FFFFFF", "++"),
    )
}


SPANS = {
    look.name: look
    for look in (
        KindLook("forward", "F", "#F2F2F2", ""),
        KindLook("backward", "B", "#BDBDBD", ""),
        KindLook("recompute", "R", "#DADADA", ""),  # a forward repeated during backward
        KindLook("other", "O", "#FFFFFF", ""),
        KindLook("waiting", "w", "#FFFFFF", ".."),
        KindLook("exposed", "!", "#FFFFFF", "//"),  # what is hidden has the rank's colour
    )
}
