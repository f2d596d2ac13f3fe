"""What a run leaves behind, as plain data that pictures, checks and text read alike.

Nothing here imports torch: a record can be pickled, compared, drawn and tested without running anything.
All sizes are bytes, all times are seconds since the launch began (one clock for all ranks of a machine).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from .state_records import RankStates

POINT_TO_POINT = frozenset({"send", "recv"})


@dataclass(frozen=True, slots=True)
class Where:
    """A place in the learner's code."""

    filename: str
    line: int
    function: str


@dataclass(frozen=True)
class Link:
    """What each rank sends over: latency in seconds a message, bandwidth in bytes per second."""

    latency: float
    bandwidth: float


@dataclass(slots=True)
class Call:
    """One communication call of one rank: what it was, what it moved, when it began and ended.

    `sent` and `received` are payload bytes of this rank. For `send` and `recv` they are exact. For a library
    collective they are the published cost of the bandwidth-optimal algorithm (see `theory`), because what a library
    really sends is its own affair.
    """

    rank: int
    index: int  # 0 for the first call of this rank
    op: str  # "send", "recv", "all_reduce", "reduce_scatter", "all_gather", "broadcast", ...
    peer: int | None  # the other rank of a send or recv, the root of a rooted collective, else None
    numel: int  # elements this rank handed in (send, reduce, ...) or receives (recv)
    dtype: str
    sent: float
    received: float
    issued: float
    completed: float | None = None  # None: nobody waited for it
    where: Where | None = None
    group: tuple[int, ...] = ()  # global ranks that take part in a collective
    what: str = ""  # of a transfer between devices: "parameters", "gradients", ... as far as known
    size: float = 0.0  # bytes of the whole, unsharded tensor: n of `theory.collective_cost`
    link_began: float | None = None  # with a `Link`: when it began to carry this call, and when it was done
    link_ended: float | None = None

    @property
    def point_to_point(self) -> bool:
        return self.op in POINT_TO_POINT


@dataclass(frozen=True)
class Totals:
    """Messages and bytes of one rank, summed over some of its calls."""

    calls: int = 0
    sent: float = 0
    received: float = 0

    def __add__(self, other: Totals) -> Totals:
        return Totals(self.calls + other.calls, self.sent + other.sent, self.received + other.received)


@dataclass(frozen=True)
class RankTraffic:
    """What one rank sent and received: in all, by the other rank, and by operation."""

    rank: int
    sent: float
    received: float
    messages_sent: int
    messages_received: int
    by_peer: dict[int, Totals]  # point-to-point only: a library does not tell whom it talks to
    by_operation: dict[str, Totals]
    by_what: dict[str, Totals] = field(default_factory=dict)  # transfers between devices only


@dataclass(frozen=True)
class MemorySample:
    """Live bytes of one rank just after they changed, split by what they are for."""

    time: float
    live: int
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0

    @property
    def other(self) -> int:
        return self.live - self.parameters - self.gradients - self.optimizer


@dataclass(frozen=True)
class RankMemory:
    """Live bytes of one rank over time. Storages count once, however many tensors view them."""

    rank: int
    samples: list[MemorySample] = field(default_factory=list)
    peak: int = 0
    at_end: MemorySample = field(default_factory=lambda: MemorySample(0.0, 0))
    cuda_peak: int | None = None  # torch.cuda.max_memory_allocated(), on GPUs

    def at(self, time: float) -> MemorySample:
        """What was live at that time, in seconds since the launch began (as an event's time)."""
        earlier = [sample for sample in self.samples if sample.time <= time]
        return earlier[-1] if earlier else MemorySample(time, 0)


@dataclass(frozen=True)
class Event:
    """A point on a rank's time line: a call was issued or completed, or the learner's code left a mark."""

    time: float
    rank: int
    kind: str  # "issued", "completed", "mark"
    label: str
    call: Call | None = None


@dataclass(slots=True)
class Span:
    """A stretch of time in which one thread of a rank did one thing (see `timeline`).

    kind: "forward", "backward", "recompute" (a forward repeated during backward, for checkpointing), "other" (what the
    learner's code named), or "waiting": the thread stood still until a communication call or another thread was done.
    """

    rank: int
    kind: str
    label: str  # the layer; of a wait, the operation
    began: float
    ended: float | None = None  # None: it never ended
    thread: int = 0
    call: int | None = None  # of a wait: the `Call.index` that it waited for


