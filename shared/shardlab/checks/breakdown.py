"""Says why a trial did not come to its end: an exception, a rank that died, ranks that wait for ever."""

from __future__ import annotations

import re
from typing import Any

from ..errors import CheckFailed, LaunchError
from ..records import Standing
from .notes import Again, Begun, Endless, Issued, Observation, Raised, Stranger
from .observe import TIMEOUT, Trial, line_at

MOST_RANKS = 3  # named in one message
MOST_CHARACTERS = 240  # of an exception's message


def breakdown(trial: Trial) -> CheckFailed:
    """The verdict on a trial whose `error` is set.

    Raises that error when no rank had got as far as the solution: then the solution is not to blame.
    """
    error = trial.error
    assert error is not None
    if not any(trial.notes):
        raise error
    case, rank = _stopped(trial, error)
    for rank_noted, note in ((rank, note) for rank, notes in enumerate(trial.notes) for note in notes):
        if isinstance(note, Stranger):
            return _stranger(trial, rank_noted, note)
        if isinstance(note, Endless):
            said = f"{trial.at(note.case, rank_noted)}: {note.what} and still not done"
            expected = "a loop that ends"
            if "nothing but" in note.what:
                expected += "; a loop cannot see a message come: recv waits for it, and without recv nothing comes"
            return trial.failed(note.case, "hang", said, expected, line_at(note.where))
    # When waits were the fault, what ranks raised while they were being ended says nothing.
    waited = error.kind in ("deadlock", "timeout")
    raised = [note for note in trial.notes[rank] if isinstance(note, Raised) and not waited]
    if raised and raised[0].type == "NotImplementedError" and raised[0].own:
        return trial.failed(case, "not written", line_at(raised[0].where))
    uneven = _uneven_collectives(trial, case)
    if uneven:
        return uneven
    different = _different_sizes(trial, case)
    if different:
        said, call = different
        hint = "both sides of a message mean the same data: as many elements, of the same dtype"
        return trial.failed(case, "crash", f"N = {trial.world_size}, {said}", hint, line_at(call.where))
    if raised:
        return _raised(trial, rank, raised[0])
    if waited:
        return _hang(trial, case, error)
    lines = error.report.splitlines()
    if error.kind == "disagree":
        return trial.failed(case, "calls", f"N = {trial.world_size}: {lines[0]}", lines[-1], lines[1].strip())
    places = [f"{one.place}: {one.source}" for one in error.ranks if one.rank == rank and one.source]
    look = places[0] if places else _last_call(trial, rank)
    return trial.failed(case, "crash", f"{trial.at(case, rank)}: {lines[0]}", look=look)


def _stopped(trial: Trial, error: LaunchError) -> tuple[int, int]:
    """The earliest case that some rank did not finish, and the rank to name."""
    blamed = error.rank or 0
    begun = [max((note.case for note in notes if isinstance(note, Begun)), default=0) for notes in trial.notes]
    raised = {rank: note for rank, notes in enumerate(trial.notes) for note in notes if isinstance(note, Raised)}
    if not raised or error.kind == "died":
        return min(begun), blamed
    # Several ranks can raise the same at the same time: the first by number, so that the verdict is the same each time.
    alike = [rank for rank in raised if blamed in raised and raised[rank].type == raised[blamed].type]
    return min(begun), min(alike or raised)


def _stranger(trial: Trial, rank: int, note: Stranger) -> CheckFailed:
    n, verb = trial.world_size, "sends to" if note.op == "send" else "receives from"
    if note.alone:
        said, expected = f"N = {n}: rank {rank} {verb} itself", "messages between two different ranks"
        expected += "; with N = 1 there is nothing to do that takes a message" if n == 1 else ""
    else:
        ranks = f"ranks are {'0 and' if n == 2 else '0 to'} {n - 1}"
        said = f"N = {n}: rank {rank} {verb} rank {note.peer}; {ranks}: forgotten % N? Or is N not {n} there?"
        expected = "counting on from rank N-1 one comes to rank 0 again: (r + k) % N, with N = dist.get_world_size(),"
        expected += f" here {n}, whatever it is in the notebook"
    return trial.failed(note.case, "crash", said, expected, line_at(note.where))


