"""The pictures of a ring run as plain data: what is drawn and said at every step, computed once from the record.

The live widget (`ring_stepper.js`) and the static picture (`ring_svg`) both draw these frames.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from shardlab.errors import UsageError
from shardlab.records import RingStep, RingTrace
from shardlab.theory import format_bytes
from shardlab.widgets.colours import state_of

LARGEST_WORLD = 16  # more ranks than this make cells that nobody can read
PROBLEMS_NAMED = 3
WRONG_STATES = {"repeated", "garbage", "missing"}


@dataclass(frozen=True)
class Arrow:
    """A message of the step: from where to where, and the two short lines of text beside the arrow."""

    source: int
    destination: int
    chunk: int | None
    label: str
    size: str


@dataclass(frozen=True)
class Cell:
    """A chunk on a rank. counts[r] says how often rank r's data is in it, None that it is garbage."""

    counts: tuple[int, ...] | None
    state: str  # a name in colours.STATES
    changed: bool  # since the step before


@dataclass(frozen=True)
class Frame:
    """One step, ready to draw. sent[r] is what rank r has sent so far, as text."""

    heading: str
    caption: str
    arrows: tuple[Arrow, ...]
    cells: tuple[tuple[Cell, ...], ...]
    sent: tuple[str, ...]
    complete: int
    wrong: int


def frames_of(trace: RingTrace) -> list[Frame]:
    """One frame per step of the trace. UsageError when the trace cannot be drawn."""
    _validate(trace)
    unfilled = {place for place, counts in _places(trace.steps[0]) if _empty(counts)}
    frames: list[Frame] = []
    sent = [0] * trace.world_size
    before: RingStep | None = None
    for number, step in enumerate(trace.steps):
        for transfer in step.transfers:
            sent[transfer.source] += transfer.bytes
        unfilled &= {place for place, counts in _places(step) if _empty(counts)}
        odd = dict.fromkeys(unfilled, "unfilled")
        if number == len(trace.steps) - 1:
            odd |= dict.fromkeys(_missing(trace), "missing")
        frames.append(_frame(trace, number, step, before, sent, odd))
        before = step
    return frames


def frame_data(frame: Frame) -> dict[str, Any]:
    """A frame as the widget receives it. Counts become one string per cell ("1010"), which keeps notebooks small."""
    data = asdict(frame)
    data["cells"] = [
        [{"counts": _digits(cell.counts), "state": cell.state, "changed": cell.changed} for cell in row]
        for row in frame.cells
    ]
    return data


def _digits(counts: tuple[int, ...] | None) -> str:
    # A count above 9 is as wrong as 9 and drawn alike, a negative one too.
    return "" if counts is None else "".join(str(count) if 0 <= count <= 9 else "9" for count in counts)


def _validate(trace: RingTrace) -> None:
    if not 1 <= trace.world_size <= LARGEST_WORLD:
        raise UsageError(
            f"show: a ring of {trace.world_size} ranks; the picture is readable for 1 to {LARGEST_WORLD}. "
            "Trace the same code on fewer ranks: the pattern is the same."
        )
    if not trace.steps:
        raise UsageError("show: this trace has no steps, so there is nothing to draw. Was the traced function called?")
    chunks = {len(row) for step in trace.steps for row in step.held}
    ranks = {len(step.held) for step in trace.steps}
    if ranks != {trace.world_size} or len(chunks) != 1:
        raise UsageError(
            f"show: the steps hold {sorted(ranks)} ranks with {sorted(chunks)} chunks, "
            f"expected {trace.world_size} ranks with the same number of chunks everywhere."
        )


def _places(step: RingStep) -> list[tuple[tuple[int, int], tuple[int, ...] | None]]:
    """((rank, chunk), counts) of every chunk on every rank."""
    return [((rank, chunk), counts) for rank, row in enumerate(step.held) for chunk, counts in enumerate(row)]


