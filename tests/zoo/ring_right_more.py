"""Lab 04, reduce-scatter and all-gather on a ring: right ones with buffers and handles in their own ways."""

from __future__ import annotations

import torch
import torch.distributed as dist

from . import right
from .ring_right import AG, RS, exchange, ring


@right(RS)
def rs_skips_empty_chunks(chunks):
    """Sends nothing for a chunk without elements: its size is the same on all ranks."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        outgoing, mine = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        incoming = torch.empty_like(mine)
        sending = dist.isend(outgoing, to) if outgoing.numel() else None
        if mine.numel():
            dist.recv(incoming, source)
            mine += incoming
        if sending:
            sending.wait()


@right(AG)
def ag_skips_empty_chunks(chunks):
    """Sends nothing for a chunk without elements."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        outgoing, incoming = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        sending = dist.isend(outgoing, to) if outgoing.numel() else None
        if incoming.numel():
            dist.recv(incoming, source)
        if sending:
            sending.wait()


@right(RS)
def rs_waits_for_sends_at_the_end(chunks):
    """A fresh buffer every step and all sends waited for at the end: no chunk changes after it was sent."""
    rank, n, to, source = ring()
    sends = []
    for step in range(n - 1):
        sends.append(dist.isend(chunks[(rank - step - 1) % n], to))
        mine = chunks[(rank - step - 2) % n]
        incoming = torch.empty_like(mine)
        dist.recv(incoming, source)
        mine += incoming
    for sending in sends:
        sending.wait()


@right(AG)
def ag_posts_all_receives_first(chunks):
    """All receives are posted before the first send; each chunk is forwarded when its own receive is done."""
    rank, n, to, source = ring()
    receives = [dist.irecv(chunks[(rank - step - 1) % n], source) for step in range(n - 1)]
    sends = []
    for step in range(n - 1):
        sends.append(dist.isend(chunks[(rank - step) % n], to))
        receives[step].wait()
    for sending in sends:
        sending.wait()


@right(RS)
def rs_one_scratch_buffer(chunks):
    """One buffer as large as the largest chunk serves all steps."""
    rank, n, to, source = ring()
    scratch = chunks[0].new_empty(max(chunk.numel() for chunk in chunks))
    for step in range(n - 1):
        mine = chunks[(rank - step - 2) % n]
        incoming = scratch[: mine.numel()]
        receiving = dist.irecv(incoming, source)
        dist.isend(chunks[(rank - step - 1) % n], to).wait()
        receiving.wait()
        torch.add(mine, incoming, out=mine)


@right(RS)
def rs_accumulates_in_a_travelling_copy(chunks):
    """What was received plus the own part goes on; only the last sum is written to the own chunk."""
    rank, n, to, source = ring()
    travelling = chunks[(rank - 1) % n].clone()
    for step in range(n - 1):
        own = chunks[(rank - step - 2) % n]
        incoming = torch.empty_like(own)
        exchange(travelling, incoming, to, source)
        travelling = incoming + own
    if n > 1:
        chunks[rank].copy_(travelling)


@right(RS)
def rs_double_buffered_sends(chunks):
    """Waits for a send one step later, before its staging buffer is used again."""
    rank, n, to, source = ring()
    largest = max(chunk.numel() for chunk in chunks)
    staging = [chunks[0].new_empty(largest) for _ in range(2)]
    pending = [None, None]
    for step in range(n - 1):
        slot = step % 2
        if pending[slot] is not None:
            pending[slot].wait()
        outgoing, mine = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        buffer = staging[slot][: outgoing.numel()]
        buffer.copy_(outgoing)
        pending[slot] = dist.isend(buffer, to)
        incoming = torch.empty_like(mine)
        dist.irecv(incoming, source).wait()
        mine += incoming
    for sending in pending:
        if sending is not None:
            sending.wait()


@right(AG)
def ag_receives_into_a_copy(chunks):
    """Receives into a buffer of its own and copies it; keyword arguments."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        target = chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(target)
        sending = dist.isend(tensor=chunks[(rank - step) % n].clone(), dst=to)
        receiving = dist.irecv(tensor=incoming, src=source)
        receiving.wait()
        target.copy_(incoming)
        sending.wait()


@right(AG)
def ag_recursive(chunks, step=0):
    """One step, then itself for the rest; the extra parameter has a default."""
    rank, n, to, source = ring()
    if step == n - 1:
        return chunks
    exchange(chunks[(rank - step) % n], chunks[(rank - step - 1) % n], to, source)
    return ag_recursive(chunks, step + 1)


@right(AG)
def ag_with_tags(chunks):
    """Numbers its messages by tags and waits for the receive first."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        works = (
            dist.isend(chunks[(rank - step) % n], to, tag=step),
            dist.irecv(chunks[(rank - step - 1) % n], source, tag=step),
        )
        for work in reversed(works):
            work.wait()
