"""Helpers of the launcher's tests: what a fault must look like, and that nothing is left behind."""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist

from shardlab import launch
from shardlab.errors import LaunchError
from shardlab.runtime.processes import warm_up

# All processes that a launch starts inherit it, also those that nobody's child any more.
MARK = "SHARDLAB_TEST_PROCESS"
os.environ.setdefault(MARK, uuid.uuid4().hex)
END_SECONDS = 5.0
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # or every rank would import pytest


def sum_of_ranks() -> float:
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    return x.item()


def line_of(fn: Callable, text: str) -> str:
    """Where the first line with `text` of `fn` stands, as reports name it: "test_faults_of_one_rank.py, line 31"."""
    lines, first = inspect.getsourcelines(fn)
    name = os.path.basename(inspect.getsourcefile(fn) or "")
    return f"{name}, line {first + next(n for n, line in enumerate(lines) if text in line)}"


def fault(kind: str, fn: Callable, world_size: int = 3, *args: Any, **options: Any) -> LaunchError:
    """Launches `fn`, which must fail as `kind`; checks that nothing is left and that the next launch is right."""
    with nothing_left(), pytest.raises(LaunchError) as caught:
        launch(fn, world_size, args, **options)
    error = caught.value
    assert error.kind == kind, error.report
    assert len(error.report.splitlines()) <= 5 + 5 * world_size, f"too long:\n{error.report}"
    assert len(error.ranks) == world_size
    with nothing_left():
        assert launch(sum_of_ranks, 2).results == [1.0, 1.0]
    return error


@contextmanager
def nothing_left() -> Iterator[None]:
    """No process and no temporary file is there afterwards that was not before."""
    warm_up()  # the forkserver's own folder stays
    with tempfile.TemporaryDirectory(prefix="launching-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", folder)
        patch.setenv("TMPDIR", folder)
        yield
        deadline = time.monotonic() + END_SECONDS
        while (left := descendants()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, f"left behind: {left}"
        assert os.listdir(folder) == []


def descendants(mark: str | None = None, servers: bool = False) -> list[psutil.Process]:
    """What launches of this process have started and is still there. servers: with the forkserver and the like."""
    mark = mark or os.environ[MARK]
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(MARK) == mark and (servers or process.ppid() != os.getpid()):
                found.append(process)
        except psutil.Error:
            continue
    return found
