"""Lab 04, all-gather on a ring: plausible mistakes, and what the check must say of each."""

from __future__ import annotations

import torch
import torch.distributed as dist

from . import wrong
from .ring_right import AG, exchange, ring, ring_all_gather


@wrong(AG, reason="values", says=r"chunk \d.*overwritten")
def ag_expects_the_next_chunk(chunks):
    """Takes it that rank r holds chunk r+1, as after a reduce-scatter that began with the own chunk."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        exchange(chunks[(rank + 1 - step) % n], chunks[(rank - step) % n], to, source)


@wrong(AG, reason="values", says=r"N = 3")
def ag_index_runs_the_wrong_way(chunks):
    """Sends to the right but counts as if it sent to the left: the other phase's direction. Right at N = 2."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        exchange(chunks[(rank + step) % n], chunks[(rank + step + 1) % n], to, source)


@wrong(AG, reason="bytes", says=r"how many steps")
def ag_n_steps(chunks):
    """N steps: in the last one every chunk comes home once more."""
    rank, n, to, source = ring()
    for step in range(n if n > 1 else 0):
        exchange(chunks[(rank - step) % n], chunks[(rank - step - 1) % n], to, source)


@wrong(AG, reason="hang", says=r"(?s)rank 0.*send.*rank 1")
def ag_send_first_blocking(chunks):
    """Every rank sends first, with the blocking call."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        dist.send(chunks[(rank - step) % n], to)
        dist.recv(chunks[(rank - step - 1) % n], source)


@wrong(AG, reason="hang", says=r"(?s)rank 0.*recv.*rank")
def ag_receive_first_blocking(chunks):
    """Every rank receives first, with the blocking call."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        dist.recv(chunks[(rank - step - 1) % n], source)
        dist.send(chunks[(rank - step) % n], to)


@wrong(AG, reason="hang", says=r"N = 3")
def ag_even_odd_rounds(chunks):
    """Even ranks send, a barrier, odd ranks send. At odd N two even ranks are neighbours."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        for sender in (0, 1):
            if rank % 2 == sender:
                dist.send(chunks[(rank - step) % n], to)
            else:
                dist.recv(chunks[(rank - step - 1) % n], source)
            dist.barrier()


@wrong(AG, reason="values", says=r"was there before|copy")
def ag_adds(chunks):
    """Adds what arrives to what is there, as in the first phase. Right when the others are zero."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        target = chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(target)
        exchange(chunks[(rank - step) % n], incoming, to, source)
        target += incoming


@wrong(AG, reason="values", says=r"nan")
def ag_clears_by_multiplying(chunks):
    """Clears a chunk by multiplying by zero, then adds: NaN stays NaN."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        target = chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(target)
        exchange(chunks[(rank - step) % n], incoming, to, source)
        target *= 0
        target += incoming


@wrong(AG, reason="calls", says=r"all_gather")
def ag_library_all_gather(chunks):
    """Lets the library gather."""
    dist.all_gather(list(chunks), chunks[dist.get_rank()].clone())


@wrong(AG, reason="calls", says=r"broadcast")
def ag_library_broadcasts(chunks):
    """One library broadcast per chunk."""
    for owner, chunk in enumerate(chunks):
        dist.broadcast(chunk, src=owner)


@wrong(AG, reason="bytes", says=r"whole")
def ag_whole_list_every_step(chunks):
    """Sends all chunks in every step and keeps the one that is new."""
    rank, n, to, source = ring()
    sizes = [len(chunk) for chunk in chunks]
    for step in range(n - 1):
        incoming = torch.empty_like(torch.cat(list(chunks)))
        exchange(torch.cat(list(chunks)), incoming, to, source)
        new = (rank - step - 1) % n
        chunks[new].copy_(torch.split(incoming, sizes)[new])


@wrong(AG, reason="bytes", says=r"(?s)rank 0 sent.*busiest")
def ag_through_rank_zero(chunks):
    """Everyone sends its chunk to rank 0, which hands all of them to everyone."""
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        for source in range(1, n):
            dist.recv(chunks[source], source)
        for to in range(1, n):
            for chunk in chunks:
                dist.send(chunk, to)
    else:
        dist.send(chunks[rank], 0)
        for chunk in chunks:
            dist.recv(chunk, 0)


@wrong(AG, reason="order", says=r"wait")
def ag_never_waits_for_irecv(chunks):
    """Starts every receive and never waits for one."""
    rank, n, to, source = ring()
    handles = []
    for step in range(n - 1):
        handles.append(dist.irecv(chunks[(rank - step - 1) % n], source))
        dist.isend(chunks[(rank - step) % n], to).wait()


@wrong(AG, reason="order", says=r"wait")
def ag_forwards_before_the_receive_is_done(chunks):
    """Posts all operations, then waits for all: a chunk is sent on before it has arrived."""
    rank, n, to, source = ring()
    works = []
    for step in range(n - 1):
        works.append(dist.irecv(chunks[(rank - step - 1) % n], source))
        works.append(dist.isend(chunks[(rank - step) % n], to))
    for work in works:
        work.wait()


@wrong(AG, reason="order", says=r"before .*send")
def ag_staging_buffer_reused(chunks):
    """Sends from one staging buffer and fills it again before the last send is done."""
    rank, n, to, source = ring()
    staging = chunks[0].new_empty(max(chunk.numel() for chunk in chunks))
    sends = []
    for step in range(n - 1):
        outgoing = chunks[(rank - step) % n]
        staging[: outgoing.numel()] = outgoing
        sends.append(dist.isend(staging[: outgoing.numel()], to))
        dist.recv(chunks[(rank - step - 1) % n], source)
    for sending in sends:
        sending.wait()


@wrong(AG, reason="crash", says=r"sends \d float64 .*receives \d float32")
def ag_float32_buffer(chunks):
    """The receive buffer is float32, whatever the chunks are."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        target = chunks[(rank - step - 1) % n]
        incoming = torch.empty(target.numel())
        exchange(chunks[(rank - step) % n], incoming, to, source)
        target.copy_(incoming)


