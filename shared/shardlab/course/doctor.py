"""What this machine can do, in plain words: `python -m shardlab doctor`."""

from __future__ import annotations

import importlib
import shutil
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shardlab.errors import ShardLabError

WIDGETS = {"@jupyter-widgets/jupyterlab-manager": "ipywidgets", "anywidget": "anywidget"}
GIB = 2**30
MINIMUM = (3, 11)


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `advice` says what to try; a `problem` keeps the course from being worked through."""

    what: str
    seen: str
    advice: str = ""
    problem: bool = False


def examine() -> list[Finding]:
    """Looks at everything the course needs; the smoke run comes last, because it needs the rest."""
    findings = [python(), torch_version(), gpus(), backend(), start_method()]
    findings += [jupyterlab(), widgets(), chromium(), shared_memory(), disk()]
    return [*findings, smoke_run()]


def report(findings: list[Finding]) -> str:
    """One line a finding, what to try below it, and the verdict."""
    width = max(len(finding.what) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{'!' if finding.problem else ' '} {finding.what.ljust(width)}  {finding.seen}")
        lines += [f"  {' ' * width}  try: {finding.advice}"] if finding.advice else []
    problems = sum(finding.problem for finding in findings)
    verdict = "The course can be worked through on this machine."
    if problems:
        verdict = f"The course cannot be worked through here yet; problems, marked '!': {problems}."
    return "\n".join([*lines, "", verdict])


def python() -> Finding:
    have = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < MINIMUM:
        return Finding("Python", have, "Python 3.11 or newer", problem=True)
    return Finding("Python", f"{have} ({sys.executable})")


def torch_version() -> Finding:
    torch = _torch()
    if torch is None:
        return Finding("PyTorch", "not installed", "make lab, or: pip install -r requirements.txt", problem=True)
    if not torch.distributed.is_available():
        return Finding("PyTorch", f"{torch.__version__} without torch.distributed", "another build", problem=True)
    return Finding("PyTorch", torch.__version__)


def gpus() -> Finding:
    torch = _torch()
    count = torch.cuda.device_count() if torch is not None else 0
    if not count:
        return Finding("GPUs", "none found, and none are needed")
    names = [torch.cuda.get_device_name(index) for index in range(count)]
    return Finding("GPUs", f"{count}: {', '.join(names)}")


def backend() -> Finding:
    """What device="auto" picks, and why."""
    torch = _torch()
    if torch is None:
        return Finding("backend", "unknown without PyTorch")
    count = torch.cuda.device_count()
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    if count and has_nccl:
        ranks = "1 rank" if count == 1 else f"up to {count} ranks"
        return Finding("backend", f"auto picks NCCL for {ranks} (one GPU each), gloo on the CPU for more")
    why = "there is no GPU" if not count else "this PyTorch has no NCCL"
    return Finding("backend", f"auto picks gloo on the CPU, because {why}")


def start_method() -> Finding:
    import multiprocessing

    if "forkserver" in multiprocessing.get_all_start_methods():
        return Finding("start method", "forkserver: a launch takes about 0.1 s after the first")
    return Finding("start method", "spawn: this system has no forkserver, so a launch takes some seconds")


def jupyterlab() -> Finding:
    try:
        return Finding("JupyterLab", version("jupyterlab"))
    except PackageNotFoundError:
        return Finding("JupyterLab", "not installed", "pip install -r requirements.txt", problem=True)


def widgets() -> Finding:
    """Pictures need the browser half of ipywidgets and anywidget, which JupyterLab finds as a folder."""
    try:
        from jupyter_core.paths import jupyter_path
    except ModuleNotFoundError:
        return Finding("widgets", "unknown without JupyterLab")
    missing = []
    for extension, package in WIDGETS.items():
        found = any((Path(folder) / extension / "package.json").exists() for folder in jupyter_path("labextensions"))
        if not found:
            missing.append(package)
    if missing:
        advice = f"pip install --force-reinstall {' '.join(missing)}, then reload the page"
        return Finding("widgets", f"JupyterLab does not find {' and '.join(missing)}", advice, problem=True)
    return Finding("widgets", "JupyterLab finds ipywidgets and anywidget")


def chromium() -> Finding:
    names = ["chromium", "chromium-browser", "google-chrome"]
    found = next(filter(None, map(shutil.which, names)), None)
    return Finding("Chromium", found or "not found; only the course's own browser tests need it")


def shared_memory() -> Finding:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Finding("shared memory", "no /dev/shm on this system; fine for gloo")
    total = shutil.disk_usage(folder).total
    seen = f"/dev/shm has {total / GIB:.2g} GiB"
    if total < GIB // 4:
        return Finding("shared memory", seen, "in a container, --shm-size=1g, if a run with NCCL fails")
    return Finding("shared memory", seen)


def disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    seen = f"{free / GIB:.3g} GiB free here"
    return Finding("disk", seen, "free some space: notebooks and their outputs are kept here" if free < GIB else "")


def smoke_run() -> Finding:
    """Two real ranks add their ranks up."""
    what = "2-rank run"
    if _torch() is None:
        return Finding(what, "not tried without PyTorch")
    began = time.monotonic()
    try:
        launch = importlib.import_module("shardlab").launch
        run = launch(_add_up, world_size=2, device="auto", timeout=60)
    except ShardLabError as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return Finding(what, f"failed: {first}", "a firewall that lets the loopback interface through", problem=True)
    except Exception as error:
        return Finding(what, f"failed: {type(error).__name__}: {error}", "reinstall: pip install -e .", problem=True)
    if run.results != [1.0, 1.0]:
        return Finding(what, f"wrong sum: {run.results}, expected [1.0, 1.0]", "reinstall PyTorch", problem=True)
    return Finding(what, f"works on {run.backend}, {time.monotonic() - began:.1f} s with starting up")


def _add_up() -> float:
    """Runs on a rank: the sum of all ranks' numbers."""
    import torch
    import torch.distributed as dist

    from shardlab import device

    total = torch.tensor(float(dist.get_rank()), device=device())
    dist.all_reduce(total)
    return total.item()


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError:
        return None
