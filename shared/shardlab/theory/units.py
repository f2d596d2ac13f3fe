"""Numbers for people. Units are decimal, as in the papers: 1 kB = 1000 bytes, 1 GB = 1e9 bytes."""

from __future__ import annotations

from collections.abc import Sequence

from shardlab.theory.arguments import real


def _three_digits(number: float) -> str:
    decimals = 2 if round(number, 2) < 10 else 1 if round(number, 1) < 100 else 0
    return f"{number:.{decimals}f}"


def _scaled(number: float, units: Sequence[str]) -> str:
    """`number`, in units that grow by 1000, with the first in which it stays below 1000 once rounded."""
    for unit in units[:-1]:
        if round(number) < 1000:
            return f"{_three_digits(number)} {unit}"
        number /= 1000
    return f"{_three_digits(number)} {units[-1]}"


def format_bytes(nbytes: float) -> str:
    """Bytes with three digits: 1234567 -> "1.23 MB", 120e9 -> "120 GB". Whole numbers below 1000 are exact: "12 B"."""
    number = real("nbytes", nbytes)
    if number < 1000 and number.is_integer():
        return f"{number:.0f} B"
    return _scaled(number, ("B", "kB", "MB", "GB", "TB", "PB"))


def format_seconds(seconds: float) -> str:
    """Seconds with three digits: 0.00012 -> "120 us"; 0 -> "0 s". Shortest unit: ns; longest: s."""
    number = real("seconds", seconds)
    return _scaled(number * 1e9, ("ns", "us", "ms", "s")) if number else "0 s"
