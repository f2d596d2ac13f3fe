"""A shard map to replay: a live widget in JupyterLab, a page of its own in exported HTML, a picture elsewhere."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from shardlab.shard_map import ShardMap
from shardlab.widgets.colours import rank_look
from shardlab.widgets.saved import live_html
from shardlab.widgets.shard_map_data import shard_map_data
from shardlab.widgets.shard_map_svg import shard_map_svg
from shardlab.widgets.shard_words import complaints, heading, summary

HERE = Path(__file__).parent
FILES = ("shard_map_replay.js", "shard_map_drawing.js", "shard_map.js")
SCRIPT = "\n".join((HERE / name).read_text(encoding="utf-8") for name in FILES)


class ShardMapView(anywidget.AnyWidget):
    """Replays a ShardMap. `step`, the event that is shown, is shared by all views of one widget and by Python."""

    _esm = SCRIPT
    data: traitlets.Dict[str, Any] = traitlets.Dict().tag(sync=True)
    looks: traitlets.List[Any] = traitlets.List().tag(sync=True)
    step = traitlets.Int(0).tag(sync=True)

    def __init__(self, shards: ShardMap) -> None:
        """UsageError for more than 16 ranks."""
        self.shards = shards
        self._picture = shard_map_svg(shards)
        looks = [asdict(rank_look(rank)) for rank in range(shards.world_size)]
        super().__init__(data=shard_map_data(shards), looks=looks)

    @traitlets.validate("step")
    def _step_within(self, proposal: dict[str, Any]) -> int:
        return max(0, min(len(self.shards.frames) - 1, proposal["value"]))

    @property
    def caption(self) -> str:
        """What happened at the current step, in words."""
        return heading(self.shards.frames[self.step])

    def __repr__(self) -> str:
        wrong = "".join(f"; ! {text}" for text in complaints(self.shards))
        return (
            f"{self.shards.title}: {self.shards.world_size} ranks, {len(self.shards.frames)} events; "
            f"{summary(self.shards)}{wrong}. Run the cell to replay it"
        )

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
        # A notebook shows the first of these it can: the live widget; the same drawing without a kernel; a picture.
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None:
            return None
        data, metadata = bundle
        values = {name: getattr(self, name) for name in ("data", "looks", "step")}
        data["text/html"] = live_html(SCRIPT, values, self._picture)
        data["image/svg+xml"] = self._picture
        data["text/plain"] = repr(self)
        return data, metadata
