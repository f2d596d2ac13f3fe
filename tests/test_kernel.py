"""The launcher in a real kernel, driven as Jupyter does it: cells, interrupts, restarts, kills."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import nbformat
import psutil
import pytest
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

from launching import MARK, descendants

SHARED = Path(sys.modules["launching"].__file__ or "").parent.parent / "shared"

DEFINITIONS = """\
import os, signal, sys, time
import torch, torch.distributed as dist
from shardlab import launch

x = torch.rand(500, 500)
(x @ x).sum()  # threads that a forked child would wait for in vain

class Base:
    def value(self):
        return 1

class Derived(Base):
    def value(self):
        return super().value() + dist.get_rank()

def total():
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()
"""

RIGHT = "launch(total, 3).results, launch(lambda: Derived().value()).results"
SHOWN = "([3.0, 3.0, 3.0], [1, 2])"

# name: (a cell, what its error must say, in this order)
FAULTS: dict[str, tuple[str, list[str]]] = {
    "raise": (
        "def fn():\n    if dist.get_rank() == 1:\n        {}['key']\n    dist.barrier()\nlaunch(fn, 3)",
        ["Rank 1 raised KeyError: 'key'", "cell In[{n}], line 3, in fn", "{}['key']", "ranks 0 and 2 were waiting"],
    ),
    "exit": (
        "def fn():\n    if dist.get_rank() == 1: sys.exit(3)\n    dist.barrier()\nlaunch(fn, 3)",
        ["Rank 1 called sys.exit(3)", "cell In[{n}], line 2"],
    ),
    "os._exit": (
        "def fn():\n    if dist.get_rank() == 1: os._exit(0)\n    dist.barrier()\nlaunch(fn, 3)",
        ["Rank 1 left with exit code 0", "os._exit"],
    ),
    "killed": (
        "def fn():\n    if dist.get_rank() == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    dist.barrier()\nlaunch(fn, 3)",
        ["Rank 1 was ended by SIGKILL", "memory"],
    ),
    "segmentation fault": (
        "def fn():\n    if dist.get_rank() == 1: os.kill(os.getpid(), signal.SIGSEGV)\n"
        "    dist.barrier()\nlaunch(fn, 3)",
        ["Rank 1 was ended by SIGSEGV"],
    ),
    "loop": (
        "def fn():\n    while dist.get_rank() == 0:\n        pass\n    dist.barrier()\nlaunch(fn, 3, timeout=1.5)",
        ["Nothing moved for 1.5 s", "rank 0 was computing", "cell In[{n}], line", "for rank 0"],
    ),
    "ignores signals": (
        "def fn():\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    if dist.get_rank() == 0: time.sleep(1000)\n"
        "    dist.barrier()\nlaunch(fn, 3, timeout=1.5)",
        ["Nothing moved for 1.5 s", "time.sleep(1000)"],
    ),
    "send first": (
        "def fn():\n    rank, n = dist.get_rank(), dist.get_world_size()\n"
        "    dist.send(torch.ones(8), (rank + 1) % n)\n    dist.recv(torch.ones(8), (rank - 1) % n)\nlaunch(fn, 3)",
        ["Deadlock: rank 0 -> rank 1 -> rank 2 -> rank 0", "cell In[{n}], line 3", "every rank sends first"],
    ),
    "collective on one rank": (
        "def fn():\n    if dist.get_rank() == 0:\n        dist.all_reduce(torch.ones(2))\nlaunch(fn, 3)",
        ["Deadlock: rank 0 waits for ranks 1 and 2", "cell In[{n}], line 3", "if rank == 0"],
    ),
    "in backward hooks": (
        "def fn():\n    w = torch.nn.Parameter(torch.ones(2))\n    if dist.get_rank() == 0:\n"
        "        w.register_hook(lambda g: (dist.all_reduce(g), g)[1])\n    w.sum().backward()\nlaunch(fn, 2)",
        ["Deadlock: rank 0 waits for rank 1", "cell In[{n}], line 4"],
    ),
    "sizes": (
        "def fn():\n    dist.all_reduce(torch.ones(3 + dist.get_rank()))\nlaunch(fn, 2)",
        ["The ranks disagree at call 1", "rank 0: all_reduce (3 float32)", "cell In[{n}], line 2", "(4 float32)"],
    ),
    "order": (
        "def fn():\n    calls = [dist.all_reduce, lambda x: dist.broadcast(x, 0)]\n"
        "    for call in calls if dist.get_rank() else calls[::-1]:\n        call(torch.ones(4))\nlaunch(fn, 3)",
        ["The ranks disagree at call 1", "rank 0: broadcast with root 0"],
    ),
    "result": ("launch(lambda: (i for i in range(3)))", ["returned a generator, which cannot be sent back"]),
    "inside a rank": ("launch(lambda: launch(total))", ["launch was called inside a rank"]),
    "usage": ("launch(total, 'four')", ["world_size is the number of ranks", "'four'"]),
    "captured": ("f = open('/dev/zero', 'wb')\nlaunch(lambda: f)", ["'f'", "cannot be sent to the ranks"]),
}


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """For kernels: ShardLab on the path, and a mark to find their processes by."""
    return {**os.environ, "PYTHONPATH": str(SHARED), MARK: f"kernel {os.getpid()}", "IPYTHONDIR": "/nonexistent"}


def gone(mark: str, seconds: float = 5.0) -> None:
    """All ranks, and the forkserver with its helpers."""
    deadline = time.monotonic() + seconds
    while left := descendants(mark, servers=True):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)


def ranks_of(mark: str) -> list[psutil.Process]:
    """Grandchildren of the kernel: its own children are the forkserver and the like."""
    parents = {process.pid: process.ppid() for process in descendants(mark, servers=True)}
    return [psutil.Process(pid) for pid, parent in parents.items() if parents.get(parent) in parents]


def test_every_fault_in_a_notebook_and_run_all_twice(environment: dict[str, str], tmp_path: Path) -> None:
    cells = [DEFINITIONS, RIGHT]
    for code, _ in FAULTS.values():
        cells += [code, RIGHT]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = NotebookClient(notebook, timeout=60, allow_errors=True, resources={"metadata": {"path": str(tmp_path)}})
    with client.setup_kernel(env=environment):
        for run in range(2):
            for index, cell in enumerate(notebook.cells):
                client.execute_cell(cell, index)
            number = run * len(cells) + 1
            assert not [out for cell in notebook.cells for out in cell.outputs if out.get("name") == "stderr"]
            for (name, (_, says)), fault, right in zip(
                FAULTS.items(), notebook.cells[2::2], notebook.cells[3::2], strict=True
            ):
                number += 2
                assert right.outputs[-1]["data"]["text/plain"] == SHOWN, name
                error = fault.outputs[-1]
                assert error["output_type"] == "error", (name, fault.outputs)
                text = "\n".join(error["traceback"])
                place = 0
                for words in (words.replace("{n}", str(number)) for words in says):
                    assert words in text[place:], f"{name}: {words!r} not in\n{text}"
                    place = text.index(words, place)
                assert "Traceback" not in text and "site-packages" not in text
    gone(environment[MARK])


class Kernel:
    """A kernel and a client that runs cells in it."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self.manager = KernelManager()
        self.manager.start_kernel(env=environment, cwd=str(folder))
        self.connect()

    def connect(self) -> None:
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.cell = ""  # the message that began the cell that runs

    def start(self, code: str) -> None:
        """Begins a cell. The one before must have ended: after an error a kernel drops what waits in its queue."""
        if self.cell:
            while not self._is_end(self.client.get_iopub_msg(timeout=60)):
                pass
        self.cell = self.client.execute(code)

    def _is_end(self, message: dict[str, Any]) -> bool:
        mine = message["parent_header"].get("msg_id") == self.cell
        return mine and message["content"].get("execution_state") == "idle"

    def until(self, text: str, seconds: float = 60) -> str:
        """Reads outputs until one contains `text`; all of them."""
        said = ""
        deadline = time.monotonic() + seconds
        while text not in said:
            try:
                message = self.client.get_iopub_msg(timeout=max(0.01, deadline - time.monotonic()))
            except Empty:
                raise AssertionError(f"{text!r} did not come within {seconds} s; what came: {said}") from None
            content: dict[str, Any] = message["content"]
            said += content.get("text", "") + "\n".join(content.get("traceback", []))
            said += content.get("data", {}).get("text/plain", "")
        return said

    def pid(self) -> int:
        return self.manager.provisioner.pid  # type: ignore[union-attr, attr-defined]


