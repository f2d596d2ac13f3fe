"""The time line of a rank's live bytes.

What a storage is for is often known only after it was made: a tensor becomes a gradient at the end of backward. So the
changes are kept and read later, and a storage counts as what it turned out to be, from its first moment.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..records import MemorySample

MOST_SAMPLES = 4000  # more than a picture can show
MOST_CHANGES = 20_000


class Timeline:
    """Changes are appended with `changed` and become samples with `settle`."""

    def __init__(self) -> None:
        self.samples: list[MemorySample] = []
        self._changes: list[tuple[float, int, int]] = []
        self._sizes: dict[int, int] = {}  # live bytes by storage, before the changes that are not settled yet
        self._stride = 1  # changes that one sample stands for
        self._window: list[MemorySample] = []

    @property
    def full(self) -> bool:
        return len(self._changes) >= MOST_CHANGES

    def changed(self, time: float, key: int, change: int) -> None:
        """At `time` (seconds) storage number `key` grew by `change` bytes."""
        self._changes.append((time, key, change))

    def settle(self, kinds: Mapping[int, str], time: float) -> MemorySample:
        """Turns the changes so far into samples. kinds: what each labelled storage is for. Returns what is live now."""
        live = sum(self._sizes.values())
        totals = {"parameters": 0, "gradients": 0, "optimizer": 0}
        for key, size in self._sizes.items():
            if key in kinds:
                totals[kinds[key]] += size
        for moment, key, change in self._changes:
            live += change
            if key in kinds:
                totals[kinds[key]] += change
            size = self._sizes.pop(key, 0) + change
            if size:
                self._sizes[key] = size
            self._keep(MemorySample(moment, live, **totals))
        self._changes.clear()
        return MemorySample(time, live, **totals)

    def _keep(self, sample: MemorySample) -> None:
        """Of each `stride` samples the highest one stays, so that thinning loses no peak."""
        self._window.append(sample)
        if len(self._window) < self._stride:
            return
        self.samples.append(_highest(self._window))
        self._window = []
        if len(self.samples) >= MOST_SAMPLES:
            pairs = zip(self.samples[::2], self.samples[1::2], strict=True)
            self.samples = [_highest(list(pair)) for pair in pairs]
            self._stride *= 2


def _highest(samples: list[MemorySample]) -> MemorySample:
    return max(samples, key=lambda sample: sample.live)
