"""What launch promises when all goes well, and what it says to arguments that cannot work."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from launching import descendants, nothing_left, sum_of_ranks
from shardlab import device, launch
from shardlab.errors import LaunchError, ShardLabError, UsageError
from shardlab.meters import inside_rank

cloudpickle.register_pickle_by_value(sys.modules[__name__])

FACTOR = 10  # a global from "another cell"


def rank() -> int:
    return dist.get_rank()


def scaled() -> int:
    return FACTOR * dist.get_rank()


@dataclasses.dataclass
class Point:
    x: int
    y: torch.Tensor


class Base:
    def __init__(self, start: int) -> None:
        self.start = start

    def total(self) -> int:
        return self.start


class Derived(Base):
    def __init__(self) -> None:
        super().__init__(5)

    def total(self) -> int:
        return super().total() + dist.get_rank()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_in_rank_order(world_size: int) -> None:
    with nothing_left():
        run = launch(rank, world_size)
    assert run.results == list(range(world_size))
    assert (run.world_size, run.device, run.backend) == (world_size, "cpu", "gloo")
    assert run.seconds > 0


def test_64_ranks() -> None:
    with nothing_left():
        assert launch(sum_of_ranks, 64).results == [64 * 63 / 2] * 64


def test_functions_travel_by_value() -> None:
    base = 7
    assert launch(lambda: base + dist.get_rank()).results == [7, 8]
    assert launch(scaled).results == [0, 10]
    assert launch(lambda: Derived().total()).results == [5, 6]
    assert launch(Derived().total).results == [5, 6]
    made = launch(lambda: Point(dist.get_rank(), torch.ones(2))).results
    assert [point.x for point in made] == [0, 1] and isinstance(made[0], Point)


def test_a_redefined_function_is_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch(scaled).results == [0, 10]
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 100)
    assert launch(scaled).results == [0, 100]
    assert launch(lambda: "old").results == ["old"] * 2
    assert launch(lambda: "new").results == ["new"] * 2


def test_arguments_arrive() -> None:
    def add(a: torch.Tensor, b: int, *, c: list) -> torch.Tensor:
        return a + b + sum(c) + dist.get_rank()

    run = launch(add, 2, (torch.ones(2, 3), 2), {"c": [3, 4]})
    assert [result[0, 0].item() for result in run.results] == [10.0, 11.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: None,
        lambda: torch.tensor(3.0),
        lambda: torch.empty(0, 4),
        lambda: torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t(),
        lambda: torch.tensor([1 + 2j]),
        lambda: torch.tensor([True, False]),
        lambda: {"a": [torch.ones(2), (1, "é")], 3: None},
        lambda: torch.nn.Parameter(torch.ones(2)),
        lambda: torch.nn.Linear(2, 2).requires_grad_(False),
    ],
)
def test_every_kind_of_result(make) -> None:
    result, expected = launch(make, 1).results[0], make()
    assert type(result) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert result.dtype == expected.dtype and torch.equal(result, expected)
        assert result.requires_grad == expected.requires_grad
        result.data.view(-1)[:1] = 0  # its own, writable memory
    if isinstance(expected, dict):
        assert result["a"][1] == (1, "é") and torch.equal(result["a"][0], torch.ones(2))


def test_a_view_comes_without_the_rest_of_its_storage() -> None:
    result = launch(lambda: torch.zeros(1000, 1000)[0, :3], 1).results[0]
    assert result.untyped_storage().nbytes() == 12


def test_output_is_relayed_whole_lines_with_the_rank_in_front(capfd: pytest.CaptureFixture) -> None:
    def chatty() -> None:
        print("naïve – 数")
        sys.stderr.write("a warning\n")
        os.write(2, b"noise of a library\n")
        os.system("echo from a child")
        print("bar: 1%\rbar: 100%")
        print("no newline", end="")

    launch(chatty, 2)
    out, err = capfd.readouterr()
    for who in range(2):
        for text in ("naïve – 数", "a warning", "from a child", "bar: 100%", "no newline"):
            assert f"[rank {who}] {text}\n" in out
    assert "noise" not in out and "1%\r" not in out
    assert err == ""


def test_what_a_rank_can_ask() -> None:
    assert launch(lambda: (str(device()), inside_rank(), dist.get_world_size()), 2).results == [("cpu", True, 2)] * 2
    assert not inside_rank()
    assert launch(device, 1, device="cpu").results == [torch.device("cpu")]


def test_ranks_share_the_environment_and_folder_of_the_notebook(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch(rank, 1)  # the forkserver is older than what follows
    monkeypatch.setenv("SHARDLAB_TEST_SETTING", "seen")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside.py").write_text("VALUE = 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def look() -> tuple:
        import beside  # type: ignore[import-not-found]

        return os.environ.get("SHARDLAB_TEST_SETTING"), os.getcwd(), beside.VALUE

    assert launch(look, 1).results == [("seen", str(tmp_path), 42)]


def test_nothing_leaks_from_launch_to_launch() -> None:
    def count() -> int:
        torch.counted = getattr(torch, "counted", 0) + 1  # type: ignore[attr-defined]
        return torch.counted  # type: ignore[attr-defined]

    assert launch(count).results == launch(count).results == [1, 1]


def test_after_multi_threaded_work_in_the_notebook() -> None:
    x = torch.rand(600, 600)
    (x @ x).sum()

    def multiply() -> float:
        return (torch.ones(400, 400) @ torch.ones(400, 400))[0, 0].item()

    assert launch(multiply, 2).results == [400.0, 400.0]


def test_without_meter_there_are_results_but_no_records() -> None:
    run = launch(sum_of_ranks, 2, meter=False)
    assert run.results == [1.0, 1.0] and run.calls == [[], []] and run.memory == [] and run.events == []


def test_from_another_thread() -> None:
    found: list = []
    thread = threading.Thread(target=lambda: found.append(launch(rank, 2).results))
    thread.start()
    thread.join(60)
    assert found == [[0, 1]]


def test_two_launches_at_the_same_time() -> None:
    found: list = [None, None]

    def go(place: int) -> None:
        found[place] = launch(sum_of_ranks, 2 + place).results

    threads = [threading.Thread(target=go, args=(place,)) for place in range(2)]
    with nothing_left():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert found == [[1.0] * 2, [3.0] * 3]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((3,), "needs a function"),
        (("rank",), "needs a function"),
        ((rank, 0), "from 1 to"),
        ((rank, -1), "from 1 to"),
        ((rank, 10_000), "from 1 to"),
        ((rank, "4"), "whole number"),
        ((rank, 2.0), "whole number"),
        ((rank, True), "whole number"),
        ((rank, None), "whole number"),
        ((rank, 2, 5), "args is a tuple"),
        ((rank, 2, "x"), "args is a tuple"),
        ((rank, 2, (), [1]), "kwargs is a dictionary"),
        ((rank, 2, (1,)), "cannot be called with 1 argument"),
        ((rank, 2, (), {"a": 1}), "cannot be called"),
    ],
)
def test_bad_arguments_get_one_clear_line(arguments: tuple, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        launch(*arguments)
    one_clear_line(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "gpu"}, '"auto", "cpu" or "cuda"'),
        ({"device": None}, '"auto", "cpu" or "cuda"'),
        ({"timeout": 0}, "above 0"),
        ({"timeout": "1"}, "above 0"),
        ({"timeout": float("nan")}, "above 0"),
        ({"slow_ranks": [2]}, "from 0 to 1"),
        ({"slow_ranks": 1}, "slow_ranks"),
    ],
)
def test_bad_options_get_one_clear_line(options: dict, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        launch(rank, 2, **options)
    one_clear_line(caught.value)


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="this machine has GPUs enough")
def test_too_few_gpus_are_explained() -> None:
    with pytest.raises(UsageError, match="need 2 GPUs and NCCL; this machine has"):
        launch(rank, 2, device="cuda")


def one_clear_line(error: ShardLabError) -> None:
    assert len(str(error).splitlines()) == 1 and len(str(error)) < 250
    assert error._render_traceback_() == [str(error)]
    assert isinstance(error, ValueError)


def test_a_raise_shows_the_line_and_leaves_nothing() -> None:
    def fails() -> None:
        dist.barrier()
        if dist.get_rank() == 1:
            raise KeyError("missing")
        dist.barrier()

    with nothing_left(), pytest.raises(LaunchError) as caught:
        launch(fails, 3)
    error = caught.value
    assert (error.kind, error.rank, error.exception_type) == ("raised", 1, "KeyError")
    assert error.exception_message == "'missing'"
    line = fails.__code__.co_firstlineno + 3
    assert f"test_launch.py, line {line}, in fails\n      raise KeyError" in error.report
    assert error._render_traceback_() == [error.report]
    assert "site-packages" not in error.report


def test_a_time_out_ends_cleanly() -> None:
    def sleeps() -> None:
        import time

        if dist.get_rank() == 0:
            time.sleep(1000)
        dist.barrier()

    with nothing_left(), pytest.raises(LaunchError, match=r"Nothing moved for 1\.5 s") as caught:
        launch(sleeps, 2, timeout=1.5)
    assert caught.value.kind == "timeout" and caught.value.rank == 0
    assert "time.sleep(1000)" in caught.value.report and "for rank 0" in caught.value.report


def test_the_forkserver_is_all_that_stays() -> None:
    launch(rank, 2)
    assert descendants() == []
