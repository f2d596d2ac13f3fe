"""Lab 04, all-reduce on a ring: the plain solution, and right ones written in other ways."""

from __future__ import annotations

import torch
import torch.distributed as dist

from . import right
from .ring_right import (
    ag_batch_isend_irecv,
    ag_bidirectional_halves,
    ag_counter_clockwise,
    ag_even_odd_blocking,
    ag_from_imports_and_extras,
    ag_pipelined_pieces,
    exchange,
    ring,
    ring_all_gather,
    ring_reduce_scatter,
    rs_batch_isend_irecv,
    rs_bidirectional_halves,
    rs_counter_clockwise,
    rs_even_odd_blocking,
    rs_from_imports_and_extras,
    rs_pipelined_pieces,
)
from .ring_right_more import rs_waits_for_sends_at_the_end

AR = "04.ring_all_reduce"


def run_both(tensor, reduce_scatter, all_gather):
    """Both phases on a flat copy, then the copy back."""
    flat = tensor.detach().reshape(-1).clone()
    chunks = list(torch.tensor_split(flat, dist.get_world_size()))
    reduce_scatter(chunks)
    all_gather(chunks)
    tensor.copy_(flat.view(tensor.shape))


@right(AR)
def ring_all_reduce(tensor):
    """The plain solution: reduce-scatter, then all-gather, on a flat copy cut by tensor_split."""
    run_both(tensor, ring_reduce_scatter, ring_all_gather)


@right(AR)
def ar_counter_clockwise(tensor):
    """Both phases to the left."""
    run_both(tensor, rs_counter_clockwise, ag_counter_clockwise)


@right(AR)
def ar_one_phase_each_way(tensor):
    """Reduce-scatter to the right, all-gather to the left: each phase is right by itself."""
    run_both(tensor, ring_reduce_scatter, ag_counter_clockwise)


@right(AR)
def ar_batch_isend_irecv(tensor):
    """Both operations of a step in one batch."""
    run_both(tensor, rs_batch_isend_irecv, ag_batch_isend_irecv)


@right(AR)
def ar_even_odd_blocking(tensor):
    """Blocking calls, even ranks send first."""
    run_both(tensor, rs_even_odd_blocking, ag_even_odd_blocking)


@right(AR)
def ar_bidirectional_halves(tensor):
    """Half of every chunk each way round."""
    run_both(tensor, rs_bidirectional_halves, ag_bidirectional_halves)


@right(AR)
def ar_from_imports_and_extras(tensor):
    """Barriers and one-element collectives on the way."""
    run_both(tensor, rs_from_imports_and_extras, ag_from_imports_and_extras)


@right(AR)
def ar_pipelined_pieces(tensor):
    """Chunks travel in pieces."""
    run_both(tensor, rs_pipelined_pieces, ag_pipelined_pieces)


@right(AR)
def ar_sends_waited_for_at_the_end_of_each_phase(tensor):
    """The handles of the sends are kept and waited for when the phase is over."""
    run_both(tensor, rs_waits_for_sends_at_the_end, ring_all_gather)