def _issued(trial: Trial, case: int, rank: int) -> list[Issued]:
    """The calls that a rank made in a case."""
    of_case, issued = -1, []
    for note in trial.notes[rank]:
        if isinstance(note, Begun):
            of_case = note.case
        elif isinstance(note, Issued) and of_case == case:
            issued.append(note)
    return issued


def _uneven_collectives(trial: Trial, case: int) -> CheckFailed | None:
    """When a rank came to the end of the case without a collective that another one calls in it.

    The check's own barrier at the end of a case then meets that call, and what follows is one call out of step.
    """
    calls = [[one for one in _issued(trial, case, rank) if one.peer is None] for rank in range(trial.world_size)]
    for rank, notes in enumerate(trial.notes):
        if not any(isinstance(note, Observation) and note.case == case for note in notes):
            continue
        for other, more in enumerate(calls):
            if len(more) > len(calls[rank]):
                extra = more[len(calls[rank])]
                said = f"{trial.at(case)}: rank {other} calls {extra.op}, and rank {rank} does not"
                expected = "all ranks make the same collective calls (a barrier is one), not inside `if rank == ...`"
                return trial.failed(case, "hang", said, expected, line_at(extra.where))
    return None


def _different_sizes(trial: Trial, case: int) -> tuple[str, Issued] | None:
    """The first message of the case whose two ends disagree: gloo ends the process that receives it."""
    ends: dict[tuple[int, int, str], list[Issued]] = {}
    for rank in range(trial.world_size):
        for note in _issued(trial, case, rank):
            if note.peer is not None and note.op in ("send", "recv"):
                path = (rank, note.peer) if note.op == "send" else (note.peer, rank)
                ends.setdefault((*path, note.op), []).append(note)
    for (sender, receiver, op), sends in ends.items():
        receives = ends.get((sender, receiver, "recv"), []) if op == "send" else []
        for sent, received in zip(sends, receives, strict=False):
            if (sent.numel, sent.dtype) != (received.numel, received.dtype):
                said = f"rank {sender} sends {sent.numel} {sent.dtype} to rank {receiver}, which receives"
                return f"{said} {received.numel} {received.dtype}", received
    return None


_EXPECTED = {
    "view size is not compatible": "view(-1) needs a contiguous tensor; reshape(-1) makes a copy if it must",
    "contiguous": "a message is one block of memory: send and recv take contiguous tensors only",
    "does not require grad": "messages carry numbers, not graphs: use detach() or torch.no_grad()",
    "0-dim tensor": "a 0-d tensor has no dimension to cut or index: flatten it first",
    "zero-dimensional": "a 0-d tensor has no dimension to cut or index: flatten it first",
    "0 dimension": "a 0-d tensor has no dimension to cut or index: flatten it first",
    "name 'display' is not defined": "print(...) in a rank: display exists in the notebook's own process only",
    "rank should not be the same": "two different ranks; with N = 1 there is nothing to do that takes a message",
    "Invalid destination rank": "ranks run from 0 to N-1, and a rank does not send to itself",
    "must match the size": "tensors of one size",
    "match the broadcast shape": "tensors of one size",
    "to be equal size": "tensors of one size",
}


def _raised(trial: Trial, rank: int, raised: Raised) -> CheckFailed:
    text = re.sub(r"\[enforce fail at [^\]]*\] ", "", (raised.message.strip().splitlines() or [""])[0])
    expected = next((hint for words, hint in _EXPECTED.items() if words in raised.message), "")
    if expected == "tensors of one size" and trial.exercise.startswith("04."):
        expected += ": chunks can differ in size"
    short = [f"{name} has {length}" for name, length in raised.lists if length != trial.world_size]
    if short:
        expected = f"one for each of the {trial.world_size} ranks; here {', '.join(short[:2])}"
    look = line_at(raised.where) or _last_call(trial, rank)
    look += f"; called in {line_at(raised.caller)}" if raised.caller else ""
    said = f"{trial.at(raised.case, rank)}: {raised.type}: {text[:MOST_CHARACTERS]}"
    return trial.failed(raised.case, "crash", said, expected, look)


