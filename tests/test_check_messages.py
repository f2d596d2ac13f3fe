"""What a failed check shows besides its verdict: what the function printed, and lines of code."""

from __future__ import annotations

import re
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
import torch
import torch.distributed as dist
from nbclient import NotebookClient

from shardlab.checks import check, observe
from shardlab.checks.early import POLLS, EarlyUse
from shardlab.checks.exits import calls_exit
from shardlab.checks.notes import raised_note
from shardlab.checks.printed import MOST_COLUMNS, Listener, Printout, in_words, read_printed
from shardlab.errors import CheckFailed
from zoo.ring_right import exchange, ring, ring_reduce_scatter
from zoo.ring_wrong_all_reduce import ar_torch_chunk

RS = "04.ring_reduce_scatter"


def failure(solution: object, exercise_id: str = RS) -> tuple[CheckFailed, str]:
    """The error, and the text that follows its message."""
    with pytest.raises(CheckFailed) as failed:
        check(exercise_id, solution)  # type: ignore[arg-type]
    assert len(str(failed.value).splitlines()) <= 5
    shown = failed.value._render_traceback_()
    assert shown[0] == str(failed.value), "the verdict comes first"
    return failed.value, "\n".join(shown[1:])


# What is printed


def chatty(chunks: list) -> None:
    """Right at N = 2; at N = 3 the index does not move."""
    rank, n, to, source = ring()
    print("I am", rank)
    for step in range(n - 1):
        mine = chunks[rank]
        incoming = torch.empty_like(mine)
        exchange(chunks[(rank + 1) % n], incoming, to, source)
        print("step", step, "received", incoming.tolist(), file=sys.stderr)
        mine += incoming


def test_a_failed_check_shows_what_was_printed_in_the_failing_case(capfd: pytest.CaptureFixture) -> None:
    failed, printed = failure(chatty)
    assert failed.seen.startswith("rank 0, N = 3, chunks of 3")
    first, *lines = printed.splitlines()
    assert first == "your function printed:"
    assert len(lines) == 3 * 3, "of this case alone"
    assert sorted(lines)[:2] == [
        "  [rank 0] I am 0",
        f"  [rank 0] step 0 received {sorted(lines)[1].partition('received ')[2]}",
    ]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("exercise_id", [RS, "04.ring_all_gather", "04.ring_all_reduce"])
def test_of_many_lines_the_last_are_shown(exercise_id: str) -> None:
    def prints_and_raises(argument: object) -> None:
        for number in range(67):
            print("line", number)
        dist.barrier()
        raise ValueError

    _, printed = failure(prints_and_raises, exercise_id)
    first, *lines = printed.splitlines()
    assert first == "your function printed (last 20 of 134 lines):"
    assert len(lines) == 20
    assert {"  [rank 0] line 66", "  [rank 1] line 66"} & set(lines)


def test_a_loop_that_prints_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "TIMEOUT", 1.5)

    def endless(chunks: list) -> None:
        number = 0
        while True:
            number += 1
            print(number)

    failed, printed = failure(endless)
    assert failed.reason == "hang"
    assert printed.startswith("your function printed (last 20 of ")
    assert len(printed.splitlines()) == 21


def test_a_rank_that_is_killed_leaves_what_it_printed() -> None:
    def killed(chunks: list) -> None:
        import os
        import signal

        print("no end of line", end="")
        os.kill(os.getpid(), signal.SIGKILL)

    failed, printed = failure(killed)
    assert failed.reason == "crash"
    assert "  [rank 0] no end of line" in printed or "  [rank 1] no end of line" in printed


def test_a_passed_check_counts_lines(capfd: pytest.CaptureFixture) -> None:
    def two_lines(chunks: list) -> None:
        if dist.get_world_size() == 1 and len(chunks[0]) == 3:
            print("one\ntwo")
        ring_reduce_scatter(chunks)

    check(RS, two_lines)
    out, err = capfd.readouterr()
    assert err == ""
    assert out.splitlines()[-1] == "  your function printed 4 lines; they are not shown here"  # in two cases
    check(RS, ring_reduce_scatter)
    assert "printed" not in capfd.readouterr().out