@right(AR)
def ar_pads_to_a_multiple(tensor):
    """Pads with zeros to a multiple of N, so that all chunks are equal; the padding travels too."""
    rank, n, to, source = ring()
    size = tensor.numel()
    padded = tensor.new_zeros(-(-size // n) * n)
    padded[:size] = tensor.flatten()
    chunks = padded.view(n, -1)
    for step in range(n - 1):
        incoming = torch.empty_like(chunks[0])
        exchange(chunks[(rank - step) % n], incoming, to, source)
        chunks[(rank - step - 1) % n] += incoming
    for step in range(n - 1):
        exchange(chunks[(rank + 1 - step) % n], chunks[(rank - step) % n], to, source)
    tensor.copy_(padded[:size].reshape(tensor.shape))


@right(AR)
def ar_ceil_chunks_by_index(tensor):
    """Chunks by arithmetic, each ceil(n/N) long but for the last ones, which may be shorter or empty."""
    rank, n, to, source = ring()
    flat = tensor.contiguous().view(-1)
    size = -(-flat.numel() // n)
    chunks = [flat[min(i * size, flat.numel()) : min((i + 1) * size, flat.numel())] for i in range(n)]
    ring_reduce_scatter(chunks)
    ring_all_gather(chunks)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view_as(tensor))


@right(AR)
def ar_torch_chunk_filled_up(tensor):
    """torch.chunk may give fewer than N pieces; empty ones are added, and nothing is sent for them."""
    rank, n, to, source = ring()
    flat = tensor.reshape(-1).clone()
    pieces = list(flat.chunk(n))
    pieces += [flat[:0]] * (n - len(pieces))
    for phase in range(2):
        for step in range(n - 1):
            outgoing, target = pieces[(rank - step + phase) % n], pieces[(rank - step - 1 + phase) % n]
            incoming = torch.empty_like(target)
            sending = dist.isend(outgoing, to) if len(outgoing) else None
            if len(target):
                dist.recv(incoming, source)
                target.copy_(incoming if phase else target + incoming)
            if sending:
                sending.wait()
    tensor.copy_(flat.reshape(tensor.shape))


@right(AR)
def ar_waits_for_all_sends_at_the_very_end(tensor):
    """Sends of both phases are waited for at the end. By then, whatever overwrote a chunk had to wait for that send."""
    rank, n, to, source = ring()
    flat = tensor.reshape(-1).clone()
    chunks = flat.tensor_split(n)
    sends = []
    for step in range(n - 1):
        sends.append(dist.isend(chunks[(rank - step) % n].clone(), to))
        incoming = torch.empty_like(chunks[(rank - step - 1) % n])
        dist.recv(incoming, source)
        chunks[(rank - step - 1) % n].add_(incoming)
    for step in range(n - 1):
        sends.append(dist.isend(chunks[(rank + 1 - step) % n], to))
        dist.recv(chunks[(rank - step) % n], source)
    for sending in sends:
        sending.wait()
    tensor.copy_(flat.view(tensor.shape))


class _Ring:
    """Remembers nothing but its neighbours."""

    def __init__(self):
        self.rank, self.n, self.to, self.source = ring()

    def shift(self, outgoing, like):
        incoming = torch.empty_like(like)
        works = dist.irecv(incoming, self.source), dist.isend(outgoing, self.to)
        for work in works:
            work.wait()
        return incoming


@right(AR)
def ar_with_a_class_and_a_dictionary(tensor):
    """Pieces in a dictionary that is filled anew; the tensor is written once, at the end."""
    circle = _Ring()
    rank, n = circle.rank, circle.n
    pieces = dict(enumerate(tensor.contiguous().flatten().tensor_split(n)))
    for step in range(n - 1):
        target = (rank - step - 1) % n
        pieces[target] = pieces[target] + circle.shift(pieces[(rank - step) % n], pieces[target])
    for step in range(n - 1):
        target = (rank - step) % n
        pieces[target] = circle.shift(pieces[(rank + 1 - step) % n], pieces[target])
    tensor.copy_(torch.cat([pieces[i] for i in range(n)]).view(tensor.shape))


@right(AR)
def ar_returns_the_tensor_too(tensor, group=None):
    """Returns the tensor as well as changing it; an optional parameter for a group."""
    ring_all_reduce(tensor)
    return tensor


@right(AR)
def ar_sums_in_double(tensor):
    """Adds in float64 and sends in the tensor's own type."""
    rank, n, to, source = ring()
    flat = tensor.reshape(-1).clone()
    chunks = flat.tensor_split(n)
    for step in range(n - 1):
        target = chunks[(rank - step - 2) % n]
        incoming = torch.empty_like(target)
        exchange(chunks[(rank - step - 1) % n], incoming, to, source)
        wide = torch.float64 if tensor.is_floating_point() else torch.int64
        target.copy_((target.to(wide) + incoming.to(wide)).to(target.dtype))
    ring_all_gather(list(chunks))
    tensor.copy_(flat.view(tensor.shape))
