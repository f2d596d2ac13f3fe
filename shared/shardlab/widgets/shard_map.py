"""A shard map to replay."""

from __future__ import annotations

from shardlab.shard_map import ShardMap
from shardlab.widgets.shard_map_svg import shard_map_svg
from shardlab.widgets.shard_words import complaints, summary


class ShardMapView:
    """Shows a ShardMap."""

    def __init__(self, shards: ShardMap) -> None:
        """UsageError for more than 16 ranks."""
        self.shards = shards
        self._picture = shard_map_svg(shards)

    def __repr__(self) -> str:
        wrong = "".join(f"; wrong: {text}" for text in complaints(self.shards))
        return f"{self.shards.title}: {self.shards.world_size} ranks, {summary(self.shards)}{wrong}"

    def _repr_svg_(self) -> str:
        return self._picture
