"""The timeline of a run: when each rank computed, when its link was busy, and how much of that was hidden.

Plain data, made from a `Run`; pictures, checks and text read it alike. Inside a rank, `watch_layers(model)` leaves the
spans that it is made of.

Communication is hidden while the same rank computes. So the hidden share is the length of (compute and link) over the
length of (link), both as sets of moments. A thread that stands still inside a layer, because a reduction blocks it,
does not compute: that is taken out of the layer's span first.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .buckets import bucket_numbers
from .errors import UsageError
from .intervals import Interval, difference, intersection, length, union
from .records import Call, Run, Span

if TYPE_CHECKING:
    from torch import nn

COMPUTE = ("forward", "backward", "recompute", "other")


@dataclass(frozen=True)
class Compute:
    """One layer at work on one rank. Times are seconds since the timeline's zero.

    level: how many other spans this one lies within. buckets: of the gradients that became ready in it, if known.
    """

    label: str
    kind: str  # "forward", "backward", "recompute" or "other"
    began: float
    ended: float
    level: int = 0
    buckets: tuple[int, ...] = ()


@dataclass(frozen=True)
class Communication:
    """One operation on a rank's link, in seconds since the timeline's zero.

    began, ended: when the link carried it; without a `Link`, when it was issued and known to be complete. None: it did
    not happen before the run ended. exposed: the parts of that during which the rank computed nothing.
    """

    op: str
    bytes: float
    issued: float
    began: float | None
    ended: float | None
    bucket: int | None = None  # reductions of gradients are numbered in the order of their issue
    waits: tuple[Interval, ...] = ()  # when a thread of the rank stood still until it was done
    exposed: tuple[Interval, ...] = ()

    @property
    def seconds(self) -> float:
        return 0.0 if self.began is None or self.ended is None else max(0.0, self.ended - self.began)

    @property
    def exposed_seconds(self) -> float:
        return length(self.exposed)


@dataclass(frozen=True)
class RankTimeline:
    """One rank. waiting: moments in which a thread that computes stood still. computing: those in which one did not."""

    rank: int
    compute: tuple[Compute, ...] = ()
    communication: tuple[Communication, ...] = ()
    waiting: tuple[Interval, ...] = ()
    computing: tuple[Interval, ...] = ()
    last_gradient: float | None = None  # when the last gradient of all was ready

    @property
    def communicating(self) -> list[Interval]:
        """The moments in which the link was busy."""
        return union(_when(item) for item in self.communication)

    @property
    def communication_seconds(self) -> float:
        return length(self.communicating)

    @property
    def hidden_seconds(self) -> float:
        return length(intersection(self.communicating, self.computing))

    @property
    def exposed(self) -> float:
        """Seconds in which the link was busy and the rank computed nothing."""
        return length(difference(self.communicating, self.computing))

    @property
    def hidden_share(self) -> float:
        """0..1: the share of communication during which this rank computed. 1 when there was no communication."""
        return share(self.hidden_seconds, self.communication_seconds)

    @property
    def overlapping(self) -> int:
        """Reductions of gradients that were issued before the last gradient was ready."""
        last = self.last_gradient
        return sum(item.bucket is not None and last is not None and item.issued < last for item in self.communication)

    @property
    def ended(self) -> float:
        ends = [item.ended for item in self.compute] + [end for _, end in (*self.waiting, *self.communicating)]
        return max(ends, default=0.0)


@dataclass(frozen=True)
class Timeline:
    """All ranks on one axis: zero is when the first span of any rank began.

    clock: "link" when communication's times are those of a `Link`; "calls" when they are those of issue and completion,
    which also hold what is not transport: waiting for the other ranks, and until somebody asks.
    """

    ranks: tuple[RankTimeline, ...]
    clock: str = "link"
    title: str = field(default="timeline", compare=False)

    @property
    def hidden_share(self) -> float:
        """0..1: the share of all ranks' communication that was hidden. 1 when there was none."""
        return share(sum(r.hidden_seconds for r in self.ranks), sum(r.communication_seconds for r in self.ranks))

    @property
    def exposed(self) -> float:
        """Seconds of communication that nothing hid, on the rank that had most of them."""
        return max((rank.exposed for rank in self.ranks), default=0.0)

    @property
    def overlapping(self) -> int:
        """Reductions issued before the rank's last gradient was ready, on the rank that had the fewest."""
        return min((rank.overlapping for rank in self.ranks), default=0)

    @property
    def slowest(self) -> RankTimeline:
        """The rank that was last to finish its backward.

        A rank ahead of it can only wait: what its link carries then is exposed, however well the code overlaps.
        """
        return max(self.ranks, key=lambda rank: rank.last_gradient or max((w.ended for w in rank.compute), default=0.0))

    @property
    def seconds(self) -> float:
        """From the first span's beginning to the end of what ended last."""
        return max((rank.ended for rank in self.ranks), default=0.0)


def watch_layers(model: nn.Module) -> AbstractContextManager[None]:
    """Inside a rank: while it is open, the layers' forward and backward leave spans. See `meters.layers`."""
    from .meters.layers import watch_layers

    return watch_layers(model)


def span(label: str, kind: str = "other") -> AbstractContextManager[None]:
    """Inside a rank: a span of the learner's own, `with span("optimizer"): ...`. See `meters.layers`."""
    from .meters.layers import span

    return span(label, kind)


