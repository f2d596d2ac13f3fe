"""Errors meant for a person: the message is all there is to read, so a notebook shows it without a traceback."""

from __future__ import annotations

import sys
from typing import Any

from .records import Standing


class ShardLabError(Exception):
    """Base of all errors whose message says what was seen, what was expected and what to try."""

    def _render_traceback_(self) -> list[str]:
        # IPython prints these lines instead of a traceback. Notes (`add_note`) say what belongs to the message.
        return [str(self), *getattr(self, "__notes__", ())]


class UsageError(ShardLabError, ValueError):
    """A call or a command was given something it cannot use."""


class CheckFailed(ShardLabError, AssertionError):
    """A solution is not right yet.

    reason: "values", "bytes", "memory", "device", "order", "calls", "rounds", "hang", "crash", "signature" or
    "not written".
    """

    def __init__(self, exercise: str, reason: str, seen: str, expected: str = "", look: str = "") -> None:
        self.exercise, self.reason = exercise, reason
        self.seen, self.expected, self.look = seen, expected, look
        lines = [f"{exercise}: not right yet ({reason})" if reason != "not written" else f"{exercise}: not written yet"]
        lines += [f"  seen:     {seen}"] if seen else []
        lines += [f"  expected: {expected}"] if expected else []
        lines += [f"  look at:  {look}"] if look else []
        super().__init__("\n".join(lines))


class LaunchError(ShardLabError, RuntimeError):
    """A launch did not end well. `report` is the text for the learner; the rest names the cause for programs.

    kind: "raised", "timeout", "deadlock", "died", "exited", "disagree" or "interrupted". rank: the one to blame.
    ranks: where each rank stood. stood_still: of a deadlock, the seconds from the last movement to its discovery.
    """

    def __init__(
        self,
        report: str,
        kind: str,
        rank: int | None = None,
        exception_type: str = "",
        exception_message: str = "",
        ranks: tuple[Standing, ...] = (),
        stood_still: float = 0.0,
    ) -> None:
        super().__init__(report)
        self.report, self.kind, self.rank = report, kind, rank
        self.exception_type, self.exception_message = exception_type, exception_message
        self.ranks, self.stood_still = ranks, stood_still

    def why(self) -> Any:
        """The report as a picture: ranks as nodes, waits as arrows."""
        from .widgets.waits import WaitsPicture  # a floor above: only who wants the picture loads it

        return WaitsPicture(self)


def quiet_exit(error: ShardLabError) -> int:
    """Prints a person's error on the command line, as one message on stderr, and returns exit code 2."""
    print(f"shardlab: {error}", file=sys.stderr)
    return 2
