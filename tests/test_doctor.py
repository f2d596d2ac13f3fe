"""What `python -m shardlab doctor` says, on this machine and on others it is made to believe in."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from shardlab.course import cli, doctor
from shardlab.errors import LaunchError


def pretend_launch(monkeypatch: pytest.MonkeyPatch, launch: object) -> None:
    monkeypatch.setattr("shardlab.launch", launch, raising=False)


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """A real run on two ranks: a machine that runs the tests can do the course."""
    code = cli.main(["doctor"])
    out = capsys.readouterr().out
    assert code == 0, out
    assert torch.__version__ in out and "works on" in out
    assert out.endswith("The course can be worked through on this machine.\n")


def test_exit_code_and_advice_on_a_problem(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise LaunchError("rank 1 did not answer\nmore", "timeout", rank=1)

    pretend_launch(monkeypatch, fails)
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "! 2-rank run" in out and "failed: rank 1 did not answer\n" in out and "try: a firewall" in out


def test_a_wrong_sum_and_a_broken_package_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_launch(monkeypatch, lambda *args, **kwargs: SimpleNamespace(results=[1.0, 0.0], backend="gloo"))
    assert doctor.smoke_run().problem and "wrong sum" in doctor.smoke_run().seen
    pretend_launch(monkeypatch, None)
    assert doctor.smoke_run().problem and "TypeError" in doctor.smoke_run().seen


@pytest.mark.parametrize(
    ("count", "nccl", "said"),
    [
        (0, True, "auto picks gloo on the CPU, because there is no GPU"),
        (1, True, "auto picks NCCL for 1 rank (one GPU each), gloo on the CPU for more"),
        (4, True, "auto picks NCCL for up to 4 ranks"),
        (4, False, "auto picks gloo on the CPU, because this PyTorch has no NCCL"),
    ],
)
def test_backend_and_why(monkeypatch: pytest.MonkeyPatch, count: int, nccl: bool, said: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)
    assert said in doctor.backend().seen
    assert doctor.gpus().seen.startswith(f"{count}: GPU 0" if count else "none found")


def test_missing_widgets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not doctor.widgets().problem
    monkeypatch.setattr("jupyter_core.paths.jupyter_path", lambda *parts: ["/nowhere"])
    finding = doctor.widgets()
    assert finding.problem and "ipywidgets and anywidget" in finding.seen and "reload the page" in finding.advice


def test_missing_torch_and_old_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(doctor, "MINIMUM", (99, 0))
    findings = {finding.what: finding for finding in (doctor.torch_version(), doctor.python(), doctor.gpus())}
    assert findings["PyTorch"].problem and findings["PyTorch"].seen == "not installed"
    assert findings["Python"].problem and not findings["GPUs"].problem
    assert "without PyTorch" in doctor.backend().seen and "without PyTorch" in doctor.smoke_run().seen


def test_report_counts_problems() -> None:
    good = doctor.Finding("Python", "3.11.7")
    bad = doctor.Finding("PyTorch", "not installed", "install it", problem=True)
    assert doctor.report([good, bad]).splitlines() == [
        "  Python   3.11.7",
        "! PyTorch  not installed",
        "           try: install it",
        "",
        "The course cannot be worked through here yet; problems, marked '!': 1.",
    ]