def timeline_of(run: Run, *, step: int | None = None, title: str = "timeline") -> Timeline:
    """The timeline of a run in which `watch_layers` was open, from the first span on.

    step: of several forward and backward passes, only this one (0 the first, -1 the last). A step begins with the first
    forward after a backward; what follows its backward belongs to it, until the next forward.
    UsageError when there are no spans, or no such step.
    """
    spans = [[item for item in rank if item.kind in COMPUTE and item.ended is not None] for rank in run.spans]
    if not any(spans):
        raise UsageError(
            "timeline_of: this run has no spans. Open `with watch_layers(model):` around the steps, inside the "
            "launched function, and launch with meter=True."
        )
    windows = [_window(rank, step) for rank in spans]
    zero = min(start for start, _ in windows if start != float("inf"))
    clock = "link" if any(call.link_began is not None for calls in run.calls for call in calls) else "calls"
    ranks = [_rank_timeline(run, rank, window, zero, clock) for rank, window in enumerate(windows)]
    return Timeline(tuple(ranks), clock, title)


def share(part: float, whole: float) -> float:
    return part / whole if whole else 1.0


def _window(spans: list[Span], step: int | None) -> Interval:
    """From when to when the step lasted, on this rank."""
    starts: list[float] = []
    after_backward = True
    for item in sorted(spans, key=lambda item: item.began):
        if item.kind == "forward" and after_backward:
            starts.append(item.began)
        if item.kind in ("forward", "backward"):
            after_backward = item.kind == "backward"
    first = min((item.began for item in spans), default=float("inf"))
    if step is None or not spans:
        return first, float("inf")
    starts = starts or [first]
    if not -len(starts) <= step < len(starts):
        raise UsageError(f"timeline_of: no step {step}; this run has {len(starts)}, 0 to {len(starts) - 1}")
    number = step % len(starts)
    return starts[number], starts[number + 1] if number + 1 < len(starts) else float("inf")


def _rank_timeline(run: Run, rank: int, window: Interval, zero: float, clock: str) -> RankTimeline:
    def within(time: float) -> bool:
        return window[0] <= time < window[1]

    spans = [item for item in run.spans[rank] if within(item.began) and item.ended is not None]
    work = [item for item in spans if item.kind in COMPUTE]
    waits = [item for item in spans if item.kind == "waiting"]
    computing = union(
        part
        for thread in {item.thread for item in work}
        for part in difference(
            ((item.began, _end(item)) for item in work if item.thread == thread),
            ((item.began, _end(item)) for item in waits if item.thread == thread),
        )
    )
    gradients = [item for item in (run.gradients[rank] if run.gradients else []) if within(item.ready)]
    calls = [call for call in run.calls[rank] if within(call.issued) and _counts(call, clock)]
    numbers, carried = bucket_numbers(calls, gradients)
    ready = {item.ready: carried[item.number] for item in gradients if item.number in carried}
    threads = {item.thread for item in work}
    return RankTimeline(
        rank,
        tuple(_compute(work, ready, zero)),
        tuple(
            _communication(call, clock, numbers.get(call.index), waits, computing, zero)
            for call in sorted(calls, key=lambda call: call.issued)
        ),
        _moved(union((item.began, _end(item)) for item in waits if item.thread in threads), zero),
        _moved(computing, zero),
        max((item.ready for item in gradients), default=zero) - zero if gradients else None,
    )


def _counts(call: Call, clock: str) -> bool:
    """Receives do not use the rank's link (the sender's does), and a barrier carries nothing."""
    return call.op != "barrier" and not (clock == "link" and call.op == "recv")


def _compute(work: list[Span], ready: dict[float, int], zero: float) -> Iterable[Compute]:
    around: list[float] = []  # when those end that this one may lie within
    for item in sorted(work, key=lambda item: (item.began, -_end(item))):
        began, ended = item.began, _end(item)
        around = [end for end in around if end > began and end >= ended]
        buckets: set[int] = set()
        if item.kind == "backward":
            buckets = {bucket for time, bucket in ready.items() if began <= time <= ended}
        yield Compute(item.label, item.kind, began - zero, ended - zero, len(around), tuple(sorted(buckets)))
        around.append(ended)


def _communication(
    call: Call, clock: str, bucket: int | None, waits: list[Span], computing: list[Interval], zero: float
) -> Communication:
    times = (call.link_began, call.link_ended) if clock == "link" else (call.issued, call.completed)
    began, ended = (None if time is None else time - zero for time in times)
    own = [(item.began, _end(item)) for item in waits if item.call == call.index]
    busy = [] if times[0] is None or times[1] is None else [(times[0], times[1])]
    return Communication(
        op=call.op,
        bytes=call.size,
        issued=call.issued - zero,
        began=began,
        ended=ended,
        bucket=bucket,
        waits=_moved(own, zero),
        exposed=_moved(difference(busy, computing), zero),
    )


def _end(item: Span) -> float:
    return item.began if item.ended is None else item.ended


def _when(item: Communication) -> Interval:
    return (0.0, 0.0) if item.began is None or item.ended is None else (item.began, item.ended)


def _moved(intervals: Iterable[Interval], zero: float) -> tuple[Interval, ...]:
    return tuple((start - zero, end - zero) for start, end in intervals)