def _missing(trace: RingTrace) -> set[tuple[int, int]]:
    """What should be complete at the end and is not. The title says what the run is for, hence what should be."""
    places = _places(trace.steps[-1])
    first = trace.steps[0].held
    without_elements = {chunk for chunk in range(len(first[0])) if not any(any(row[chunk] or ()) for row in first)}
    if "all-reduce" in trace.title or "all-gather" in trace.title:
        wanted = {place for place, _ in places}
    elif "reduce-scatter" in trace.title:
        wanted = {(rank, chunk) for (rank, chunk), _ in places if rank == chunk}
    else:
        wanted = set()
    unfinished = {place for place, counts in places if state_of(counts).name in ("partial", "garbage")}
    return {(rank, chunk) for rank, chunk in wanted & unfinished if chunk not in without_elements}


def _empty(counts: tuple[int, ...] | None) -> bool:
    return counts is None or not any(counts)


def _frame(
    trace: RingTrace,
    number: int,
    step: RingStep,
    before: RingStep | None,
    sent: list[int],
    odd: dict[tuple[int, int], str],
) -> Frame:
    """odd: the state of each (rank, chunk) whose state does not follow from its counts alone."""
    cells = tuple(
        tuple(
            Cell(
                counts,
                odd.get((rank, chunk), state_of(counts).name),
                before is not None and counts != before.held[rank][chunk],
            )
            for chunk, counts in enumerate(row)
        )
        for rank, row in enumerate(step.held)
    )
    states = [cell.state for row in cells for cell in row]
    complete = states.count("complete")
    wrong = sum(state in WRONG_STATES for state in states)
    last = len(trace.steps) - 1
    phase = f", {step.phase}" if step.phase else ""
    heading = f"Step {number} of {last}{phase}" if number else "Before the first message"
    caption = f"{heading}: {_messages(step)} {_summary(cells, complete, len(states))}"
    arrows = tuple(
        Arrow(
            transfer.source,
            transfer.destination,
            transfer.chunk,
            "no known chunk" if transfer.chunk is None else f"chunk {transfer.chunk}",
            format_bytes(transfer.bytes),
        )
        for transfer in step.transfers
    )
    return Frame(heading, caption, arrows, cells, tuple(map(format_bytes, sent)), complete, wrong)


def _messages(step: RingStep) -> str:
    if step.transfers:
        sentences = (
            f"rank {t.source} sends {'data that is no known chunk' if t.chunk is None else f'chunk {t.chunk}'} "
            f"({format_bytes(t.bytes)}) to rank {t.destination}"
            for t in step.transfers
        )
        return "; ".join(sentences) + "."
    if _everyone_has_only_their_own(step):
        return "every rank has its own data in every chunk."
    return "no messages."


def _everyone_has_only_their_own(step: RingStep) -> bool:
    return all(
        counts == tuple(int(other == rank) for other in range(len(step.held)))
        for rank, row in enumerate(step.held)
        for counts in row
    )


def _summary(cells: tuple[tuple[Cell, ...], ...], complete: int, total: int) -> str:
    problems = [
        problem
        for rank, row in enumerate(cells)
        for chunk, cell in enumerate(row)
        for problem in _problems(rank, chunk, cell)
    ]
    named = "; ".join(problems[:PROBLEMS_NAMED])
    more = f"; and {len(problems) - PROBLEMS_NAMED} more" if len(problems) > PROBLEMS_NAMED else ""
    verdict = f"{complete} of {total} chunks {'is' if complete == 1 else 'are'} complete."
    return f"{verdict} Wrong: {named}{more}." if problems else verdict


def _problems(rank: int, chunk: int, cell: Cell) -> list[str]:
    if cell.state == "garbage":
        return [f"chunk {chunk} on rank {rank} is garbage"]
    if cell.state == "missing":
        return [f"chunk {chunk} on rank {rank} is not complete"]
    return [
        f"chunk {chunk} on rank {rank} has rank {source}'s data {count} times"
        for source, count in enumerate(cell.counts or ())
        if count not in (0, 1)
    ]
