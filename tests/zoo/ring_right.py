"""Lab 04, reduce-scatter and all-gather on a ring: the plain solution, and right ones written in other ways."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import get_rank, get_world_size, irecv, isend

from . import right

RS, AG = "04.ring_reduce_scatter", "04.ring_all_gather"


def ring() -> tuple[int, int, int, int]:
    """rank, world size, right neighbour, left neighbour"""
    rank, n = dist.get_rank(), dist.get_world_size()
    return rank, n, (rank + 1) % n, (rank - 1) % n


def exchange(outgoing: torch.Tensor, incoming: torch.Tensor, to: int, source: int) -> None:
    sending = dist.isend(outgoing, to)
    dist.recv(incoming, source)
    sending.wait()


@right(RS)
def ring_reduce_scatter(chunks):
    """The plain solution: isend to the right, recv from the left, add."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        outgoing = chunks[(rank - step - 1) % n]
        mine = chunks[(rank - step - 2) % n]
        incoming = torch.empty_like(mine)
        exchange(outgoing, incoming, to, source)
        mine += incoming


@right(AG)
def ring_all_gather(chunks):
    """The plain solution: isend to the right, recv from the left in place."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        exchange(chunks[(rank - step) % n], chunks[(rank - step - 1) % n], to, source)


@right(RS)
def rs_counter_clockwise(chunks):
    """Sends to the left neighbour."""
    rank, n, source, to = ring()
    for step in range(n - 1):
        mine = chunks[(rank + step + 2) % n]
        incoming = torch.empty_like(mine)
        exchange(chunks[(rank + step + 1) % n], incoming, to, source)
        mine.add_(incoming)


@right(AG)
def ag_counter_clockwise(chunks):
    """Sends to the left neighbour."""
    rank, n, source, to = ring()
    for step in range(n - 1):
        exchange(chunks[(rank + step) % n], chunks[(rank + step + 1) % n], to, source)


@right(RS)
def rs_batch_isend_irecv(chunks):
    """Both operations of a step in one batch."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        mine = chunks[(rank - step - 2) % n]
        incoming = torch.empty_like(mine)
        operations = [
            dist.P2POp(dist.isend, chunks[(rank - step - 1) % n], to),
            dist.P2POp(dist.irecv, incoming, source),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        mine += incoming


@right(AG)
def ag_batch_isend_irecv(chunks):
    """Both operations of a step in one batch, the receive first."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        operations = [
            dist.P2POp(dist.irecv, chunks[(rank - step - 1) % n], source),
            dist.P2POp(dist.isend, chunks[(rank - step) % n], to),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def _blocking_step(rank, n, to, source, outgoing, incoming):
    # With odd N, ranks N-1 and 0 are neighbours and both even; rank 0 receives when the others have moved on.
    if rank % 2 == 0:
        dist.send(outgoing, to)
        dist.recv(incoming, source)
    else:
        dist.recv(incoming, source)
        dist.send(outgoing, to)


@right(RS)
def rs_even_odd_blocking(chunks):
    """Blocking calls: even ranks send first, odd ranks receive first; at odd N the chain still has an end."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        mine = chunks[(rank - step - 2) % n]
        incoming = torch.empty_like(mine)
        _blocking_step(rank, n, to, source, chunks[(rank - step - 1) % n], incoming)
        mine += incoming


@right(AG)
def ag_even_odd_blocking(chunks):
    """Blocking calls: even ranks send first, odd ranks receive first."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        _blocking_step(rank, n, to, source, chunks[(rank - step) % n], chunks[(rank - step - 1) % n])


def _halves(chunks):
    split = [torch.tensor_split(chunk, 2) for chunk in chunks]
    return [halves[0] for halves in split], [halves[1] for halves in split]


@right(RS)
def rs_bidirectional_halves(chunks):
    """The first half of every chunk travels clockwise, the second half the other way, at the same time."""
    rank, n, to, source = ring()
    first, second = _halves(chunks)
    for step in range(n - 1):
        a, b = first[(rank - step - 2) % n], second[(rank + step + 2) % n]
        from_left, from_right = torch.empty_like(a), torch.empty_like(b)
        # At N = 2 both neighbours are the same rank: tags keep the two directions apart.
        works = [
            dist.irecv(from_left, source, tag=1),
            dist.irecv(from_right, to, tag=2),
            dist.isend(first[(rank - step - 1) % n], to, tag=1),
            dist.isend(second[(rank + step + 1) % n], source, tag=2),
        ]
        for work in works:
            work.wait()
        a += from_left
        b += from_right


@right(AG)
def ag_bidirectional_halves(chunks):
    """The first half of every chunk travels clockwise, the second half the other way, at the same time."""
    rank, n, to, source = ring()
    first, second = _halves(chunks)
    for step in range(n - 1):
        works = [
            dist.irecv(first[(rank - step - 1) % n], source, tag=1),
            dist.irecv(second[(rank + step + 1) % n], to, tag=2),
            dist.isend(first[(rank - step) % n], to, tag=1),
            dist.isend(second[(rank + step) % n], source, tag=2),
        ]
        for work in works:
            work.wait()


@right(RS)
def rs_from_imports_and_extras(chunks):
    """Names imported from torch.distributed, a barrier every step, a one-element all-reduce."""
    rank, n = get_rank(), get_world_size()
    dist.all_reduce(torch.ones(1))
    for step in range(n - 1):
        mine = chunks[(rank - step - 2) % n]
        incoming = torch.zeros_like(mine)
        works = [isend(chunks[(rank - step - 1) % n], (rank + 1) % n), irecv(incoming, (rank - 1) % n)]
        [work.wait() for work in works]
        dist.barrier()
        mine += incoming


@right(AG)
def ag_from_imports_and_extras(chunks):
    """Names imported from torch.distributed, a barrier every step, a one-element all-reduce."""
    rank, n = get_rank(), get_world_size()
    dist.all_reduce(torch.ones(1))
    for step in range(n - 1):
        works = [isend(chunks[(rank - step) % n], (rank + 1) % n), irecv(chunks[(rank - step - 1) % n], (rank - 1) % n)]
        [work.wait() for work in works]
        dist.barrier()


@right(RS)
def rs_pipelined_pieces(chunks):
    """Every chunk travels in pieces of up to 100 elements."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        outgoing, mine = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        incoming = torch.empty_like(mine)
        works = [dist.isend(piece, to) for piece in outgoing.split(100)]
        works += [dist.irecv(piece, source) for piece in incoming.split(100)]
        for work in works:
            work.wait()
        mine += incoming


@right(AG)
def ag_pipelined_pieces(chunks):
    """Every chunk travels in pieces of up to 100 elements."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        works = [dist.isend(piece, to) for piece in chunks[(rank - step) % n].split(100)]
        works += [dist.irecv(piece, source) for piece in chunks[(rank - step - 1) % n].split(100)]
        for work in works:
            work.wait()


@right(RS)
def rs_rank_zero_receives_first(chunks):
    """Blocking calls; rank 0 alone receives first, which is enough to break the circle."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        mine = chunks[(rank - step - 2) % n]
        incoming = torch.empty_like(mine)
        if rank == 0:
            dist.recv(incoming, source)
        dist.send(chunks[(rank - step - 1) % n], to)
        if rank != 0:
            dist.recv(incoming, source)
        mine += incoming


@right(AG)
def ag_rank_zero_receives_first(chunks):
    """Blocking calls; rank 0 alone receives first, which is enough to break the circle."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        outgoing, incoming = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        if rank == 0:
            dist.recv(incoming, source)
        dist.send(outgoing, to)
        if rank != 0:
            dist.recv(incoming, source)
