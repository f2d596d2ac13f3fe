"""Lab 04, reduce-scatter on a ring: plausible mistakes, and what the check must say of each."""

from __future__ import annotations

import torch
import torch.distributed as dist

from . import wrong
from .ring_right import RS, exchange, ring, ring_reduce_scatter


@wrong(RS, reason="values", says=r"chunk 1 is complete there instead")
def rs_ends_one_chunk_too_far(chunks):
    """Starts with its own chunk, so rank r ends with chunk r+1."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        mine = chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(mine)
        exchange(chunks[(rank - step) % n], incoming, to, source)
        mine += incoming


@wrong(RS, reason="values", says=r"N = 3")
def rs_index_runs_the_wrong_way(chunks):
    """Sends to the right but counts the chunks as if it sent to the left. At N = 2 both are the same."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        mine = chunks[(rank + step + 2) % n]
        incoming = torch.empty_like(mine)
        exchange(chunks[(rank + step + 1) % n], incoming, to, source)
        mine += incoming


@wrong(RS, reason="values", says=r"N = 3")
def rs_same_chunk_every_step(chunks):
    """Forgets to let the index move: right at N = 2, where there is one step."""
    rank, n, to, source = ring()
    for _ in range(n - 1):
        mine = chunks[rank]
        incoming = torch.empty_like(mine)
        exchange(chunks[(rank + 1) % n], incoming, to, source)
        mine += incoming


@wrong(RS, reason="bytes", says=r"how many steps")
def rs_n_steps(chunks):
    """N steps instead of N-1; the last one goes into a buffer that nobody reads, so the values are right."""
    rank, n, to, source = ring()
    for step in range(n):
        mine = chunks[(rank - step - 2) % n]
        incoming = torch.empty_like(mine)
        exchange(chunks[(rank - step - 1) % n], incoming, to, source) if n > 1 else None
        if step < n - 1:
            mine += incoming


@wrong(RS, reason="hang", says=r"(?s)rank 0.*send.*rank 1")
def rs_send_first_blocking(chunks):
    """Every rank sends first, with the blocking call."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        mine = chunks[(rank - step - 2) % n]
        incoming = torch.empty_like(mine)
        dist.send(chunks[(rank - step - 1) % n], to)
        dist.recv(incoming, source)
        mine += incoming


@wrong(RS, reason="hang", says=r"N = 3")
def rs_even_odd_rounds(chunks):
    """Even ranks send, a barrier, odd ranks send. At odd N two even ranks are neighbours."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        mine = chunks[(rank - step - 2) % n]
        outgoing, incoming = chunks[(rank - step - 1) % n], torch.empty_like(mine)
        for sender in (0, 1):
            if rank % 2 == sender:
                dist.send(outgoing, to)
            else:
                dist.recv(incoming, source)
            dist.barrier()
        mine += incoming


@wrong(RS, reason="order", says=r"before .*send")
def rs_staging_buffer_reused(chunks):
    """Copies what it sends into one staging buffer and fills it again before the last send is done."""
    rank, n, to, source = ring()
    staging = chunks[0].new_empty(max(chunk.numel() for chunk in chunks))
    sends = []
    for step in range(n - 1):
        outgoing, mine = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        staging[: outgoing.numel()] = outgoing
        sends.append(dist.isend(staging[: outgoing.numel()], to))
        incoming = torch.empty_like(mine)
        dist.recv(incoming, source)
        mine += incoming
    for sending in sends:
        sending.wait()


@wrong(RS, reason="order", says=r"wait")
def rs_never_waits_for_irecv(chunks):
    """Adds what irecv was to bring, without waiting for it."""
    rank, n, to, source = ring()
    handles = []
    for step in range(n - 1):
        mine = chunks[(rank - step - 2) % n]
        incoming = torch.zeros_like(mine)
        handles.append(dist.irecv(incoming, source))
        dist.isend(chunks[(rank - step - 1) % n], to).wait()
        mine += incoming


@wrong(RS, reason="bytes", says=r"whole")
def rs_whole_tensor_every_step(chunks):
    """Sends all chunks in every step and adds the one it needs."""
    rank, n, to, source = ring()
    travelling = torch.cat(list(chunks))
    sizes = [len(chunk) for chunk in chunks]
    for _ in range(n - 1):
        incoming = torch.empty_like(travelling)
        exchange(travelling, incoming, to, source)
        travelling = incoming
        chunks[rank] += torch.split(incoming, sizes)[rank]


@wrong(RS, reason="calls", says=r"all_reduce")
def rs_library_all_reduce(chunks):
    """Lets the library do the sum."""
    for chunk in chunks:
        dist.all_reduce(chunk)


@wrong(RS, reason="calls", says=r"reduce")
def rs_library_reduce_to_owner(chunks):
    """Reduces every chunk to its owner with the library's collective."""
    for owner, chunk in enumerate(chunks):
        dist.reduce(chunk, dst=owner)


@wrong(RS, reason="bytes", says=r"(?s)rank 0 only.*busiest")
def rs_through_rank_zero(chunks):
    """Everyone sends all chunks to rank 0, which adds and hands every chunk to its owner."""
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        for source in range(1, n):
            for chunk in chunks:
                incoming = torch.empty_like(chunk)
                dist.recv(incoming, source)
                chunk += incoming
        for owner in range(1, n):
            dist.send(chunks[owner], owner)
    else:
        for chunk in chunks:
            dist.send(chunk, 0)
        dist.recv(chunks[rank], 0)


