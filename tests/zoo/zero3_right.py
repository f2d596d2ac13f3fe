"""Lab 08: ZeRO-3 engines that are right, written in their own ways."""

from __future__ import annotations

from zoo import right
from zoo.zero3_base import ZERO3, Engine


@right(ZERO3)
class Plain(Engine):
    """The shared base: a unit for each module, one fetched ahead."""
