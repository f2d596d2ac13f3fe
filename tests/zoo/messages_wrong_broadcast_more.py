"""Lab 00: more broadcasts that go astray: what arrives, where it is kept, and when."""

from __future__ import annotations

import torch
import torch.distributed as dist

from . import wrong
from .messages_right import BROADCAST, broadcast, seen_from

_kept = []


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


@wrong(BROADCAST, reason="order", says=r"drops its handle")
def b_drops_the_handle(tensor, root):
    """isend like send."""
    rank, n, me = seen_from(root)
    distance = 1
    while distance < n:
        if me < distance and me + distance < n:
            dist.isend(tensor, (rank + distance) % n)
        elif distance <= me < 2 * distance:
            dist.recv(tensor, (rank - distance) % n)
        distance *= 2


@wrong(BROADCAST, reason="order", says=r"never waits for a receive")
def b_irecv_like_recv(tensor, root):
    """irecv like recv."""
    rank, n, me = seen_from(root)
    distance = 1
    while distance < n:
        if me < distance and me + distance < n:
            dist.send(tensor, (rank + distance) % n)
        elif distance <= me < 2 * distance:
            dist.irecv(tensor, (rank - distance) % n)
        distance *= 2


@wrong(BROADCAST, reason="order", says=r"(?s)wait\(\) for a send.*before the function returns")
def b_leaves_while_sending(tensor, root):
    """Keeps the handles of its sends, and leaves."""
    rank, n, me = seen_from(root)
    distance = 1
    while distance < n:
        if me < distance and me + distance < n:
            _kept.append(dist.isend(tensor, (rank + distance) % n))
        elif distance <= me < 2 * distance:
            dist.recv(tensor, (rank - distance) % n)
        distance *= 2


@wrong(
    BROADCAST, reason="order", says=r"(?s)N = [34].*(uses the buffer of a receive before wait|before it has arrived)"
)
def b_waits_at_the_end(tensor, root):
    """Starts everything, receives too, and waits for all of it at the end: what is passed on has not arrived."""
    rank, n, me = seen_from(root)
    works = []
    distance = 1
    while distance < n:
        if me < distance and me + distance < n:
            works.append(dist.isend(tensor, (rank + distance) % n))
        elif distance <= me < 2 * distance:
            works.append(dist.irecv(tensor, (rank - distance) % n))
        distance *= 2
    for work in works:
        work.wait()


@wrong(BROADCAST, reason="order", says=r"drops its handle")
def b_waits_for_the_last_send(tensor, root):
    """One variable for all handles."""
    rank, n, me = seen_from(root)
    if me:
        dist.recv(tensor)
    distance, sending = 1 << me.bit_length(), None
    while me + distance < n:
        sending = dist.isend(tensor, (rank + distance) % n)
        distance *= 2
    if sending:
        sending.wait()


@wrong(BROADCAST, reason="values", says=r"(?s)has not changed; a new one was returned.*in place")
def b_returns_a_new_tensor(tensor, root):
    """The result is what it returns."""
    result = tensor.clone()
    broadcast(result, root)
    return result


@wrong(BROADCAST, reason="values", says=r"rank 1, N = 2, root 0(?s:.*)the tensor has not changed")
def b_rebinds_the_name(tensor, root):
    """Receives into a new tensor of the same name."""
    if dist.get_rank() != root:
        tensor = torch.empty_like(tensor)
    broadcast(tensor, root)


@wrong(BROADCAST, reason="values", says=r"(?s)what arrived has been added.*a broadcast replaces")
def b_adds(tensor, root):
    """+= as in a reduction."""
    arrived = tensor.clone()
    broadcast(arrived, root)
    if dist.get_rank() != root:
        tensor += arrived


@wrong(BROADCAST, reason="values", says=r"N = 2, root 0(?s:.*)a view into a larger tensor|stands for other memory")
def b_rebinds_data(tensor, root):
    """tensor.data = what arrived."""
    arrived = tensor.clone()
    broadcast(arrived, root)
    tensor.data = arrived


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


@wrong(BROADCAST, reason="values", says=r"(?s)nan on all ranks but the root.*is nan, as it was.*what arrives replaces")
def b_multiplies_by_zero(tensor, root):
    """Clears by multiplying with 0, and adds what arrives: nan stays."""
    if tensor.dtype == torch.bool:
        return broadcast(tensor, root)
    arrived = tensor.clone()
    broadcast(arrived, root)
    if dist.get_rank() != root:
        tensor *= 0
        tensor += arrived


@wrong(BROADCAST, reason="values", says=r"the root's own tensor has changed")
def b_clears_first(tensor, root):
    """Every rank clears its tensor first, the root too."""
    tensor.zero_()
    broadcast(tensor, root)


@wrong(BROADCAST, reason="values", says=r"has the shape \(6,\) now")
def b_flattens_for_good(tensor, root):
    """Makes the tensor flat and leaves it so."""
    tensor.resize_(tensor.numel())
    broadcast(tensor, root)


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