@dataclass(frozen=True, slots=True)
class GradientReady:
    """Backward had computed the gradient of one parameter on one rank, and was about to add it to `.grad`."""

    rank: int
    parameter: str
    number: int  # the parameter's place in `model.parameters()`
    numel: int
    dtype: str
    ready: float


def traffic_of(rank: int, calls: list[Call]) -> RankTraffic:
    """Sums the calls of one rank."""
    by_peer: dict[int, Totals] = defaultdict(Totals)
    by_operation: dict[str, Totals] = defaultdict(Totals)
    by_what: dict[str, Totals] = defaultdict(Totals)
    for call in calls:
        totals = Totals(1, call.sent, call.received)
        by_operation[call.op] += totals
        if call.what:
            by_what[call.what] += totals
        if call.point_to_point and call.peer is not None:
            by_peer[call.peer] += totals
    return RankTraffic(
        rank=rank,
        sent=sum(call.sent for call in calls),
        received=sum(call.received for call in calls),
        messages_sent=sum(call.op == "send" for call in calls),
        messages_received=sum(call.op == "recv" for call in calls),
        by_peer=dict(by_peer),
        by_operation=dict(by_operation),
        by_what=dict(by_what),
    )


@dataclass(frozen=True)
class Run:
    """What `launch` returns. Lists have one entry per rank, in rank order; from `launch_devices`, one per device."""

    world_size: int
    device: str  # "cpu" or "cuda"
    backend: str  # "gloo" or "nccl"
    seconds: float
    results: list
    calls: list[list[Call]] = field(default_factory=list)
    memory: list[RankMemory] = field(default_factory=list)
    marks: list[list[Event]] = field(default_factory=list)
    spans: list[list[Span]] = field(default_factory=list)
    gradients: list[list[GradientReady]] = field(default_factory=list)
    states: list[list[RankStates]] = field(default_factory=list)  # of each rank, what each `watch_states` saw
    noun: str = "rank"  # or "device": what the lists have an entry for

    def __repr__(self) -> str:
        """One line; the records are long."""
        sent = max((rank.sent for rank in self.traffic), default=0)
        return (
            f"Run of {self.world_size} {self.noun}s ({self.device}, {self.backend}) in {self.seconds:.2f} s: "
            f"{sum(map(len, self.calls))} calls, the busiest {self.noun} sent {sent:,.0f} bytes. "
            "See .results, .traffic, .events, .memory"
        )

    @property
    def traffic(self) -> list[RankTraffic]:
        return [traffic_of(rank, calls) for rank, calls in enumerate(self.calls)]

    @property
    def events(self) -> list[Event]:
        """All ranks' events on one time line, in order."""
        events = [mark for marks in self.marks for mark in marks]
        for calls in self.calls:
            for call in calls:
                events.append(Event(call.issued, call.rank, "issued", call.op, call))
                if call.completed is not None:
                    events.append(Event(call.completed, call.rank, "completed", call.op, call))
        return sorted(events, key=lambda event: event.time)


@dataclass(frozen=True)
class Transfer:
    """One message of a ring step: `chunk` is None when what was sent is no chunk of the watched list."""

    source: int
    destination: int
    chunk: int | None
    bytes: int


@dataclass(frozen=True)
class RingStep:
    """The state of all ranks after a step, and the messages that led to it.

    held[rank][chunk] says what is in that chunk on that rank: a tuple with one count per rank, how many times this
    rank's contribution has been added. (1, 0, 1, 0) is the sum of rank 0's and rank 2's data; None is something else
    (garbage).
    """

    transfers: tuple[Transfer, ...]
    held: tuple[tuple[tuple[int, ...] | None, ...], ...]
    phase: str = ""  # "reduce-scatter", "all-gather", or "" when unknown


@dataclass(frozen=True)
class RingTrace:
    """A ring run, step by step. steps[0] is the state before the first message and has no transfers."""

    world_size: int
    steps: tuple[RingStep, ...]
    title: str = "ring all-reduce"


@dataclass(frozen=True)
class Standing:
    """Where one rank stood when a launch failed. waits_for: the ranks whose call it needs and that had not made it.

    doing: "waiting", "computing", "starting", "finished", "raised" or "died". call, place and source are text.
    """

    rank: int
    doing: str
    call: str = ""
    place: str = ""
    source: str = ""
    waits_for: tuple[int, ...] = ()
    blamed: bool = False
