"""ShardLab: data-parallel training, built by hand and measured."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import theory as theory
    from .checks import check as check
    from .checks import trace_collective as trace_collective
    from .checks import trace_ring as trace_ring
    from .course import reuse as reuse
    from .devices import launch_devices as launch_devices
    from .devices import move as move
    from .devices import on as on
    from .runtime import device as device
    from .runtime import launch as launch
    from .widgets import predict as predict
    from .widgets import show as show
    from .widgets import table as table

# Loaded on first use, so that the command line and a rank load only what they need.
_HOMES = {
    "launch": "runtime",
    "device": "runtime",
    "launch_devices": "devices",
    "move": "devices",
    "on": "devices",
    "check": "checks",
    "show": "widgets",
    "predict": "widgets",
    "table": "widgets",
    "trace_collective": "checks",
    "trace_ring": "checks",
    "reuse": "course",
}

__all__ = [
    "check",
    "device",
    "launch",
    "launch_devices",
    "move",
    "on",
    "predict",
    "reuse",
    "show",
    "table",
    "theory",
    "trace_collective",
    "trace_ring",
]


def __getattr__(name: str) -> Any:
    if name == "theory":
        return importlib.import_module(".theory", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module 'shardlab' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
