"""What a rank writes down while a solution is tried, and what a case is: plain data that crosses processes."""

from __future__ import annotations

import inspect
import pickle
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch

from ..meters import is_library
from ..records import Call, Where


@dataclass(frozen=True)
class Finding:
    """What is wrong with the values on one rank, in a learner's words: what was seen, expected, and where to look.

    chunk: the one that is wrong, when `Judged.complete` may tell where it is instead. decoded: whether the words say
    whose parts the numbers hold; plain: the numbers themselves then. parts: how often each one's part is in them.
    """

    seen: str
    expected: str = ""
    look: str = ""
    chunk: int | None = None
    decoded: bool = False
    plain: str = ""
    parts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Judged:
    """digest: a hash of all values that count. Equal digests mean that two runs gave the same, bit for bit.

    unusable: NaN, or an integer type's largest value, stands where a number should be: what memory holds in a trial
    before anything has arrived. complete: the chunks that are complete on this rank, where that is not all of them.
    """

    finding: Finding | None
    digest: str
    unusable: bool = False
    complete: tuple[int, ...] = ()


@dataclass(frozen=True)
class Prepared:
    """One rank's part of a case. judge(returned value) looks at the values; spoil() overwrites what was handed in."""

    args: tuple
    judge: Callable[[Any], Judged]
    spoil: Callable[[], None]


class Case(Protocol):
    """A case is sent to every rank, so it must pickle; `prepare` runs there. name: "9 elements, float64"."""

    @property
    def name(self) -> str: ...

    def prepare(self, rank: int, world_size: int) -> Prepared: ...


@dataclass(frozen=True)
class Begun:
    case: int


@dataclass(frozen=True)
class Issued:
    """A call of the case that is running, noted before it was issued."""

    op: str
    peer: int | None
    numel: int
    dtype: str
    where: Where | None


@dataclass(frozen=True)
class Stranger:
    """A message to or from a rank that does not exist, or that is the rank itself (`alone`)."""

    case: int
    op: str
    peer: int
    where: Where | None
    alone: bool = False


@dataclass(frozen=True)
class Again:
    """A second wait() for a message that is through: with gloo it never returns."""

    case: int
    call: Call
    where: Where | None


@dataclass(frozen=True)
class Endless:
    """The function was ended, because it did far more than its task needs. what: "3,000 calls of ..." """

    case: int
    what: str
    where: Where | None


@dataclass(frozen=True)
class Raised:
    """own: the exception was raised in the learner's code itself, not in something it called. caller: the learner's
    line that called the function of `where`. lists: lists of tensors at hand where it was raised, and their lengths.
    """

    case: int
    type: str
    message: str
    where: Where | None
    own: bool
    caller: Where | None = None
    lists: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Dropped:
    """A message whose handle was thrown away before anybody had waited for it: it may never be sent or arrive."""

    case: int
    call: Call


@dataclass(frozen=True)
class Observation:
    """One rank's view of one case that came to its end. calls: in order, with `completed` None if nobody waited."""

    case: int
    judged: Judged
    calls: list[Call] = field(default_factory=list)


def raised_note(case: int, error: BaseException, solution: Any = None) -> Raised:
    """solution: what was called. An error in the call itself, such as a missing argument, is put down to its first
    line.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_library(frame.filename)]
    places = [Where(frame.filename, frame.lineno or 0, frame.name) for frame in own]
    return Raised(
        case,
        type(error).__name__,
        str(error),
        places[-1] if places else _first_line(solution, error),
        bool(own) and own[-1] is frames[-1],
        places[-2] if len(places) > 1 and _tells_more(places[-2], places[-1]) else None,
        _lists_of_tensors(error.__traceback__) if isinstance(error, IndexError) else (),
    )


def _tells_more(caller: Where, where: Where) -> bool:
    """Whether the caller's line is worth a mention: a generator expression is called on the line that it stands on."""
    return caller.function != where.function and (caller.filename, caller.line) != (where.filename, where.line)


def _first_line(solution: Any, error: BaseException) -> Where | None:
    """Where the function begins that could not be called: a method that the error names, or the solution itself."""
    named = re.match(r"(?:.*\.)?(\w+)\(\) (?:takes|missing|got)", str(error))
    owner = solution if isinstance(solution, type) else type(solution)
    function = inspect.unwrap(getattr(solution, "__func__", solution))
    if not inspect.isfunction(function):
        function = getattr(owner, named[1], None) if named else None
    code = getattr(function, "__code__", None)
    if code is None or is_library(code.co_filename):
        return None
    return Where(code.co_filename, code.co_firstlineno, code.co_name)


def _lists_of_tensors(frame: TracebackType | None) -> tuple[tuple[str, int], ...]:
    """Those among the variables of the innermost function of the learner's."""
    found: tuple[tuple[str, int], ...] = ()
    while frame is not None:
        if not is_library(frame.tb_frame.f_code.co_filename):
            found = tuple(
                (name, len(value))
                for name, value in frame.tb_frame.f_locals.items()
                if isinstance(value, (list, tuple)) and value and all(isinstance(one, torch.Tensor) for one in value)
            )
        frame = frame.tb_next
    return found


def read_notes(folder: str, rank: int) -> list[Any]:
    """What a rank has written, up to where it stopped."""
    notes: list[Any] = []
    path = Path(folder) / str(rank)
    if path.exists():
        with path.open("rb") as file:
            while True:
                try:
                    notes.append(pickle.load(file))
                except (EOFError, pickle.UnpicklingError):
                    break
    return notes