def test_in_a_notebook_the_printed_lines_follow_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(observe.__file__).parents[2]))
    cells = [
        "from shardlab import check\ndef ring_reduce_scatter(chunks):\n    print('here')\n",
        f"check({RS!r}, ring_reduce_scatter)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=60, allow_errors=True, kernel_name="python3").execute()
    (error,) = notebook.cells[1].outputs
    assert error.output_type == "error"
    verdict, printed = error.traceback
    assert verdict == error.evalue
    assert printed.splitlines() == ["your function printed:", "  [rank 0] here", "  [rank 1] here"] or (
        printed.splitlines() == ["your function printed:", "  [rank 1] here", "  [rank 0] here"]
    )


def test_lines_of_all_ranks_in_their_order(tmp_path: Path) -> None:
    folder = str(tmp_path)
    ranks = [Listener(folder, rank) for rank in range(2)]
    for listener in ranks:
        listener.begin(3)
    print("first", file=ranks[1])
    print("second\nthird", file=ranks[0])
    print("fourth, " + "long " * MOST_COLUMNS, end="", file=ranks[1])
    printed = [read_printed(folder, rank, 3) for rank in range(2)]
    lines = in_words(printed).splitlines()
    assert lines[1:4] == ["  [rank 1] first", "  [rank 0] second", "  [rank 0] third"]
    assert lines[4].startswith("  [rank 1] fourth, long")
    assert len(lines[4]) < MOST_COLUMNS + 20
    assert read_printed(folder, 0, 0) == Printout(0, ())
    assert in_words([Printout(0, ())]) == ""


# Lines of code


def test_an_index_error_names_the_short_list_and_both_functions() -> None:
    failed, _ = failure(ar_torch_chunk, "04.ring_all_reduce")
    assert "1 element" in failed.seen
    assert failed.expected == "one for each of the 2 ranks; here chunks has 1"
    assert re.search(r"ring_right.py, line (31: outgoing|32: mine) = chunks\[", failed.look), (
        "whichever rank comes first"
    )
    assert "called in ring_wrong_all_reduce.py, line 20: ring_reduce_scatter(chunks)" in failed.look


def test_an_endless_loop_names_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "TIMEOUT", 1.5)

    def endless(chunks: list) -> None:
        step = 0
        while step < 1:
            chunks.sort(key=len)

    failed, _ = failure(endless)
    assert failed.reason == "hang"
    assert "code that ends" in failed.expected
    assert "while step < 1:" in failed.look or "chunks.sort" in failed.look


class Forgetful:
    """A solution whose helper has no `self`, and whose call goes through."""

    def __call__(self, token: torch.Tensor, mine: torch.Tensor) -> None:
        self.add(token, mine)

    def add(token, mine):  # type: ignore[no-untyped-def]  # noqa: N805
        token += mine


def test_a_wrong_number_of_arguments_has_a_place() -> None:
    message = str(failure(Forgetful(), "00.pass_the_token")[0])
    assert "takes 2 positional arguments but 3 were given" in message and "self.add(token, mine)" in message


@pytest.mark.parametrize("call", [Forgetful().add, Forgetful.add])
def test_an_error_in_the_call_itself_is_put_down_to_the_first_line(call: Callable) -> None:
    solution = Forgetful if call is Forgetful.add else call
    with pytest.raises(TypeError) as raised:
        call(1, 2, 3)
    raised.value.__traceback__ = None  # the check makes this call, and no line of the learner's
    where = raised_note(0, raised.value, solution).where
    assert where is not None and where.function == "add" and where.filename == __file__


def test_a_line_is_said_once() -> None:
    def sums(numbers: list[int]) -> int:
        return sum(1 // number for number in numbers)

    with pytest.raises(ZeroDivisionError) as raised:
        sums([0])
    assert raised_note(0, raised.value).caller != raised_note(0, raised.value).where
    inner = raised_note(0, raised.value)
    assert inner.where is not None and inner.where.function == "<genexpr>"
    assert inner.caller is None


def test_exit_of_a_notebook() -> None:
    from IPython.core.autocall import ExitAutocall  # not for the ranks, which load this module

    def ends(token: torch.Tensor, mine: torch.Tensor) -> None:
        if token.numel():
            exit()

    solution = types.FunctionType(ends.__code__, {"exit": ExitAutocall()}, "ends")
    message = str(failure(solution, "00.pass_the_token")[0])
    assert "exit() ends a whole process" in message and "`return`" in message and "exit()" in message.splitlines()[-1]
    assert calls_exit(ends) is None  # Python's own travels, and the launch says what it does


def test_a_rank_that_only_computes_for_long_is_no_fault() -> None:
    ended: list[bool] = []
    watch = EarlyUse(lambda *_: None, 10_000, 0.05, ended.append)
    with watch:
        for _ in range(3):
            for _ in range(POLLS):
                torch.zeros(1)
            time.sleep(0.1)
            watch.communicated()
    assert ended == []
    with watch:
        for _ in range(POLLS + 2):
            torch.zeros(1)
        time.sleep(0.1)
        torch.zeros(1)
    assert ended[-1:] == [True]
