"""Lab 00: broadcasts that end in the wrong memory, or are used before they are there."""

from __future__ import annotations

import torch
import torch.distributed as dist

from . import wrong
from .messages_right import BROADCAST
from .messages_right_broadcast import broadcast, seen_from

_kept = []


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
