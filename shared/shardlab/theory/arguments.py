"""Arguments of the formulas, checked: a wrong one is answered with one clear line."""

from __future__ import annotations

import math
from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Integral, Real

from shardlab.errors import UsageError


def whole(name: str, value: object, least: int = 0) -> int:
    """A whole number, at least `least`. 7.5e9 is one, 0.5, True and "4" are not."""
    number: int | None = None
    if isinstance(value, Integral) and not isinstance(value, bool):
        number = int(value)
    elif isinstance(value, Real) and not isinstance(value, bool):
        as_float = float(value)
        number = int(as_float) if as_float.is_integer() else None
    if number is None or number < least:
        raise UsageError(f"{name} must be a whole number, at least {least}; got {value!r}")
    return number


def real(name: str, value: object, above_zero: bool = False) -> float:
    """A finite number that is not negative (`above_zero`: nor zero)."""
    expected = "greater than 0" if above_zero else "0 or greater"
    if not isinstance(value, Real) or isinstance(value, bool):
        raise UsageError(f"{name} must be a number, {expected}; got {value!r}")
    number = float(value)
    if not math.isfinite(number) or number < 0 or (above_zero and number == 0):
        raise UsageError(f"{name} must be a finite number, {expected}; got {value!r}")
    return number


def ranks(world_size: object) -> int:
    """The number of ranks, at least 1."""
    return whole("world_size", world_size, least=1)


def rank_of(rank: object, world_size: int, name: str = "rank") -> int:
    """A rank of a group of `world_size`, from 0."""
    number = whole(name, rank)
    if number >= world_size:
        raise UsageError(f"{name} must be less than world_size={world_size}; got {rank!r}")
    return number


def one_of(name: str, value: object, choices: Iterable[str]) -> str:
    """One of the known names; the error names them, and the one that was probably meant."""
    known = list(choices)
    if isinstance(value, str) and value in known:
        return value
    close = get_close_matches(value, known, n=1) if isinstance(value, str) else []
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise UsageError(f"{name} must be one of {', '.join(known)}; got {value!r}.{hint}")
