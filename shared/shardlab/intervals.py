"""Arithmetic on intervals of time: what lies in one set of intervals and in another, to the last bit.

A set of intervals is a list of (from, to), disjoint and in order, as `union` makes it. Ends that touch join.
"""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as disjoint intervals in order. What has no length, or ends before it begins, is left out."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersection(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """The moments that lie in both."""
    a, b = union(first), union(second)
    both: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            both.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return both


def difference(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """The moments that lie in `first` and not in `second`."""
    left: list[Interval] = []
    holes = union(second)
    at = 0
    for start, end in union(first):
        while at < len(holes) and holes[at][1] <= start:
            at += 1
        for hole_start, hole_end in holes[at:]:
            if hole_start >= end:
                break
            if start < hole_start:
                left.append((start, hole_start))
            start = max(start, hole_end)
        if start < end:
            left.append((start, end))
    return left


def length(intervals: Iterable[Interval]) -> float:
    """How long they are together; moments that several of them share count once."""
    return sum(end - start for start, end in union(intervals))
