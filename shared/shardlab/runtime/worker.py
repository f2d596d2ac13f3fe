"""A rank: the process in which the learner's function runs."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from ..meters import Instruments
from .board import Board
from .door import knock
from .job import Failure, Frame, Job, Outcome, dump, load
from .leash import Leash, end_session
from .writer import Writer

FOREVER = datetime.timedelta(days=7)  # the launcher decides what is too long, not the backend


def main(rank: int, job: Job) -> None:
    """Runs the job's function as rank `rank` and reports. Never returns: the process ends here."""
    _own_session()
    control = _join(rank, job)
    writer = Writer(Board(job.board_file, job.world_size), rank)
    leash = Leash(rank, control, job.launcher, writer.waits)
    message: tuple | Failure
    try:
        message = _work(rank, job, writer)
    except BaseException as error:  # whatever it is, it is the learner's to read
        message = _failure(rank, job, error)
    _finish(leash, message)


def _own_session() -> None:
    """A session of its own: an interrupt of the kernel reaches the launcher alone, and all descendants end together."""
    if hasattr(os, "setsid"):
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Data loaders must be allowed as children, and be forked: their classes are from cells, which nobody could import.
    multiprocessing.current_process().daemon = False
    multiprocessing.set_start_method("fork" if sys.platform == "linux" else "spawn", force=True)


def _join(rank: int, job: Job) -> Connection:
    """Reports to the launcher. When that has given up meanwhile, its folder is gone, and the rank leaves silently."""
    try:
        control = knock(job.address)
        control.send((rank, "control"))
        if hasattr(os, "fork"):
            _send_output_to(job, rank)
    except OSError:
        os._exit(1)
    return control


def _send_output_to(job: Job, rank: int) -> None:
    """Gives descriptors 1 and 2 to the launcher. Python's stderr (warnings) is for the learner, so it joins stdout."""
    for channel, descriptor in (("stdout", 1), ("stderr", 2)):
        connection = knock(job.address)
        connection.send((rank, channel))
        os.dup2(connection.fileno(), descriptor)
        connection.close()
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115


def _work(rank: int, job: Job, writer: Writer) -> tuple:
    _settle(job)
    if job.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        job.backend,
        store=dist.FileStore(str(job.store_file), job.world_size),
        rank=rank,
        world_size=job.world_size,
        timeout=FOREVER,
        device_id=torch.device("cuda", rank) if job.device == "cuda" else None,
    )
    instruments = Instruments(rank, job.began, writer, meter=job.meter, slow=rank in job.slow, link=job.link)
    writer.running()
    with instruments.on():
        fn, args, kwargs = load(job.function_file)  # inside, so that tensors among the arguments count
        result = fn(*args, **kwargs)
    writer.finished()
    tap = instruments.tap
    outcome = Outcome(
        result,
        tap.calls,
        instruments.memory_report(),
        instruments.marks,
        tap.spans.all,
        tap.spans.gradients,
        instruments.states,
    )
    try:
        dump(outcome, job.result_file(rank))
    except OSError as error:
        raise OSError(f"the result could not be written to {job.folder} ({error.strerror})") from None
    except Exception as error:
        raise TypeError(
            f"the function returned a {type(result).__name__}, which cannot be sent back to the notebook ({error}). "
            "Return numbers, strings, tensors, or lists and dictionaries of these."
        ) from None
    return ("finished", rank)


def _settle(job: Job) -> None:
    """Makes this process like the notebook's: its environment (the forkserver's may be older) and its folder."""
    os.environ.clear()
    os.environ.update(job.environment)
    # Named explicitly, gloo needs neither a network nor a host name that resolves.
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
    os.chdir(job.working_directory)
    torch.set_num_threads(job.threads)
    _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Spares the page faults of a large buffer that is made anew every step, which cost a ring a fifth of its time.

    The C library gives a large freed block back to the system, so that each new one is paid for with a fault per page.
    Once it has seen a block of this size freed, it keeps blocks up to that size. This one is never written to: it costs
    no memory.
    """
    torch.empty(30 << 20, dtype=torch.uint8)  # glibc's limit is 32 MiB


def _finish(leash: Leash, message: tuple | Failure) -> None:
    """Reports, then stays until the launcher lets go: a rank that left early would break the others' connections."""
    sys.stdout.flush()
    sys.stderr.flush()
    leash.send(message)
    leash.wait_until_let_go()
    end_session()  # without atexit: tearing down a process group with unfinished operations can hang


def _failure(rank: int, job: Job, error: BaseException) -> Failure:
    try:
        kind, text = "raised", str(error)
    except Exception as unprintable:
        kind, text = "raised", f"(its text cannot be had: {type(unprintable).__name__})"
    if isinstance(error, SystemExit):
        kind, text = "exited", str(0 if error.code is None else error.code)
    frames = tuple(
        Frame(frame.filename, frame.lineno or 0, frame.name) for frame in traceback.extract_tb(error.__traceback__)
    )
    causes = ""
    if error.__cause__ is not None:
        causes = "".join(traceback.format_exception_only(error.__cause__)).strip()
    return Failure(rank, kind, time.monotonic() - job.began, type(error).__name__, text, frames, causes)