@pytest.fixture
def kernel(environment: dict[str, str], tmp_path: Path) -> Iterator[Kernel]:
    kernel = Kernel(environment, tmp_path)
    yield kernel
    kernel.client.stop_channels()
    kernel.manager.shutdown_kernel(now=True)
    gone(environment[MARK])


WAITS = """
def waits():
    print("running", flush=True)
    if dist.get_rank() == 0:
        time.sleep(1000)
    dist.barrier()
"""


def test_stop_button_redefinition_and_restart(kernel: Kernel, environment: dict[str, str]) -> None:
    kernel.start(DEFINITIONS + WAITS + "launch(waits, 3, timeout=600)")
    kernel.until("running")
    time.sleep(0.5)
    for _ in range(2):
        kernel.manager.interrupt_kernel()
    report = kernel.until("Interrupted", seconds=5)
    assert "rank 0 was computing" in report and "time.sleep(1000)" in report and "for rank 0" in report
    assert not ranks_of(environment[MARK])
    kernel.start(RIGHT)
    kernel.until(SHOWN)
    kernel.start("def total():\n    return 'new'\nlaunch(total).results")
    kernel.until("['new', 'new']")

    kernel.start("launch(waits, 3, timeout=600)")
    kernel.until("running")
    before = ranks_of(environment[MARK])
    assert len(before) >= 3
    kernel.client.stop_channels()
    kernel.manager.restart_kernel(now=True)
    _, alive = psutil.wait_procs(before, timeout=5)
    assert not alive
    kernel.connect()
    kernel.start(DEFINITIONS + RIGHT)
    kernel.until(SHOWN)


def test_stop_button_during_the_first_start(kernel: Kernel, environment: dict[str, str]) -> None:
    kernel.start(DEFINITIONS + WAITS + "print('starting', flush=True)\nlaunch(waits, 16, timeout=600)")
    kernel.until("starting")
    kernel.manager.interrupt_kernel()
    kernel.until("nterrupt", seconds=5)
    kernel.start(RIGHT)
    kernel.until(SHOWN)


def test_killed_kernel(kernel: Kernel, environment: dict[str, str]) -> None:
    kernel.start(DEFINITIONS + WAITS + "launch(waits, 3, timeout=600)")
    kernel.until("running")
    os.kill(kernel.pid(), signal.SIGKILL)
    gone(environment[MARK], seconds=5)


def test_the_picture(kernel: Kernel) -> None:
    kernel.start(
        DEFINITIONS
        + "from shardlab.errors import LaunchError\n"
        + FAULTS["send first"][0].replace(
            "launch(fn, 3)", "try:\n    launch(fn, 3)\nexcept LaunchError as error:\n    picture = error.why()\npicture"
        )
    )
    assert "rank 0 waits for rank 1: send to rank 1 (8 float32)" in kernel.until("rank 2 waits for rank 0")