@wrong(AG, reason="values", says=r"chunk \d")
def ag_sends_its_own_chunk_every_step(chunks):
    """Passes on its own chunk in every step instead of the one that just came. Right at N = 2."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        exchange(chunks[rank], chunks[(rank - step - 1) % n], to, source)


@wrong(AG, reason="values", says=r"chunk \d")
def ag_one_step_short(chunks):
    """N-2 steps: one chunk never arrives."""
    rank, n, to, source = ring()
    for step in range(n - 2):
        exchange(chunks[(rank - step) % n], chunks[(rank - step - 1) % n], to, source)


@wrong(AG, reason="values", says=r"in place")
def ag_new_tensors_in_the_list(chunks):
    """Puts the received tensors into the list; the tensors handed in keep their garbage."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        target = (rank - step - 1) % n
        incoming = torch.empty_like(chunks[target])
        exchange(chunks[(rank - step) % n], incoming, to, source)
        chunks[target] = incoming


@wrong(AG, reason="values", says=r"in place")
def ag_returns_a_new_tensor(chunks):
    """Works on copies and returns them joined."""
    copies = [chunk.clone() for chunk in chunks]
    ring_all_gather(copies)
    return torch.cat(copies)


@wrong(AG, reason="crash", says=r"size|elements|bytes")
def ag_takes_all_chunks_for_equal(chunks):
    """Receives into buffers as large as the own chunk."""
    rank, n, to, source = ring()
    outgoing = chunks[rank].clone()
    for step in range(n - 1):
        incoming = torch.empty_like(chunks[rank])
        exchange(outgoing, incoming, to, source)
        chunks[(rank - step - 1) % n].copy_(incoming)
        outgoing = incoming


@wrong(AG, reason="calls", says=r"neighbour")
def ag_sends_to_everyone(chunks):
    """Sends its own chunk straight to every rank: the same bytes, but not a ring."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for distance in range(1, n):
        to, source = (rank + distance) % n, (rank - distance) % n
        exchange(chunks[rank], chunks[source], to, source)


@wrong(AG, reason="values", says=r"outside")
def ag_receives_past_the_chunk(chunks):
    """Clears the rest of the storage, as if everything behind the last chunk were padding."""
    ring_all_gather(chunks)
    whole = torch.empty(0, dtype=chunks[0].dtype).set_(chunks[0].untyped_storage())
    whole[chunks[-1].storage_offset() + len(chunks[-1]) :] = 0


@wrong(AG, reason="crash", says=r"ranks are 0 and 1: forgotten % N\?")
def ag_no_modulo(chunks):
    """Forgets that the ring closes."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for step in range(n - 1):
        exchange(chunks[(rank - step) % n], chunks[(rank - step - 1) % n], rank + 1, rank - 1)


@wrong(AG, reason="hang", says=r"rank 0")
def ag_rank_zero_leaves_early(chunks):
    """Rank 0 thinks that it has everything one step early."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        if rank == 0 and step == n - 2 and n > 2:
            return
        exchange(chunks[(rank - step) % n], chunks[(rank - step - 1) % n], to, source)


@wrong(AG, reason="signature", says=r"1 argument|one argument")
def ag_wants_the_rank(chunks, rank, world_size):
    """Wants to be told its rank."""
    ring_all_gather(chunks)
