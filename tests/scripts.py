"""Scripts that stand for a kernel: what matters is what happens around them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time

from launching import descendants

SCRIPT = """
import os, signal, sys, time, threading
import torch, torch.distributed as dist
from shardlab import launch
from shardlab.errors import LaunchError

def waits():
    print("running", flush=True)
    if dist.get_rank() == 0:
        time.sleep(1000)
    dist.barrier()

def total():
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()
"""


def script(body: str, prefix: tuple[str, ...] = (), cwd: str | None = None, **environment: str) -> subprocess.Popen:
    """A Python process in a process group of its own, with ShardLab on its path. Its output is one pipe."""
    shared = os.path.dirname(os.path.dirname(os.path.dirname(sys.modules["shardlab.runtime"].__file__ or "")))
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", SCRIPT + textwrap.dedent(body)],
        env={**os.environ, "PYTHONPATH": shared, "PYTHONUNBUFFERED": "1", **environment},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ends_right(process: subprocess.Popen, says: str = "right") -> str:
    """Waits for the process; its output."""
    assert process.stdout is not None
    with process.stdout:
        out = process.stdout.read()
    assert process.wait(90) == 0 and says in out, out
    assert "Traceback" not in out, out
    return out


def wait_for(process: subprocess.Popen, text: str) -> str:
    """Reads lines until one contains `text`; that line."""
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return line
    raise AssertionError(f"{text!r} never came")


def gone(mark: str) -> None:
    deadline = time.monotonic() + 5
    while left := descendants(mark, servers=True):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)
