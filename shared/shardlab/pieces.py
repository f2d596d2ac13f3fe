"""A piece of a parameter: what a shard is made of."""

from __future__ import annotations

from typing import NamedTuple


class Piece(NamedTuple):
    """Elements start to stop - 1 of the flattened parameter of this index. Equal to a plain tuple of three ints."""

    parameter: int
    start: int
    stop: int
