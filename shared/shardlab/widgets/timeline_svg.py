"""The static picture of a timeline: two lanes per rank on one axis; and of several timelines under each other.

It must survive strict sanitizers (GitHub's), so it has no <style>, no ids, no clip paths: only shapes with attributes.
All shapes of a kind are one path, which keeps the picture small. The background is opaque and light, so it reads the
same in a dark theme.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import takewhile

from shardlab.errors import UsageError
from shardlab.intervals import Interval, difference, union
from shardlab.theory import format_seconds
from shardlab.timeline import Communication, Compute, RankTimeline, Timeline
from shardlab.widgets.colours import SPANS, WRONG, rank_look
from shardlab.widgets.timeline_ink import DIM, INK, LETTER, LINE, PAGE, Ink, text_at, tick_text, ticks

WIDTH, LEFT, RIGHT, TOP = 1120, 148, 58, 48
SHOWN = 940  # pixels of its width on a page; a notebook has about 960
LANE, BETWEEN, GAP = 24, 3, 15  # a lane's height, the space between two lanes, and between two ranks
BARELY = 0.05  # below this share, what was meant to be hidden is not
WAIT = 11  # of a compute lane's height, at its bottom
LEGEND = (
    ("forward", "F forward"),
    ("backward", "B backward"),
    ("recompute", "R forward repeated in backward"),
    ("other", "O other"),
    ("waiting", "waits"),
    ("hidden", "communication, hidden"),
    ("exposed", "communication, exposed"),
)


def timeline_svg(timeline: Timeline) -> str:
    """SVG text. UsageError when there are no ranks."""
    if not timeline.ranks:
        raise UsageError("show: this timeline has no ranks, so there is nothing to draw.")
    rows = [(f"rank {rank.rank}", rank) for rank in timeline.ranks]
    return _picture(timeline.title, summary(timeline), rows, timeline.seconds)


def comparison_svg(timelines: Mapping[str, Timeline], rank: int | None = None) -> str:
    """One rank of each timeline under each other, on one scale. rank=None: the slowest, which the others wait for."""
    rows = [(name, chosen(timeline, rank)) for name, timeline in timelines.items()]
    which = "the slowest rank, which the others wait for" if rank is None else f"rank {rank}"
    seconds = max(row.ended for _, row in rows)
    return _picture("The same step, on one scale", f"of each, {which}", rows, seconds)


def chosen(timeline: Timeline, rank: int | None) -> RankTimeline:
    """The rank that is compared."""
    if not timeline.ranks or (rank is not None and not 0 <= rank < len(timeline.ranks)):
        raise UsageError(f"compare: no rank {rank or 0} in a timeline of {len(timeline.ranks)} ranks")
    return timeline.slowest if rank is None else timeline.ranks[rank]


def summary(timeline: Timeline) -> str:
    """How much was hidden, in one line."""
    seconds = sum(rank.communication_seconds for rank in timeline.ranks)
    text = verdict(timeline.hidden_share, seconds)
    if timeline.exposed:
        text += f"; exposed: {format_seconds(timeline.exposed)}" + " on the worst rank" * (len(timeline.ranks) > 1)
    if timeline.clock == "calls" and seconds:
        text += "; no link: communication is drawn from issue to completion"
    return text


def verdict(hidden_share: float, seconds: float) -> str:
    """ "hidden 63 %", or that there was nothing to hide. Only all is 100 %, and only none is 0 %."""
    if not seconds:
        return "nothing sent"
    percent = round(100 * hidden_share)
    if 0 < hidden_share < 1:
        percent = min(max(percent, 1), 99)
    return f"hidden {percent} %"


def alarming(rank: RankTimeline) -> bool:
    """Whether there was communication, and next to nothing of it was hidden."""
    return rank.communication_seconds > 0 and rank.hidden_share < BARELY


def _picture(title: str, subtitle: str, rows: list[tuple[str, RankTimeline]], seconds: float) -> str:
    row_height = 2 * LANE + BETWEEN + GAP
    bottom = TOP + len(rows) * row_height
    height = bottom + 46
    scale = (WIDTH - LEFT - RIGHT) / (seconds or 1.0)
    ink = Ink()
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{SHOWN}" height="{round(height * SHOWN / WIDTH)}" '
        f'role="img" aria-label="{escape(f"{title}: {subtitle}")}">',
        f'<rect width="{WIDTH}" height="{height}" fill="{PAGE}"/>',
        text_at(14, 20, title, 14, INK, weight="bold"),
        text_at(14, 36, subtitle, 12, INK),
    ]
    for time in ticks(seconds):
        x = LEFT + time * scale
        ink.line(x, TOP - 4, x, bottom - GAP + 6)
        ink.text(tick_text(time), x, bottom + 4, "axis")
    for number, (name, rank) in enumerate(rows):
        y = TOP + number * row_height
        parts += _row_head(name, rank, y)
        for index, item in enumerate(rank.compute):
            _draw_compute(ink, item, _free_part(rank.compute, index), y, scale)
        for start, end in _joined(rank.waiting, 1 / scale):
            _draw_wait(ink, start, end, y, scale)
        for message in rank.communication:
            _draw_communication(ink, rank.rank, message, y + LANE + BETWEEN, scale)
        ink.text(format_seconds(rank.ended), LEFT + rank.ended * scale + 4, y + LANE + BETWEEN / 2 + 3.5, "legend")
    kinds = {item.kind for _, rank in rows for item in rank.compute}
    _legend(ink, height - 12, kinds, rows[0][1].rank)
    return "".join([*parts, *ink.parts(), "</svg>"])


def _row_head(name: str, rank: RankTimeline, y: float) -> list[str]:
    look = rank_look(rank.rank)
    words = verdict(rank.hidden_share, rank.communication_seconds)
    parts = []
    if name == f"rank {rank.rank}":
        parts.append(f'<rect x="14" y="{y + 1}" width="58" height="18" rx="9" fill="{look.fill}" stroke="{INK}"/>')
        parts.append(text_at(43, y + 14, name, 11, look.text, "middle", "bold"))
    else:
        parts.append(text_at(14, y + 14, name if len(name) < 15 else name[:13] + "…", 12, INK, weight="bold"))
    parts.append(text_at(14, y + LANE + BETWEEN + 14, words, 11, WRONG if alarming(rank) else INK, weight="bold"))
    parts.append(text_at(LEFT - 6, y + 14, "compute", 9, DIM, "end"))
    parts.append(text_at(LEFT - 6, y + LANE + BETWEEN + 14, "link", 9, DIM, "end"))
    return parts


def _free_part(compute: Sequence[Compute], index: int) -> Interval:
    """The longest part of a span in which no other lies within it: there its label is readable."""
    item = compute[index]
    inner = takewhile(lambda other: other.began < item.ended and other.level > item.level, compute[index + 1 :])
    free = difference([(item.began, item.ended)], ((other.began, other.ended) for other in inner))
    return max(free, key=lambda part: part[1] - part[0], default=(item.began, item.began))


def _draw_compute(ink: Ink, item: Compute, free: Interval, y: float, scale: float) -> None:
    inset = min(item.level, 2) * 5
    x, width = LEFT + item.began * scale, (item.ended - item.began) * scale
    ink.box(x, y + inset, width, LANE - inset, SPANS[item.kind].fill, INK, item.level)
    left, room = LEFT + free[0] * scale, (free[1] - free[0]) * scale
    label = f"{SPANS[item.kind].sign} {item.label}"
    buckets = f" →{','.join(map(str, item.buckets))}" if item.buckets else ""
    for text in (label + buckets, label, SPANS[item.kind].sign + buckets, SPANS[item.kind].sign):
        if len(text) * LETTER + 4 <= room:
            ink.text(text, left + 3, y + inset + 10, "label")
            break


def _draw_wait(ink: Ink, start: float, end: float, y: float, scale: float) -> None:
    x, width = LEFT + start * scale, (end - start) * scale
    ink.box(x, y + LANE - WAIT, width, WAIT, SPANS["waiting"].fill, LINE, 9)
    ink.dots(x, y + LANE - WAIT, width, WAIT)
    if width > 34:
        ink.tag("waits", x + width / 2, y + LANE - WAIT / 2, DIM)


def _joined(intervals: Iterable[Interval], gap: float) -> list[Interval]:
    """Those with less than `gap` between them are drawn as one."""
    return [(start, end - gap) for start, end in union((start, end + gap) for start, end in intervals)]


def _draw_communication(ink: Ink, rank: int, item: Communication, y: float, scale: float) -> None:
    if item.began is None or item.ended is None:
        return
    exposed = _pixels(item.exposed, scale)
    hidden = _pixels(difference([(item.began, item.ended)], item.exposed), scale)
    for x, width in hidden:
        ink.box(x, y, width, LANE, rank_look(rank).fill, INK)
    for x, width in exposed:
        ink.box(x, y, width, LANE, SPANS["exposed"].fill, WRONG)
        ink.hatch(x, y, width, LANE)
    name = item.op.replace("_", "-") if item.bucket is None else str(item.bucket)
    x, width = max(hidden, key=lambda piece: piece[1], default=(0.0, 0.0))
    if len(name) * LETTER + 4 <= width:
        ink.text(name, x + width / 2, y + LANE / 2 + 3.5, f"on {rank}")
        name = ""
    x, width = max(exposed, key=lambda piece: piece[1], default=(0.0, 0.0))
    for text in (f"{name} exposed".strip(), name):
        if text and len(text) * LETTER + 6 <= width:
            ink.tag(text, x + width / 2, y + LANE / 2, WRONG)
            break


def _pixels(intervals: Iterable[Interval], scale: float) -> list[tuple[float, float]]:
    """(left, width) of each."""
    return [(LEFT + start * scale, (end - start) * scale) for start, end in union(intervals)]


def _legend(ink: Ink, y: float, kinds: set[str], rank: int) -> None:
    x = 14.0
    for kind, words in LEGEND:
        if kind in ("recompute", "other") and kind not in kinds:
            continue
        fill = rank_look(rank).fill if kind == "hidden" else SPANS[kind].fill
        ink.box(x, y - 10, 20, 12, fill, WRONG if kind == "exposed" else INK)
        if kind == "exposed":
            ink.hatch(x, y - 10, 20, 12)
        if kind == "waiting":
            ink.dots(x, y - 10, 20, 12)
        ink.text(words, x + 25, y, "legend")
        x += 25 + len(words) * LETTER + 14
    ink.text(
        "A number on the link: the reduction's bucket; → on a layer: the buckets of its gradients.", x, y, "legend"
    )
