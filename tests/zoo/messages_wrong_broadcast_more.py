"""Lab 00: more broadcasts that go astray: what is sent, and by what."""

from __future__ import annotations

import torch
import torch.distributed as dist

from . import wrong
from .messages_right import BROADCAST
from .messages_right_broadcast import broadcast, seen_from


@wrong(BROADCAST, reason="calls", says=r"the library's broadcast, and by no message")
def b_library(tensor, root):
    """dist.broadcast."""
    dist.broadcast(tensor, root)


@wrong(
    BROADCAST,
    reason="calls",
    says=r"shape \(1000,\)(?s:.*)the library's broadcast moves 4.00 kB|shape \(1000,\)(?s:.*)broadcast moves",
)
def b_library_for_large_ones(tensor, root):
    """dist.broadcast for what is large."""
    if tensor.numel() > 100:
        dist.broadcast(tensor, root)
    else:
        broadcast(tensor, root)


@wrong(BROADCAST, reason="calls", says=r"by the library's broadcast|the library's broadcast moves")
def b_library_objects(tensor, root):
    """broadcast_object_list."""
    box = [tensor if dist.get_rank() == root else None]
    dist.broadcast_object_list(box, root)
    tensor.copy_(box[0])


@wrong(BROADCAST, reason="calls", says=r"by the library's all_gather")
def b_library_all_gather(tensor, root):
    """Gathers all and keeps the root's."""
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(every, tensor)
    tensor.copy_(every[root])


@wrong(BROADCAST, reason="crash|calls|values|order", says=r"int64|float64|which receives")
def b_buffer_without_a_type(tensor, root):
    """The buffer is float32, whatever the tensor is."""
    buffer = torch.empty(tensor.shape)
    if dist.get_rank() == root:
        broadcast(tensor, root)
    else:
        broadcast(buffer, root)
        tensor.copy_(buffer)


@wrong(BROADCAST, reason="values", says=r"float64\)(?s:.*)element 0 is")
def b_through_float(tensor, root):
    """Everything travels as float32, which loses digits."""
    if tensor.is_complex() or tensor.dtype == torch.float32:
        return broadcast(tensor, root)
    narrow = tensor.float()
    broadcast(narrow, root)
    tensor.copy_(narrow)


@wrong(BROADCAST, reason="bytes", says=r"(?s)a message of 24 bytes.*12 bytes: 3 elements of 4 bytes")
def b_as_doubles(tensor, root):
    """Everything travels as float64."""
    wide = tensor.to(torch.float64)
    broadcast(wide, root)
    tensor.copy_(wide)


@wrong(BROADCAST, reason="calls", says=r"receives (2|3|1000) messages")
def b_row_by_row(tensor, root):
    """A message for each row."""
    for row in tensor.view(-1, 1):
        broadcast(row, root)


@wrong(BROADCAST, reason="crash", says=r"0-d(?s:.*)has no dimension to cut or index")
def b_slices(tensor, root):
    """tensor[:] of a tensor without dimensions."""
    broadcast(tensor[:], root)


@wrong(BROADCAST, reason="values", says=r"N = 3, root 2")
def b_root_modulo_two(tensor, root):
    """root % 2."""
    broadcast(tensor, root % 2)


@wrong(BROADCAST, reason="hang", says=r"(?s)rank \d calls barrier, and rank \d does not")
def b_barrier_of_the_root(tensor, root):
    """A barrier for the root alone."""
    broadcast(tensor, root)
    if dist.get_rank() == root:
        dist.barrier()


@wrong(BROADCAST, reason="hang", says=r"by their tags")
def b_tags(tensor, root):
    """Sender and receiver count rounds differently."""
    rank, n, me = seen_from(root)
    for step in range(n.bit_length()):
        if me < 2**step and me + 2**step < n:
            dist.send(tensor, (rank + 2**step) % n, tag=step)
        elif 2**step <= me < 2 ** (step + 1):
            dist.recv(tensor, (rank - 2**step) % n, tag=step + 1)


