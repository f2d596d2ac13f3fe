"""`check` itself: what it accepts, what it prints, and that it leaves the caller's process alone."""

from __future__ import annotations

import sys
import time
import types
from pathlib import Path

import nbformat
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nbclient import NotebookClient

from shardlab.checks import LABS, check, exercise, exercises, observe
from shardlab.checks.marked import MOST_ELEMENTS, Marks, miscounted
from shardlab.errors import CheckFailed, UsageError
from zoo.ring_right import ring_reduce_scatter

RS = "04.ring_reduce_scatter"
KNOWN = ["04.ring_reduce_scatter", "04.ring_all_gather", "04.ring_all_reduce"]


def failure(solution: object, exercise_id: str = RS) -> CheckFailed:
    with pytest.raises(CheckFailed) as failed:
        check(exercise_id, solution)  # type: ignore[arg-type]
    assert len(str(failed.value).splitlines()) <= 5
    return failed.value


# What can be asked for


def test_an_unknown_exercise_names_the_closest_first() -> None:
    with pytest.raises(UsageError, match=r"Did you mean '04.ring_all_gather'\? Known: 04.ring_all_gather, ") as wrong:
        check("04.ring_al_gather", ring_reduce_scatter)
    assert all(known in str(wrong.value) for known in KNOWN)
    assert "\n" not in str(wrong.value)


@pytest.mark.parametrize("exercise_id", ["", "4", "99.nothing", "ring_all_reduce"])
def test_any_unknown_text_is_answered_in_one_line(exercise_id: str) -> None:
    with pytest.raises(UsageError, match="Did you mean"):
        check(exercise_id, ring_reduce_scatter)


def test_swapped_arguments() -> None:
    with pytest.raises(UsageError, match="the first argument of check is the exercise's id"):
        check(ring_reduce_scatter, RS)  # type: ignore[arg-type]


def test_exercises_are_listed_in_their_order() -> None:
    assert [one.id for one in exercises("04")] == KNOWN
    assert all(one.title for one in exercises())


def test_a_lab_is_added_by_naming_its_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    module = types.ModuleType("checks_of_lab_77")
    monkeypatch.setitem(sys.modules, "checks_of_lab_77", module)
    monkeypatch.setitem(LABS, "77", "checks_of_lab_77")
    monkeypatch.setattr("shardlab.checks._exercises", {})

    @exercise("77.answer", title="The answer")
    def probe(solution) -> str:  # type: ignore[no-untyped-def]
        if solution() != 42:
            raise CheckFailed("77.answer", "values", f"{solution()}", "42")
        return "  it is 42"

    check("77.answer", lambda: 42)
    assert capsys.readouterr().out == "77.answer: right\n  it is 42\n"
    assert failure(lambda: 41, "77.answer").reason == "values"


# What can be handed in


@pytest.mark.parametrize("solution", [None, 3, "ring", [1], lambda: 0, lambda chunks, rank: 0, lambda *, chunks: 0])
def test_what_cannot_be_called_with_one_argument(solution: object) -> None:
    began = time.monotonic()
    failed = failure(solution)
    assert failed.reason == "signature"
    assert "a function of 1 argument: (chunks)" in str(failed)
    assert time.monotonic() - began < 1, "nothing is launched"


def test_coroutines_and_generators_never_run() -> None:
    async def waiting(chunks: list) -> None:
        return None

    def yielding(chunks: list):  # type: ignore[no-untyped-def]
        yield

    assert failure(waiting).reason == failure(yielding).reason == "signature"


def test_a_callable_object_will_do(capsys: pytest.CaptureFixture) -> None:
    class Ring:
        def __call__(self, chunks: list) -> None:
            ring_reduce_scatter(chunks)

    check(RS, Ring())
    assert capsys.readouterr().out.startswith(f"{RS}: right\n")


@pytest.mark.parametrize("exercise_id", KNOWN)
def test_the_stub_of_a_lab_is_not_written_yet(exercise_id: str) -> None:
    def stub(argument: object) -> None:
        raise NotImplementedError("not written yet")

    failed = failure(stub, exercise_id)
    assert failed.reason == "not written"
    assert str(failed).startswith(f"{exercise_id}: not written yet\n")
    assert 'raise NotImplementedError("not written yet")' in str(failed)


# How a run can end


def test_an_empty_function() -> None:
    def nothing(chunks: list) -> None: ...

    failed = failure(nothing)
    assert failed.reason == "values"
    assert "no rank sent anything" in str(failed)


def test_an_endless_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "TIMEOUT", 1.5)

    def endless(chunks: list) -> None:
        while True:
            pass

    failed = failure(endless)
    assert failed.reason == "hang"
    assert "computing" in str(failed)


def test_a_rank_that_dies() -> None:
    def killed(chunks: list) -> None:
        import os
        import signal

        os.kill(os.getpid(), signal.SIGKILL)

    failed = failure(killed)
    assert failed.reason == "crash"
    assert "SIGKILL" in str(failed)


