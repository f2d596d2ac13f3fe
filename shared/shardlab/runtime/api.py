"""`launch`: run a function on N ranks and bring back what it returned and what was measured."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from ..errors import LaunchError, UsageError
from ..records import Link, Run
from . import processes, report
from .arguments import Backend, checked, choose_backend, explain_pickling
from .board import Board
from .door import Door
from .interrupts import Interrupts
from .job import Job, Outcome, dump, load
from .monitor import Monitor
from .relay import Relay

LONGEST_SOCKET_PATH = 90  # bytes; systems allow about 104


def launch(
    fn: Callable[..., Any],
    world_size: int = 2,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    device: str = "auto",
    timeout: float = 60.0,
    meter: bool = True,
    slow_ranks: Collection[int] = (),
    link: Link | None = None,
) -> Run:
    """Runs `fn(*args, **kwargs)` on `world_size` processes with torch.distributed initialised.

    fn travels by value, so it may be defined in a notebook's cell and use names from other cells. Each launch gets
    fresh processes: nothing leaks from one to the next. What ranks print appears here, with the rank in front.

    device: "auto" (one GPU per rank with NCCL when there are enough, else the CPU with gloo), "cpu" or "cuda".
    timeout: seconds that may pass without progress of any rank; a deadlock is found without waiting for it.
    meter: False leaves out run.calls, run.traffic, run.events and run.memory, and their cost.
    slow_ranks: ranks whose messages and collectives complete as late as they may (see meters/held.py and late.py), so
    that a missing wait shows every time.
    link: what every rank sends over, a `records.Link`: operations then take the time that its latency and bandwidth say
    (see meters/link.py). Without it they are as fast as the machine is.

    Raises UsageError for arguments that cannot work, and LaunchError, which names the cause, when a rank raises, exits,
    dies, deadlocks or makes no progress. No process is left behind in any case.
    """
    call = checked(fn, world_size, args, kwargs, device, timeout, slow_ranks, link)
    backend = choose_backend(device, world_size)
    working_directory = _working_directory()
    try:
        processes.warm_up()
    except KeyboardInterrupt:
        raise report.interrupted_early() from None
    with Interrupts() as interrupts, _folder() as folder, closing(Door(folder, most_waiting=4 * world_size)) as door:
        began = time.monotonic()
        job = Job(
            folder=str(folder),
            address=door.address,
            world_size=world_size,
            device=backend.device,
            backend=backend.name,
            began=began,
            meter=meter,
            slow=frozenset(slow_ranks),
            link=link,
            threads=max(1, (os.cpu_count() or 1) // world_size),
            working_directory=working_directory,
            environment=dict(os.environ),
            launcher=os.getpid(),
        )
        try:
            board = Board.create(job.board_file, world_size)
            dump(call, job.function_file)
        except OSError as error:
            raise _unusable_folder(error) from None
        except Exception as error:
            raise explain_pickling(call, error) from None
        outcomes = _run(job, board, door, timeout, interrupts)
    return _run_record(job, backend, outcomes, time.monotonic() - began)


def _run(job: Job, board: Board, door: Door, timeout: float, interrupts: Interrupts) -> list[Outcome]:
    relay = Relay(job.world_size)
    ranks: list[Any] = []
    monitor = Monitor(board, ranks, door, relay, timeout, job.began, lambda: interrupts.pressed)
    try:
        for rank in range(job.world_size):
            if not interrupts.pressed:
                ranks.append(processes.start(rank, job))
        faults = monitor.watch()
        if not faults:
            monitor.let_go()
        monitor.drain()
    except OSError as error:
        text = f"Of {job.world_size} ranks only {len(ranks)} could be started ({error}). Try a smaller world_size."
        if len(ranks) < job.world_size:
            raise UsageError(text) from None
        raise
    finally:
        processes.end(ranks)
        monitor.close()
        relay.close()
        board.close()
    if faults:
        interrupts.told = True
        raise report.error_of(faults, relay, timeout, job.meter)
    return [_outcome(job, rank) for rank in range(job.world_size)]


def _outcome(job: Job, rank: int) -> Outcome:
    try:
        return load(job.result_file(rank))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        text = f"What rank {rank} returned cannot be read here ({reason}). Return numbers, strings, tensors, lists."
        raise LaunchError(text, "raised", rank, type(error).__name__, str(error)) from None


def _run_record(job: Job, backend: Backend, outcomes: list[Outcome], seconds: float) -> Run:
    return Run(
        world_size=job.world_size,
        device=backend.device,
        backend=backend.name,
        seconds=seconds,
        results=[outcome.result for outcome in outcomes],
        calls=[outcome.calls for outcome in outcomes],
        memory=[outcome.memory for outcome in outcomes if outcome.memory is not None],
        marks=[outcome.marks for outcome in outcomes],
        spans=[outcome.spans for outcome in outcomes],
        gradients=[outcome.gradients for outcome in outcomes],
        states=[outcome.states for outcome in outcomes],
    )


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        text = "The folder that this notebook runs in has been deleted or moved. Go to another one with os.chdir(...)."
        raise UsageError(text) from None


def _unusable_folder(error: OSError) -> UsageError:
    return UsageError(f"A launch needs room for temporary files ({error}). Free some there, or set TMPDIR.")


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A private folder for the files of one launch, removed afterwards."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="shardlab-"))
    except OSError as error:
        raise _unusable_folder(error) from None
    if len(str(folder)) > LONGEST_SOCKET_PATH:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="shardlab-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