@wrong(BROADCAST, reason="hang", says=r"N = 2")
def b_distance_stands_still(tensor, root):
    """Forgets to double the distance: the same message again and again, to a rank that has gone on."""
    rank, n, me = seen_from(root)
    distance = 1
    while distance < n:
        if me < distance:
            dist.send(tensor, (rank + distance) % n)
        elif me < 2 * distance:
            dist.recv(tensor, (rank - distance) % n)
            distance *= 2


@wrong(BROADCAST, reason="calls", says=r"N = 2, root 0(?s:.*)3 are sent in all(?s:.*)N-1 = 1 in all")
def b_scatter_and_gather(tensor, root):
    """Each rank gets a piece from the root, and then the pieces go round: fewer bytes a link, more messages."""
    rank, n, me = seen_from(root)
    pieces = tensor.view(-1).tensor_split(n)
    for other in range(n):
        if other != root and rank == root:
            dist.send(pieces[other], other)
        elif rank == other and rank != root:
            dist.recv(pieces[rank], root)
    for step in range(n - 1):
        sending = dist.isend(pieces[(rank - step) % n].clone(), (rank + 1) % n)
        dist.recv(pieces[(rank - 1 - step) % n], (rank - 1) % n)
        sending.wait()


@wrong(BROADCAST, reason="crash", says=r"(?s)N = 2.*ValueError: who am I")
def b_raises(tensor, root):
    """Raises on one rank."""
    if dist.get_rank() == dist.get_world_size() - 1 and dist.get_world_size() > 1:
        raise ValueError("who am I")
    broadcast(tensor, root)


@wrong(BROADCAST, reason="signature", says=r"2 arguments: \(tensor, root\)")
def b_no_root(tensor):
    """Without a root."""
    broadcast(tensor, 0)


@wrong(BROADCAST, reason="values", says=r"int64(?s:.*)has not changed(?s:.*)no rank sent anything")
def b_floats_only(tensor, root):
    """Takes care of floating-point tensors only."""
    if tensor.is_floating_point():
        broadcast(tensor, root)


@wrong(BROADCAST, reason="calls", says=r"receives 1 message(?s:.*)none to the root")
def b_closes_the_circle(tensor, root):
    """A tree, and the last rank tells the root that it has it."""
    rank, n, me = seen_from(root)
    broadcast(tensor, root)
    if n > 1 and me == n - 1:
        dist.send(tensor, root)
    if n > 1 and me == 0:
        dist.recv(tensor.clone(), (root - 1) % n)


@wrong(BROADCAST, reason="values", says=r"rank 2, N = 3(?s:.*)has not changed|rank 1, N = 3(?s:.*)has not changed")
def b_pairs(tensor, root):
    """One round: the root and its neighbour."""
    rank, n, me = seen_from(root)
    if n > 1 and me == 0:
        dist.send(tensor, (rank + 1) % n)
    if me == 1:
        dist.recv(tensor, root)


@wrong(BROADCAST, reason="calls", says=r"receives 2 messages")
def b_size_first(tensor, root):
    """Sends the number of elements before the elements."""
    size = torch.tensor(tensor.numel())
    broadcast(size, root)
    broadcast(tensor, root)


@wrong(BROADCAST, reason="crash", says=r"(?s)N = 1.*with N = 1 there is nothing to do that takes a message")
def b_alone_it_sends_to_itself(tensor, root):
    """The first message goes out whatever N is."""
    rank, n, me = seen_from(root)
    if n > 1:
        broadcast(tensor, root)
    else:
        dist.send(tensor, (rank + 1) % n)


@wrong(BROADCAST, reason="crash", says=r"ranks are 0 and 1")
def b_four_ranks(tensor, root):
    """Written out for four ranks."""
    rank = dist.get_rank()
    me = (rank - root) % 4
    if me == 0:
        dist.send(tensor, (root + 2) % 4)
        dist.send(tensor, (root + 1) % 4)
    elif me == 2:
        dist.recv(tensor, root)
        dist.send(tensor, (root + 3) % 4)
    else:
        dist.recv(tensor, (root + me - 1) % 4)
