"""A timeline as the widget receives it: short lists of whole microseconds, which keeps notebooks small."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardlab.intervals import Interval
from shardlab.theory import format_bytes, format_seconds
from shardlab.timeline import Communication, Compute, RankTimeline, Timeline
from shardlab.widgets.colours import SPANS
from shardlab.widgets.timeline_svg import alarming, summary, verdict


def timeline_data(timeline: Timeline) -> dict[str, Any]:
    """{"title", "summary", "end", "clock", "ranks", "kinds"}; times in microseconds from the timeline's zero."""
    return {
        "title": timeline.title,
        "summary": summary(timeline),
        "end": max(1, _micro(timeline.seconds)),
        "clock": timeline.clock,
        "ranks": [_rank(rank) for rank in timeline.ranks],
        "kinds": {look.name: {"sign": look.sign, "fill": look.fill} for look in SPANS.values()},
    }


def _rank(rank: RankTimeline) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "verdict": verdict(rank.hidden_share, rank.communication_seconds),
        "alarm": alarming(rank),
        "exposed": format_seconds(rank.exposed),
        "end": _micro(rank.ended),
        "compute": [_compute(item) for item in rank.compute],
        "waiting": _flat(rank.waiting),
        "link": [_communication(item) for item in rank.communication],
    }


def _compute(item: Compute) -> list[Any]:
    """[kind, layer, from, to, level, buckets]"""
    return [item.kind, item.label, _micro(item.began), _micro(item.ended), item.level, list(item.buckets)]


def _communication(item: Communication) -> list[Any]:
    """[operation, bytes as text, bucket, issued, from, to, exposed as from, to, from, to..., waits likewise]"""
    began, ended = (None if time is None else _micro(time) for time in (item.began, item.ended))
    name = item.op.replace("_", "-")
    exposed, waits = _flat(item.exposed), _flat(item.waits)
    return [name, format_bytes(item.bytes), item.bucket, _micro(item.issued), began, ended, exposed, waits]


def _flat(intervals: Iterable[Interval]) -> list[int]:
    return [_micro(time) for interval in intervals for time in interval]


def _micro(seconds: float) -> int:
    return round(1e6 * seconds)
