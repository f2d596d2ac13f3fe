"""A timeline to look into: a live widget in JupyterLab, a page of its own in exported HTML, a picture elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from shardlab.errors import UsageError
from shardlab.theory import format_seconds
from shardlab.timeline import Timeline
from shardlab.widgets.colours import rank_look
from shardlab.widgets.saved import live_html
from shardlab.widgets.timeline_data import timeline_data
from shardlab.widgets.timeline_svg import chosen, comparison_svg, summary, timeline_svg, verdict

HERE = Path(__file__).parent
SCRIPT = "\n".join((HERE / name).read_text(encoding="utf-8") for name in ("timeline_drawing.js", "timeline.js"))


class TimelineView(anywidget.AnyWidget):
    """Zooms into a Timeline, moves along it, and says what each span is. Each view has its own zoom."""

    _esm = SCRIPT
    data: traitlets.Dict[str, Any] = traitlets.Dict().tag(sync=True)
    looks: traitlets.List[Any] = traitlets.List().tag(sync=True)

    def __init__(self, timeline: Timeline) -> None:
        """UsageError when the timeline has no ranks."""
        self.timeline = timeline
        self._picture = timeline_svg(timeline)
        super().__init__(data=timeline_data(timeline), looks=[asdict(rank_look(rank.rank)) for rank in timeline.ranks])

    def __repr__(self) -> str:
        return f"{self.timeline.title}: {len(self.timeline.ranks)} ranks, {summary(self.timeline)}"

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
        # A notebook shows the first of these it can: the live widget; the same drawing without a kernel; a picture.
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None:
            return None
        data, metadata = bundle
        data["text/html"] = live_html(SCRIPT, {"data": self.data, "looks": self.looks}, self._picture)
        data["image/svg+xml"] = self._picture
        data["text/plain"] = repr(self)
        return data, metadata


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

    rank: which rank of each; None: the slowest (`Timeline.slowest`). UsageError without timelines, or when one of them
    has no such rank.
    """
    wrong = [name for name, timeline in timelines.items() if not isinstance(timeline, Timeline)]
    if not timelines or wrong:
        what = f"{wrong[0]!r} is no Timeline" if wrong else "there is no timeline"
        raise UsageError(f'compare: {what}. Give it {{"a name": timeline_of(run), ...}}')
    return Comparison(timelines, rank)
