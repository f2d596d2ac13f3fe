"""Lab 04: right ones that reach the library, or the memory, in other ways."""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist

from . import right
from .ring_right import AG, RS, exchange, ring, ring_reduce_scatter
from .ring_right_all_reduce import AR, ring_all_reduce


@right(AG)
def ag_receives_in_a_thread(chunks):
    """The blocking receive runs in a thread of its own, while this one sends."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        thread = threading.Thread(target=dist.recv, args=(chunks[(rank - step - 1) % n], source))
        thread.start()
        sending = dist.isend(chunks[(rank - step) % n], to)
        thread.join()
        sending.wait()


@right(RS)
def rs_bytes_on_the_wire(chunks):
    """Sends the chunks as bytes, in a group that it makes itself."""
    rank, n, to, source = ring()
    group = dist.new_group(list(range(n)))
    for step in range(n - 1):
        mine = chunks[(rank - step - 2) % n]
        incoming = torch.empty_like(mine)
        receiving = dist.irecv(incoming.view(torch.uint8), source, group=group)
        dist.send(chunks[(rank - step - 1) % n].view(torch.uint8), to, group=group)
        receiving.wait()
        mine += incoming


@right(RS)
def rs_waits_for_sends_last_to_first(chunks):
    """Handles in a dictionary by step, waited for in reverse; looks at a buffer too early, but only to print it."""
    rank, n, to, source = ring()
    sends = {}
    for step in range(n - 1):
        mine = chunks[(rank - step - 2) % n]
        incoming = torch.empty_like(mine)
        receiving = dist.irecv(incoming, source)
        sends[step] = dist.isend(chunks[(rank - step - 1) % n], to)
        print("on its way into", incoming[:2])
        receiving.wait()
        mine += incoming
    for step in reversed(sends):
        sends[step].wait()


@right(RS)
def rs_element_by_element(chunks):
    """Adds number by number in Python, with two ranks: some ten thousand operations."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        mine = chunks[(rank - step - 2) % n]
        incoming = torch.empty_like(mine)
        exchange(chunks[(rank - step - 1) % n], incoming, to, source)
        if n > 2:
            mine += incoming
            continue
        for index in range(len(mine)):
            mine[index] += incoming[index]


@right(RS)
def rs_works_on_clones(chunks):
    """Works on copies, copies all of them back, and clears what nobody needs."""
    copies = [chunk.clone() for chunk in chunks]
    ring_reduce_scatter(copies)
    for number, (chunk, copy) in enumerate(zip(chunks, copies, strict=True)):
        chunk.copy_(copy if number == dist.get_rank() else torch.zeros_like(copy))


@right(AR)
def ar_numbers_chunks_backwards(tensor):
    """Cuts a flat copy, turns the list round, and sets data to itself."""
    flat = tensor.reshape(-1).flip(0)
    ring_all_reduce(flat)
    tensor.copy_(flat.flip(0).view(tensor.shape))
    tensor.data = tensor.data
