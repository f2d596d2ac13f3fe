"""Lab 04: results in other memory than was handed in, loops without end, messages that cannot meet."""

from __future__ import annotations

import torch
import torch.distributed as dist

from . import wrong
from .ring_right import AG, RS, exchange, ring, ring_all_gather, ring_reduce_scatter
from .ring_right_all_reduce import AR, ring_all_reduce


@wrong(AR, reason="values", says=r"(?s)6 elements.*stands for other memory.*copy_\(\)")
def ar_rebinds_data(tensor):
    """`tensor.data = summed`: the tensor has the sum, other views of its memory have not."""
    summed = tensor.detach().clone()
    ring_all_reduce(summed)
    tensor.data = summed


@wrong(AR, reason="values", says=r"(?s)transposed.*stands for other memory")
def ar_rebinds_data_of_the_transposed(tensor):
    """Rebinds only what is not contiguous."""
    flat = tensor.contiguous().view(-1)
    ring_all_reduce(flat)
    if not tensor.is_contiguous():
        tensor.data = flat.view(tensor.shape)


@wrong(AR, reason="values", says=r"2-D.*has the shape \(12,\) now")
def ar_resizes(tensor):
    """Makes the tensor itself flat, and leaves it so."""
    if tensor.is_contiguous():
        tensor.resize_(tensor.numel())
    ring_all_reduce(tensor)


@wrong(AR, reason="values", says=r"0-d.*shape \(1,\) now|1 element .*shape \(\) now")
def ar_squeezes(tensor):
    """squeeze_() changes the shape of what was handed in."""
    ring_all_reduce(tensor)
    tensor.squeeze_()


@wrong(RS, reason="values", says=r"chunks\[0\] stands for other memory")
def rs_rebinds_data_of_chunks(chunks):
    """Gives the chunks new storage instead of writing into theirs."""
    sums = [chunk.clone() for chunk in chunks]
    ring_reduce_scatter(sums)
    for chunk, total in zip(chunks, sums, strict=True):
        chunk.data = total


@wrong(AG, reason="values", says=r"chunks\[1\] stands for other memory")
def ag_sets_other_storage(chunks):
    """set_() is the same in other words."""
    copies = [chunk.clone() for chunk in chunks]
    ring_all_gather(copies)
    for chunk, copy in zip(chunks, copies, strict=True):
        chunk.set_(copy)


@wrong(RS, reason="values", says=r"no chunk has changed(?s:.*)in place")
def rs_rebinds_a_name(chunks):
    """`mine = mine + incoming` changes what the name stands for, and nothing else."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        mine = chunks[(rank - step - 2) % n]
        incoming = torch.empty_like(mine)
        exchange(chunks[(rank - step - 1) % n], incoming, to, source)
        mine = mine + incoming


@wrong(
    RS, reason="values", says=r"rank 1's part of chunk 2 and rank 2's part of chunk 1 in it; chunk 0 is complete on no"
)
def rs_other_direction_same_indices(chunks):
    """Sends to the left with the indices for the right."""
    rank, n, source, to = ring()
    for step in range(n - 1):
        mine = chunks[(rank - step - 2) % n]
        incoming = torch.empty_like(mine)
        exchange(chunks[(rank - step - 1) % n], incoming, to, source)
        mine += incoming


@wrong(RS, reason="values", says=r"(?s)is nan.*nothing has been written into")
def rs_receives_into_another_buffer(chunks):
    """Adds a new buffer that nothing was received into."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        mine = chunks[(rank - step - 2) % n]
        incoming = torch.empty_like(mine)
        exchange(chunks[(rank - step - 1) % n], torch.empty_like(mine), to, source)
        mine += incoming


@wrong(RS, reason="calls", says=r"all_reduce moves .*, by and by")
def rs_library_in_small_pieces(chunks):
    """The library's all-reduce, 16 elements at a time."""
    for chunk in chunks:
        for piece in chunk.split(16):
            dist.all_reduce(piece)


@wrong(RS, reason="hang", says=r"3,000 calls of torch.distributed")
def rs_steps_for_ever(chunks):
    """Forgets to count its steps: messages go round and round."""
    rank, n, to, source = ring()
    step = 0
    while step < n - 1:
        incoming = torch.empty_like(chunks[0])
        exchange(chunks[0], incoming, to, source)


@wrong(AG, reason="hang", says=r"100,000 operations on tensors")
def ag_computes_for_ever(chunks):
    """A loop of tensor operations without end."""
    count = torch.zeros(1)
    while len(chunks):
        count += 1


@wrong(AG, reason="hang", says=r"0 sends and 1 recv from rank \d to rank \d")
def ag_receives_from_the_right(chunks):
    """Sends to the right and receives from the right: the same rank at N = 2 only."""
    rank, n, to, _ = ring()
    for step in range(n - 1):
        receiving = dist.irecv(chunks[(rank - step - 1) % n], to)
        sending = dist.isend(chunks[(rank - step) % n], to)
        receiving.wait()
        sending.wait()


@wrong(AG, reason="hang", says=r"do not meet: by their tags")
def ag_tags_do_not_match(chunks):
    """Counts the tags of its receives from 1, those of its sends from 0."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        sending = dist.isend(chunks[(rank - step) % n], to, tag=step)
        dist.recv(chunks[(rank - step - 1) % n], source, tag=step + 1)
        sending.wait()


@wrong(RS, reason="crash", says=r"rank 0 sends to itself")
def rs_modulo_of_the_last_rank(chunks):
    """Takes the last rank's number for the world size."""
    rank, n, _, source = ring()
    for step in range(n - 1):
        mine = chunks[(rank - step - 2) % n]
        incoming = torch.empty_like(mine)
        exchange(chunks[(rank - step - 1) % n], incoming, (rank + 1) % (n - 1), source)
        mine += incoming
