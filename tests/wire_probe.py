"""Run as a script: moves data in a network namespace of its own and prints, as JSON, what the kernel counted.

A namespace's loopback interface is used by nobody else, so every byte it counts is the ranks'.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import socket
import struct
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from shardlab import reuse
from shardlab.meters import mark
from shardlab.records import Run
from shardlab.runtime import launch

MB = 1 << 20
REPEATS = 5
CANNOT = 77  # exit code: this machine makes no namespaces

CLONE_NEWNET, CLONE_NEWUSER = 0x40000000, 0x10000000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1


def enter_namespace() -> None:
    """Moves this process, and all that it starts from now on, to a new network namespace with only a loopback.

    Raises OSError where the system does not allow it.
    """
    flags = CLONE_NEWNET if os.geteuid() == 0 else CLONE_NEWNET | CLONE_NEWUSER
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), f"unshare: {os.strerror(ctypes.get_errno())}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14s", b"lo", 0, b"")
        name, state, rest = struct.unpack("16sH14s", fcntl.ioctl(any_socket, SIOCGIFFLAGS, request))
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14s", name, state | IFF_UP, rest))


def wire_bytes() -> int:
    """Bytes that the loopback interface of this namespace has sent, headers of the network included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    raise OSError("no loopback interface in /proc/self/net/dev")


def ring_all_reduce(tensor: torch.Tensor) -> None:
    """Reduce-scatter, then all-gather, each from isend and recv to the neighbours."""
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(n)
    for step in range(2 * (n - 1)):
        outgoing, mine = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(mine)
        sending = dist.isend(outgoing, (rank + 1) % n)
        dist.recv(incoming, (rank - 1) % n)
        sending.wait()
        mine.copy_(mine + incoming if step < n - 1 else incoming)


def reduce_scatter(tensor: torch.Tensor) -> None:
    """The library's own."""
    n = dist.get_world_size()
    dist.reduce_scatter(torch.empty(tensor.numel() // n), list(tensor.chunk(n)))


def probe(operation, nbytes: int) -> int:
    operation(torch.ones(4 * dist.get_world_size()))
    tensor = torch.ones(nbytes // 4)
    return count(lambda: operation(tensor))


def probe_step(engine: type, rings: type, nbytes: int) -> int:
    """A training step of a model of nbytes bytes, in eight layers."""
    side = round((nbytes / 4 / 8) ** 0.5)
    model = torch.nn.Sequential(*[torch.nn.Linear(side, side, bias=False) for _ in range(8)])
    trained = engine(model, bucket_bytes=nbytes // 2, communicator=rings())

    def step() -> None:
        trained.zero_grad()
        trained.backward(trained(torch.ones(1, side)).sum())
        trained.step()

    step()
    return count(step)


def count(operation) -> int:
    """Bytes on the wire, of all ranks, while `operation` works: the least of several times.

    Connections are there before. On a busy machine the system sends some packets twice, which only ever adds.
    """
    counts = []
    for _ in range(REPEATS):
        dist.barrier()
        before = wire_bytes()
        dist.barrier()
        mark("begin")
        operation()
        mark("end")
        dist.barrier()
        counts.append(wire_bytes() - before)
    return min(counts)


def metered(run: Run) -> float:
    """What the meter says that all ranks sent, each time, between their two marks."""
    total = 0.0
    for calls, marks in zip(run.calls, run.marks, strict=True):
        for begin, end in zip(marks[::2], marks[1::2], strict=True):
            total += sum(call.sent for call in calls if begin.time < call.issued < end.time)
    return total / REPEATS


def main() -> None:
    try:
        enter_namespace()
    except OSError as error:
        print(error)
        sys.exit(CANNOT)
    found = {}
    for operation, world_size in [
        (ring_all_reduce, 2),
        (ring_all_reduce, 3),
        (ring_all_reduce, 4),
        (reduce_scatter, 4),
    ]:
        run = launch(probe, world_size, args=(operation, 4 * MB), device="cpu", timeout=30)
        found[f"{operation.__name__} {world_size}"] = {"wire": run.results[0], "meter": metered(run)}
    zero1 = reuse("06_zero1")
    for engine in (zero1.Zero1, reuse("07_zero2").Zero2, reuse("08_zero3").Zero3):
        run = launch(probe_step, 3, args=(engine, zero1.Rings, 4 * MB), device="cpu", timeout=30)
        found[engine.__name__] = {"wire": run.results[0], "meter": metered(run)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
