"""In the caller's process: launches trials of a solution and keeps what they showed.

Checks run on the CPU with gloo, also where there are GPUs, so that they say the same everywhere.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import CheckFailed, LaunchError
from ..records import Call, Where
from ..runtime import launch
from ..runtime.places import place, source
from .early import Early
from .exits import calls_exit
from .notes import Case, Observation, read_notes
from .printed import Printout, in_words, read_printed
from .trial import run_trial

TIMEOUT = 8.0  # seconds without any progress, such as one operation on a few thousand numbers; any progress resets it


# A loop that looks at a tensor again and again does make progress. It may, for so many times TIMEOUT.
BUSY = 4


@dataclass(frozen=True)
class Trial:
    """What one launch of a solution showed. notes[r] is what rank r wrote; error is how it ended, None if well.

    printed[c][r]: what the solution printed in case c on rank r.
    """

    exercise: str
    world_size: int
    cases: Sequence[Case]
    notes: list[list[Any]]
    error: LaunchError | None
    printed: list[list[Printout]]

    def observations(self, case: int) -> list[Observation] | None:
        """One per rank; None when some rank did not come to the end of this case."""
        seen = [note for notes in self.notes for note in notes if isinstance(note, Observation) and note.case == case]
        return seen if len(seen) == self.world_size else None

    def early(self, case: int) -> list[Early]:
        """The messages of this case whose buffers were used before they were through."""
        return [note for notes in self.notes for note in notes if isinstance(note, Early) and note.case == case]

    def at(self, case: int, rank: int | None = None) -> str:
        """ "rank 1, N = 3, 9 elements" """
        return f"{'' if rank is None else f'rank {rank}, '}N = {self.world_size}, {self.cases[case].name}"

    def failed(self, case: int, reason: str, seen: str, expected: str = "", look: str = "") -> CheckFailed:
        """The verdict on a fault in this case, with what the solution printed in it as a note."""
        error = CheckFailed(self.exercise, reason, seen, expected, look)
        printed = in_words(self.printed[case])
        if printed:
            error.add_note(printed)
        return error

    @property
    def lines_printed(self) -> int:
        return sum(printout.total for ranks in self.printed for printout in ranks)


IN_RANKS = "rank and world size come from torch.distributed"


def check_signature(exercise: str, solution: Any, parameters: Sequence[str], look: str = IN_RANKS) -> None:
    """Raises CheckFailed("signature") unless `solution` can be called with these positional arguments."""
    expected = f"a function of {len(parameters)} argument{'s' * (len(parameters) > 1)}: ({', '.join(parameters)})"
    name = getattr(solution, "__name__", type(solution).__name__)
    if not callable(solution):
        shown = repr(solution)
        shown = shown if len(shown) < 60 else f"a {type(solution).__name__}"
        raise CheckFailed(exercise, "signature", f"{shown}, which is not a function", expected, "pass it without ()")
    if inspect.iscoroutinefunction(solution) or inspect.isgeneratorfunction(solution):
        look = "its body runs only when it is awaited or iterated over"
        raise CheckFailed(exercise, "signature", f"{name} is a coroutine or a generator", expected, look)
    exits = calls_exit(solution)
    if exits:
        seen = f"{exits[0]}() ends a whole process, here a rank that the others wait for"
        raise CheckFailed(exercise, "crash", seen, "`return`, which ends the function", line_at(exits[1]))
    try:
        signature = inspect.signature(solution)
    except (TypeError, ValueError):
        return  # a built-in; calling it will show
    try:
        signature.bind(*parameters)
    except TypeError:
        raise CheckFailed(exercise, "signature", f"{name}{signature}", expected, look) from None


def observe(
    exercise: str,
    solution: Callable,
    cases: Sequence[Case],
    world_size: int,
    slow: Sequence[int] = (),
    copy_sends: bool = False,
    meter: bool = True,
) -> Trial:
    """Runs all cases in one launch. slow: ranks whose messages complete as late as they may. See `run_trial`.

    meter: False leaves out what the launch measures, and its cost, where a check does not ask for it.
    """
    error = None
    with tempfile.TemporaryDirectory(prefix="shardlab-check-") as folder:
        try:
            launch(
                run_trial,
                world_size,
                (folder, solution, list(cases), copy_sends, BUSY * TIMEOUT),
                device="cpu",
                timeout=TIMEOUT,
                meter=meter,
                slow_ranks=tuple(slow),
            )
        except LaunchError as caught:
            if caught.kind == "interrupted":
                raise
            error = caught
        notes = [read_notes(folder, rank) for rank in range(world_size)]
        printed = [[read_printed(folder, rank, case) for rank in range(world_size)] for case in range(len(cases))]
    return Trial(exercise, world_size, cases, notes, error, printed)


def line_at(where: Where | None) -> str:
    """ "cell In[5], line 3: dist.send(...)" """
    if where is None:
        return ""
    text = source(where.filename, where.line)
    return f"{place(where.filename, where.line)}: {text}" if text else place(where.filename, where.line)


def line_of(call: Call) -> str:
    """The learner's line that made a call."""
    return line_at(call.where)


def unfinished(calls: Sequence[Call]) -> list[Call]:
    """Messages that nobody waited for."""
    return [call for call in calls if call.point_to_point and call.completed is None]
