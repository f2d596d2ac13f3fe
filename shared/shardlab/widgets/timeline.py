"""A timeline to look into: a live widget in JupyterLab, a page of its own in exported HTML, a picture elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

from shardlab.errors import UsageError
from shardlab.theory import format_seconds
from shardlab.timeline import Timeline
from shardlab.widgets.timeline_svg import chosen, comparison_svg, summary, timeline_svg, verdict


class TimelineView:
    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline

    def __repr__(self) -> str:
        return f"{self.timeline.title}: {len(self.timeline.ranks)} ranks, {summary(self.timeline)}"

    def _repr_svg_(self) -> str:
        return timeline_svg(self.timeline)


class Comparison:
    """What `compare` returns: a picture, and a line of text for each timeline."""

    def __init__(self, timelines: Mapping[str, Timeline], rank: int | None) -> None:
        self.timelines, self.rank = dict(timelines), rank
        self._picture = comparison_svg(self.timelines, rank)

    def __repr__(self) -> str:
        rows = [(name, chosen(timeline, self.rank)) for name, timeline in self.timelines.items()]
        return "\n".join(
            f"{name}: {verdict(row.hidden_share, row.communication_seconds)}, "
            f"exposed {format_seconds(row.exposed)}, step {format_seconds(row.ended)}"
            for name, row in rows
        )

    def _repr_svg_(self) -> str:
        return self._picture


def compare(timelines: Mapping[str, Timeline], *, rank: int | None = None) -> Comparison:
    """Several timelines under each other, on one scale: {"blocking": timeline, "in buckets": timeline}.

    rank: which rank of each; None: the slowest (`Timeline.slowest`). UsageError without timelines, or when one of them has no
    such rank.
    """
    wrong = [name for name, timeline in timelines.items() if not isinstance(timeline, Timeline)]
    if not timelines or wrong:
        what = f"{wrong[0]!r} is no Timeline" if wrong else "there is no timeline"
        raise UsageError(f'compare: {what}. Give it {{"a name": timeline_of(run), ...}}')
    return Comparison(timelines, rank)