def test_an_exception_of_one_rank_names_rank_case_and_line() -> None:
    def fails(chunks: list) -> None:
        if torch.distributed.get_rank() == 1:
            raise ValueError("a reason\nof two lines")
        ring_reduce_scatter(chunks)

    failed = failure(fails)
    assert failed.reason == "crash"
    assert failed.seen.startswith("rank 1, N = 2, chunks of 3")
    assert failed.seen.endswith("ValueError: a reason")
    assert 'raise ValueError("a reason' in failed.look


# What is left in the caller's process


def test_the_callers_process_is_left_alone(capfd: pytest.CaptureFixture) -> None:
    def chatty(chunks: list) -> None:
        print("what a solution prints is not shown")
        torch.manual_seed(0)
        ring_reduce_scatter(chunks)

    streams, random = (sys.stdout, sys.stderr), torch.get_rng_state()
    assert check(RS, chatty) is None
    assert (sys.stdout, sys.stderr) == streams
    assert torch.equal(torch.get_rng_state(), random)
    assert not torch.distributed.is_initialized()
    assert not torch.are_deterministic_algorithms_enabled()
    out, err = capfd.readouterr()
    assert err == ""
    assert 3 <= len(out.splitlines()) <= 5
    assert out.startswith(f"{RS}: right\n")


def test_a_failure_is_an_assertion_error_shown_without_traceback() -> None:
    failed = CheckFailed(RS, "values", "this", "that", "there")
    assert isinstance(failed, AssertionError)
    assert failed._render_traceback_() == [str(failed)]


CELLS = [
    "import torch.distributed as dist\nfrom shardlab import check",
    "def ring_reduce_scatter(chunks):\n    dist.send(chunks[0], (dist.get_rank() + 1) % dist.get_world_size())\n",
    f"check({RS!r}, ring_reduce_scatter)",
    """
import torch
def ring_reduce_scatter(chunks):
    rank, n = dist.get_rank(), dist.get_world_size()
    for step in range(n - 1):
        mine = chunks[(rank - step - 2) % n]
        incoming = torch.empty_like(mine)
        sending = dist.isend(chunks[(rank - step - 1) % n], (rank + 1) % n)
        dist.recv(incoming, (rank - 1) % n)
        sending.wait()
        mine += incoming
""",
    f"check({RS!r}, ring_reduce_scatter)",
]


def test_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed check shows its message alone, a passed one its verdict; neither writes to stderr or shows a value."""
    monkeypatch.setenv("PYTHONPATH", str(Path(observe.__file__).parents[2]))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    NotebookClient(notebook, timeout=60, allow_errors=True, kernel_name="python3").execute()
    outputs = [cell.outputs for cell in notebook.cells]
    (error,) = outputs[2]
    assert error.output_type == "error"
    assert error.ename == "CheckFailed"
    assert error.traceback == [error.evalue]
    assert error.evalue.startswith(f"{RS}: not right yet (hang)")
    assert "dist.send(chunks[0], (dist.get_rank() + 1) % dist.get_world_size())" in error.evalue
    assert "cell In[2], line 2" in error.evalue
    (verdict,) = outputs[4]
    assert (verdict.output_type, verdict.name) == ("stream", "stdout")
    assert verdict.text.startswith(f"{RS}: right\n")


# Data that says where it came from

DTYPES = [torch.float32, torch.float64, torch.int32, torch.int64]


@given(
    st.sampled_from(DTYPES),
    st.integers(1, 5),
    st.data(),
)
def test_marks_can_be_read_back(dtype: torch.dtype, world_size: int, data: st.DataObject) -> None:
    marks = Marks(world_size, dtype)
    most = (1 << marks.digit_bits) - 1
    counts = data.draw(st.lists(st.integers(0, most), min_size=world_size, max_size=world_size).filter(any))
    position = data.draw(st.integers(0, MOST_ELEMENTS - 1))
    total = torch.zeros(1, dtype=dtype)
    for rank, count in enumerate(counts):
        for _ in range(count):
            total += marks.part(rank, 1, position)
    mark = marks.read(total.item())
    assert mark is not None
    assert (mark.counts, mark.position) == (tuple(counts), position)


@pytest.mark.parametrize("value", [0, -1, 0.5, float("nan"), float("inf"), 77.0, 1e30])
def test_other_numbers_are_no_marks(value: float) -> None:
    assert Marks(3).read(value) is None


def test_parts_of_different_elements_are_told_apart() -> None:
    marks = Marks(3)
    mark = marks.read((marks.part(0, 1, 0) + marks.part(1, 1, 1)).item())
    assert mark is not None
    assert mark.position is None


def test_miscounts_in_words() -> None:
    assert miscounted((1, 1)) == ""
    assert miscounted((0, 2, 0)) == "rank 0's and rank 2's parts are missing, rank 1's part is counted 2 times"