@wrong(RS, reason="crash", says=r"sends 4 float64 .*receives 4 float32")
def rs_float32_buffer(chunks):
    """The receive buffer is float32, whatever the chunks are."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        mine = chunks[(rank - step - 2) % n]
        incoming = torch.empty(mine.numel())
        exchange(chunks[(rank - step - 1) % n], incoming, to, source)
        mine += incoming.to(mine.dtype)


@wrong(RS, reason="values", says=r"(?s)no chunk has changed.*no rank sent anything")
def rs_one_step_short(chunks):
    """N-2 steps: one rank's part is missing everywhere; at N = 2 nothing happens."""
    rank, n, to, source = ring()
    for step in range(1, n - 1):
        mine = chunks[(rank - step - 2) % n]
        incoming = torch.empty_like(mine)
        exchange(chunks[(rank - step - 1) % n], incoming, to, source)
        mine += incoming


@wrong(RS, reason="values", says=r"rank 0's part is missing")
def rs_copies_instead_of_adding(chunks):
    """Receives straight into the chunk: what was there is lost."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        exchange(chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n], to, source)


@wrong(RS, reason="values", says=r"in place")
def rs_new_tensors_in_the_list(chunks):
    """`a = a + b` makes a new tensor; the list gets it, the tensor handed in keeps its old values."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        target = (rank - step - 2) % n
        incoming = torch.empty_like(chunks[target])
        exchange(chunks[(rank - step - 1) % n], incoming, to, source)
        chunks[target] = chunks[target] + incoming


@wrong(RS, reason="values", says=r"divided|average")
def rs_average(chunks):
    """Divides by N: the contract says sum."""
    ring_reduce_scatter(chunks)
    chunks[dist.get_rank()] /= dist.get_world_size()


@wrong(RS, reason="values", says=r"2 times|twice")
def rs_adds_the_own_part_twice(chunks):
    """Adds its part before sending on and again at the end."""
    ring_reduce_scatter_of_copies = [chunk.clone() for chunk in chunks]
    ring_reduce_scatter(ring_reduce_scatter_of_copies)
    rank = dist.get_rank()
    if dist.get_world_size() > 1:
        chunks[rank] += ring_reduce_scatter_of_copies[rank]


@wrong(RS, reason="crash", says=r"size|sends \d+ float32")
def rs_buffer_as_large_as_chunk_zero(chunks):
    """One buffer, as large as chunk 0, for chunks of any size."""
    rank, n, to, source = ring()
    incoming = torch.empty_like(chunks[0])
    for step in range(n - 1):
        exchange(chunks[(rank - step - 1) % n], incoming, to, source)
        chunks[(rank - step - 2) % n] += incoming


@wrong(RS, reason="hang", says=r"waits in recv from rank 0 .*rank 0 had returned")
def rs_skips_on_one_side(chunks):
    """Leaves out the exchange when its own outgoing chunk is empty, and with it the receive."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        outgoing, mine = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        if outgoing.numel() == 0:
            continue
        incoming = torch.empty_like(mine)
        exchange(outgoing, incoming, to, source)
        mine += incoming


@wrong(RS, reason="calls", says=r"neighbour")
def rs_direct_to_the_owner(chunks):
    """Sends every chunk straight to its owner: the same bytes, but not a ring."""
    rank, n = dist.get_rank(), dist.get_world_size()
    mine = chunks[rank]
    total = mine.clone()
    for distance in range(1, n):
        to, source = (rank + distance) % n, (rank - distance) % n
        incoming = torch.empty_like(mine)
        exchange(chunks[to], incoming, to, source)
        total += incoming
    mine.copy_(total)


_buffers = {}


@wrong(RS, reason="crash", says=r"sends 1680 float32 .*receives 3 float32")
def rs_keeps_its_first_buffer(chunks):
    """Allocates its receive buffers once and keeps them, sizes and all, for the next call."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        mine = chunks[(rank - step - 2) % n]
        incoming = _buffers.setdefault(step, torch.empty_like(mine))
        exchange(chunks[(rank - step - 1) % n], incoming, to, source)
        mine += incoming


@wrong(RS, reason="crash", says=r"(?s)itself.*with N = 1 there is nothing to do")
def rs_sends_to_itself_when_alone(chunks):
    """At N = 1 it does a step all the same, with itself."""
    rank, n, to, source = ring()
    for step in range(max(1, n - 1)):
        mine = chunks[(rank - step - 2) % n]
        incoming = torch.empty_like(mine)
        exchange(chunks[(rank - step - 1) % n], incoming, to, source)
        mine += incoming


@wrong(RS, reason="crash", says=r"rank \d (sends to|receives from) rank (2|-1); ranks are 0 and 1: forgotten % N\?")
def rs_no_modulo(chunks):
    """Forgets that the last rank's right neighbour is rank 0."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for step in range(n - 1):
        mine = chunks[(rank - step - 2) % n]
        incoming = torch.empty_like(mine)
        exchange(chunks[(rank - step - 1) % n], incoming, rank + 1, rank - 1)
        mine += incoming


@wrong(RS, reason="not written", says=r"not written yet")
def rs_not_written(chunks):
    """The lab's stub."""
    raise NotImplementedError("not written yet")
