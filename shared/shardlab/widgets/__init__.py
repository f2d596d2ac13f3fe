"""Pictures, forms and tables of the course. Nothing heavy is imported before something is shown."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from shardlab.errors import UsageError
from shardlab.exchange import Exchange
from shardlab.records import RingTrace, Run
from shardlab.shard_map import ShardMap
from shardlab.timeline import Timeline
from shardlab.widgets.predict import predict
from shardlab.widgets.tables import table

__all__ = ["predict", "show", "table"]


@singledispatch
def show(record: Any) -> Any:
    """The picture of a record, to be the last line of a cell.

    A RingTrace becomes a widget to step through, a ShardMap one to replay, a Timeline one to zoom into, a Run a figure
    of who sent how many bytes to whom.
    `show.register(type)` adds another kind of record. UsageError for anything else.
    """
    known = ", ".join(sorted(kind.__name__ for kind in show.registry if kind is not object))
    raise UsageError(f"show: cannot draw {_described(record)}. It draws: {known}.")


@show.register
def _(record: RingTrace) -> Any:
    from shardlab.widgets.ring_stepper import RingStepper

    return RingStepper(record)


@show.register
def _(record: Timeline) -> Any:
    from shardlab.widgets.timeline import TimelineView

    return TimelineView(record)


@show.register
def _(record: ShardMap) -> Any:
    from shardlab.widgets.shard_map import ShardMapView

    return ShardMapView(record)


@show.register
def _(record: Run) -> Any:
    from shardlab.widgets.charts import traffic_heatmap

    return traffic_heatmap(record)


@show.register
def _(record: Exchange) -> Any:
    from shardlab.widgets.exchange_svg import ExchangePicture

    return ExchangePicture(record)


def _described(record: Any) -> str:
    if isinstance(record, type):
        return f"the class {record.__name__} itself"
    article = "an" if type(record).__name__[0].lower() in "aeiou" else "a"
    return f"{article} {type(record).__name__}"
