"""Starts the ranks' processes and makes sure that they end.

With torch.multiprocessing's contexts, but not its start_processes: an interrupt while that starts ranks would leave
behind those it has started, and it makes a temporary file per rank.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.spawn
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch.multiprocessing

from . import worker
from .job import Job

_starting = threading.Lock()  # what start() changes for a moment belongs to the whole process
_warm: list[int] = []  # the process in which the forkserver is known to be ready
END_SECONDS = 10.0  # a process that takes longer to die sits in the operating system, beyond anybody's reach


def start_method() -> str:
    """forkserver where the system has it (ranks start in milliseconds), else spawn. SHARDLAB_START_METHOD overrides."""
    available = multiprocessing.get_all_start_methods()
    return os.environ.get("SHARDLAB_START_METHOD") or ("forkserver" if "forkserver" in available else "spawn")


def warm_up() -> None:
    """Waits until the forkserver has imported torch, the first time. May be interrupted: no rank exists yet."""
    if start_method() != "forkserver" or os.getpid() in _warm:
        return
    with _starting, _as_ranks_are_started():
        multiprocessing.resource_tracker.ensure_running()  # now, because it lifts the block on interrupts
        with _interrupts_blocked():
            multiprocessing.forkserver.ensure_running()  # it inherits the block, or an interrupt would end its imports
    probe = torch.multiprocessing.get_context("forkserver").Process(target=_nothing, daemon=True)
    with _starting, _as_ranks_are_started():
        probe.start()
    probe.join()
    probe.close()
    _warm.append(os.getpid())


def start(rank: int, job: Job) -> Any:
    """The process of a rank."""
    context: Any = torch.multiprocessing.get_context(start_method())
    process = context.Process(target=worker.main, args=(rank, job), daemon=True, name=f"rank {rank}")
    with _starting, _as_ranks_are_started():
        process.start()
    return process


def end(processes: list[Any]) -> None:
    """Ends all processes and their descendants, and waits for them. They may ignore SIGTERM, so it is SIGKILL."""
    for process in processes:
        if process.is_alive():
            end_descendants(process.pid)
            process.kill()
    deadline = time.monotonic() + END_SECONDS
    for process in processes:
        process.join(max(0, deadline - time.monotonic()))
        if process.exitcode is not None:
            process.close()


def end_descendants(pid: int) -> None:
    """Ends what the rank has started, such as data loaders: it is all in the session that the rank leads.

    Works just after the rank's death too, as long as its process id is not in use again.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _nothing() -> None:
    pass


@contextlib.contextmanager
def _as_ranks_are_started() -> Iterator[None]:
    """Keeps multiprocessing from running the main script again in each rank, and from importing the learner's files.

    Functions travel by value. A file named socket.py beside the notebook must not become a rank's socket module.
    """
    multiprocessing.forkserver.set_forkserver_preload(["shardlab.runtime.preload"])
    original = multiprocessing.spawn.get_preparation_data

    def preparation_data(name: str) -> dict[str, Any]:
        data = original(name)
        for key in ("init_main_from_name", "init_main_from_path", "main_path", "dir"):
            data.pop(key, None)
        standard = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
        places = [entry or os.getcwd() for entry in sys.path]
        data["sys_path"] = sorted(places, key=lambda entry: not _is_standard(entry, standard))
        return data

    multiprocessing.spawn.get_preparation_data = preparation_data
    try:
        with _environment(PYTHONSAFEPATH="1", PYTHONPATH=_import_path()):
            yield
    finally:
        multiprocessing.spawn.get_preparation_data = original


def _import_path() -> str:
    """PYTHONPATH with the folder that holds shardlab, or the forkserver, which knows no sys.path, would not find it."""
    home = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    own = [] if os.path.basename(home) in ("site-packages", "dist-packages") else [home]
    return os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH")])])


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _is_standard(entry: str, standard: tuple[str, ...]) -> bool:
    """Whether a place on the import path belongs to Python itself."""
    inside = entry.startswith(standard) and "site-packages" not in entry and "dist-packages" not in entry
    return inside or (entry.endswith(".zip") and os.path.dirname(entry) == os.path.dirname(standard[0]))


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
