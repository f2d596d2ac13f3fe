"""Starts the ranks' processes and makes sure that they end."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.spawn
import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import torch.multiprocessing

from . import worker
from .job import Job


def start_method() -> str:
    """forkserver where the system has it (ranks start in milliseconds), else spawn. SHARDLAB_START_METHOD overrides."""
    available = multiprocessing.get_all_start_methods()
    return os.environ.get("SHARDLAB_START_METHOD") or ("forkserver" if "forkserver" in available else "spawn")


def start(job: Job) -> list[Any]:
    """One process per rank, in rank order."""
    method = start_method()
    context = torch.multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["shardlab.runtime.preload"])
    with _without_the_main_script(), _safe_import_path():
        started = torch.multiprocessing.start_processes(
            worker.main, args=(job,), nprocs=job.world_size, join=False, daemon=True, start_method=method
        )
    return list(started.processes)


def end(processes: Sequence[Any]) -> None:
    """Ends all processes and their descendants, and waits for them. They may ignore SIGTERM, so it is SIGKILL."""
    for process in processes:
        _kill_session(process.pid)
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join()
        process.close()


def _kill_session(pid: int) -> None:
    # A rank leads its own session (worker._own_session); what it started, such as data loaders, is in it too.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)


@contextlib.contextmanager
def _without_the_main_script() -> Iterator[None]:
    """Keeps multiprocessing from running the main script again in each rank: functions travel by value."""
    original = multiprocessing.spawn.get_preparation_data

    def preparation_data(name: str) -> dict[str, Any]:
        data = original(name)
        data.pop("init_main_from_name", None)
        data.pop("init_main_from_path", None)
        return data

    multiprocessing.spawn.get_preparation_data = preparation_data
    try:
        yield
    finally:
        multiprocessing.spawn.get_preparation_data = original


@contextlib.contextmanager
def _safe_import_path() -> Iterator[None]:
    """A file named socket.py beside the notebook must not become the forkserver's socket module."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before
