"""A shard map as the widget receives it: every event as what it changes, which keeps notebooks small.

A set of ranges is told by its ends, in order: [0, 10, 20, 30] is 0 to 9 and 20 to 29. Going from one set to another,
ends appear and disappear; the ends that do either are the change, and the same change leads back. So the widget can
step both ways, and an event costs a few numbers however much is held.
"""

from __future__ import annotations

from typing import Any

from shardlab.shard_map import MapFrame, Ranges, ShardMap
from shardlab.theory import format_bytes
from shardlab.widgets.shard_words import LOOKS, complaints, heading, summary, too_much


def shard_map_data(shards: ShardMap) -> dict[str, Any]:
    """Plain data. A row is what a rank holds of a kind, by rank and then kind; after all of them, what is in flight.

    left_over: of each row that is held, the ends of what is too much after the step. columns: names and ends. owners:
    ends and ranks, -1 for nobody. frames: [what happened, changes, bytes], where changes are [row, how many ends, the
    ends..., row, ...] and bytes are [parameters, gradients, optimizer] of each rank in turn, or nothing where they are
    as before.
    """
    kinds = shards.kinds
    left_over = [shards.left_over(rank) for rank in range(shards.world_size)]
    return {
        "title": shards.title,
        "summary": summary(shards),
        "wrong": complaints(shards),
        "ranks": shards.world_size,
        "kinds": [{"name": LOOKS[kind].name, "sign": LOOKS[kind].sign} for kind in kinds],
        "fills": [LOOKS[kind].fill for kind in ("weights", "gradients", "master")],
        "columns": [value for column in shards.columns for value in (column.name, column.stop)],
        "owners": [value for _, stop, owner in shards.owners for value in (stop, -1 if owner is None else owner)],
        "formula": round(shards.formula),
        "formula_text": format_bytes(shards.formula),
        "left_over": [_ends(left.get(kind, ())) for left in left_over for kind in kinds],
        "over": [too_much(shards, rank) for rank in range(shards.world_size)],
        "most": [shards.most(rank) for rank in range(shards.world_size)],
        "frames": _frames(shards, kinds),
    }


def _frames(shards: ShardMap, kinds: tuple[str, ...]) -> list[list[Any]]:
    frames: list[list[Any]] = []
    rows: list[set[int]] = [set() for _ in range(2 * shards.world_size * len(kinds))]
    before: list[int] = []
    for frame in shards.frames:
        changes: list[int] = []
        for number, ranges in enumerate(_rows(frame, kinds)):
            ends = set(_ends(ranges))
            changed = sorted(ends ^ rows[number])
            if changed:
                changes += [number, len(changed), *changed]
                rows[number] = ends
        bytes_now = [
            size
            for rank in frame.ranks
            for size in (rank.memory.parameters, rank.memory.gradients, rank.memory.optimizer)
        ]
        frames.append([heading(frame), changes, bytes_now if bytes_now != before else []])
        before = bytes_now
    return frames


def _ends(ranges: Ranges) -> list[int]:
    return [end for each in ranges for end in each]


def _rows(frame: MapFrame, kinds: tuple[str, ...]) -> list[Ranges]:
    held = [rank.held.get(kind, ()) for rank in frame.ranks for kind in kinds]
    return held + [rank.flying.get(kind, ()) for rank in frame.ranks for kind in kinds]