def _hang(trial: Trial, case: int, error: LaunchError) -> CheckFailed:
    """The launch's report, condensed: who waits for whom, the usual cause, the line of the first rank that waits."""
    returned = [rank for rank, notes in enumerate(trial.notes) if _has_returned(notes)]
    stuck = [standing for standing in error.ranks if standing.rank not in returned]
    said = [f"rank {one.rank} {f'waits in {one.call}' if one.call else f'was {one.doing}'}" for one in stuck]
    said += [f"rank {rank} had returned" for rank in returned]
    more = f"; and {len(said) - MOST_RANKS} more" if len(said) > MOST_RANKS else ""
    lines = error.report.splitlines()
    cause = next((line.partition(": ")[2] for line in lines if line.startswith("Usual cause")), lines[0])
    again = [note for notes in trial.notes for note in notes[-1:] if isinstance(note, Again)]
    if again:
        said_again = f"{trial.at(case)}: rank {again[0].call.rank} waits a second time for the same message"
        expected = "one wait() for each handle: with gloo, a second one never returns"
        return trial.failed(case, "hang", said_again, expected, line_at(again[0].where))
    computing = [one for one in stuck if one.doing == "computing"]
    if error.kind == "timeout" and computing:
        cause = _endless(computing)
    elif returned or not _nobody_could(trial, case, stuck):
        # In the check's own barrier stands who has returned; the report cannot know that.
        cause = _uneven(trial, case, [one.rank for one in stuck])
    line = next((f"{one.place}: {one.source}" for one in computing + stuck if one.source), "")
    if len(stuck) == trial.world_size > 1 and cause.startswith("every rank receives first"):
        said.append("every rank receives first, so nobody sends")
        seen = f"{trial.at(case)}: {'; '.join([*said[: min(MOST_RANKS, len(stuck))], said[-1]])}"
        expected = "a rank that sends first, while others receive first: not all ranks can do the same"
        return trial.failed(case, "hang", seen, expected, line)
    seen = f"{trial.at(case)}: {'; '.join(said[:MOST_RANKS])}{more}"
    return trial.failed(case, "hang", seen, cause, line)


def _nobody_could(trial: Trial, case: int, stuck: list[Standing]) -> bool:
    """Whether all wait in a send, or all in a receive and nothing was sent: then the report's usual cause is right."""
    if all(one.call.startswith("send") for one in stuck):
        return True
    if all(one.call.startswith("recv") for one in stuck):
        return not any(op == "send" for _, _, op in _messages(trial, case))
    return not any(one.call.startswith(("send", "recv")) for one in stuck)


def _messages(trial: Trial, case: int) -> dict[tuple[int, int, str], int]:
    """How many messages of the case were issued: by sender, receiver, and by which of the two."""
    issued: dict[tuple[int, int, str], int] = {}
    for rank in range(trial.world_size):
        for note in _issued(trial, case, rank):
            if note.op in ("send", "recv") and note.peer is not None:
                path = (rank, note.peer) if note.op == "send" else (note.peer, rank)
                issued[*path, note.op] = issued.get((*path, note.op), 0) + 1
    return issued


def _uneven(trial: Trial, case: int, stuck: list[int]) -> str:
    """The sends and receives between two ranks that do not match in number."""
    issued, said = _messages(trial, case), []
    for source, target in sorted({(source, target) for source, target, _ in issued}):
        sends, receives = issued.get((source, target, "send"), 0), issued.get((source, target, "recv"), 0)
        if sends != receives and (source in stuck or target in stuck):
            counted = f"{sends} send{'s' * (sends != 1)} and {receives} recv{'s' * (receives != 1)}"
            said.append(f"{counted} from rank {source} to rank {target}")
    more = f", and {len(said) - MOST_RANKS} more" if len(said) > MOST_RANKS else ""
    if not said:
        return "as many sends as recvs have been made, but they do not meet: by their tags, or in their order"
    return f"a recv for every send; so far {', '.join(said[:MOST_RANKS])}{more}"


def _endless(computing: list[Standing]) -> str:
    if any("is_completed" in one.source for one in computing):
        return "wait(): with gloo, is_completed() does not turn True by itself"
    return f"code that ends: for {TIMEOUT:g} s nothing has moved, no message and no operation on a tensor"


def _has_returned(notes: list[Any]) -> bool:
    return bool(notes) and isinstance(notes[-1], Observation)


def _last_call(trial: Trial, rank: int) -> str:
    calls = [note for note in trial.notes[rank] if isinstance(note, Issued)]
    return line_at(calls[-1].where) if calls else ""
