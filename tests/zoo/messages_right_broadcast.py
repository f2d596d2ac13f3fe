"""Lab 00: the plain broadcast, and right ones written in other ways."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import get_rank, get_world_size, recv, send

from . import right
from .messages_right import BROADCAST


def seen_from(root: int) -> tuple[int, int, int]:
    """rank, world size, and the rank's number counted from the root"""
    rank, n = dist.get_rank(), dist.get_world_size()
    return rank, n, (rank - root) % n


@right(BROADCAST)
def broadcast(tensor, root):
    """The plain solution: in each round the ranks that have the data, counted from the root, double."""
    rank, n, me = seen_from(root)
    distance = 1
    while distance < n:
        if me < distance and me + distance < n:
            dist.send(tensor, (rank + distance) % n)
        elif distance <= me < 2 * distance:
            dist.recv(tensor, (rank - distance) % n)
        distance *= 2


@right(BROADCAST)
def broadcast_as_mpich_does(tensor, root):
    """Receives from the rank without its lowest bit, then sends at falling distances (Thakur et al. 2005)."""
    rank, n, me = seen_from(root)
    mask = 1
    while mask < n:
        if me & mask:
            dist.recv(tensor, (rank - mask) % n)
            break
        mask <<= 1
    mask >>= 1
    while mask:
        if me + mask < n:
            dist.send(tensor, (rank + mask) % n)
        mask >>= 1


@right(BROADCAST)
def broadcast_halves_recursively(tensor, root):
    """The first of a range of ranks sends to the first of its second half; then each half does the same."""
    rank, n, me = seen_from(root)

    def within(first, end):
        if end - first < 2:
            return
        middle = (first + end + 1) // 2
        if me == first:
            dist.send(tensor, (middle + root) % n)
        if me == middle:
            dist.recv(tensor, (first + root) % n)
        within(first, middle) if me < middle else within(middle, end)

    within(0, n)


@right(BROADCAST)
def broadcast_by_a_plan(tensor, root):
    """All ranks compute who has the data after each round; those who have it send to the next who have not."""
    rank, n = get_rank(), get_world_size()
    have = [root]
    missing = [other for other in range(n) if other != root]
    while missing:
        pairs = list(zip(have, missing, strict=False))
        for source, target in pairs:
            if rank == source:
                send(tensor, target)
            if rank == target:
                recv(tensor, source)
        have += [target for _, target in pairs]
        missing = missing[len(pairs) :]


@right(BROADCAST)
def broadcast_sends_at_once(tensor, root):
    """Starts all its sends without waiting, and waits for them at the end; receives from whoever sends."""
    rank, n, me = seen_from(root)
    if me:
        dist.recv(tensor)
    distance = 1 << me.bit_length()
    sends = []
    while me + distance < n:
        sends.append(dist.isend(tensor, (rank + distance) % n))
        distance *= 2
    for sending in sends:
        sending.wait()


@right(BROADCAST)
def broadcast_other_way_round(tensor, root):
    """Numbers the ranks from the root downwards."""
    rank, n = get_rank(), get_world_size()
    me = (root - rank) % n
    for step in range((n - 1).bit_length()):
        if me < 2**step:
            if me + 2**step < n:
                dist.send(tensor, (root - me - 2**step) % n)
        elif me < 2 ** (step + 1):
            dist.recv(tensor, (root - me + 2**step) % n)
    return tensor


@right(BROADCAST)
def broadcast_into_a_buffer(tensor, root):
    """Receives into a copy that it passes on; copies it at the end. A barrier and a flag in every round."""
    rank, n, me = seen_from(root)
    buffer = tensor.clone()
    distance = 1
    while distance <= n:
        if me < distance and me + distance < n:
            dist.isend(buffer, (rank + distance) % n).wait()
        elif distance <= me < 2 * distance:
            dist.irecv(buffer, (rank - distance) % n).wait()
        dist.barrier()
        dist.all_reduce(torch.ones(1))
        distance *= 2
    if me:
        tensor.copy_(buffer)


@right(BROADCAST)
def broadcast_as_bytes(tensor, root):
    """Sends the memory as bytes, in a group of its own, with the round as the tag. Nothing is sent of no elements."""
    rank, n, me = seen_from(root)
    if not tensor.numel():
        return
    group = dist.new_group()
    data = tensor.view(-1).view(torch.uint8)
    for step in range(n.bit_length()):
        distance = 2**step
        if me < distance and me + distance < n:
            dist.send(data, (rank + distance) % n, group, step)
        elif distance <= me < 2 * distance:
            dist.recv(data, (rank - distance) % n, group, step)


@right(BROADCAST)
def broadcast_in_batches(tensor, root):
    """Each round's message in a batch."""
    rank, n, me = seen_from(root)
    for step in range(n.bit_length()):
        distance, operations = 2**step, []
        if me < distance and me + distance < n:
            operations.append(dist.P2POp(dist.isend, tensor, (rank + distance) % n))
        elif distance <= me < 2 * distance:
            operations.append(dist.P2POp(dist.irecv, tensor, (rank - distance) % n))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()


@right(BROADCAST)
def broadcast_star_where_that_is_as_good(tensor, root):
    """Up to three ranks the root sends to each; from four on it is a tree."""
    rank, n, me = seen_from(root)
    if n > 3:
        broadcast(tensor, root)
    elif me:
        dist.recv(tensor, root)
    else:
        for other in range(n):
            if other != rank:
                dist.send(tensor.detach(), other)
