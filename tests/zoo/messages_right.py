"""Lab 00: the plain token, and right ones written in other ways."""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist
from torch.distributed import get_rank, get_world_size, irecv, isend, recv, send

from . import right

TOKEN, BROADCAST = "00.pass_the_token", "00.broadcast"


def around() -> tuple[int, int, int, int]:
    """rank, world size, right neighbour, left neighbour"""
    rank, n = dist.get_rank(), dist.get_world_size()
    return rank, n, (rank + 1) % n, (rank - 1) % n


@right(TOKEN)
def pass_the_token(token, mine):
    """The plain solution: all but rank 0 receive, add and send; rank 0 adds, sends and receives."""
    rank, n, to, source = around()
    if rank > 0:
        dist.recv(token, source)
    token += mine
    if n > 1:
        dist.send(token, to)
        if rank == 0:
            dist.recv(token, source)


@right(TOKEN)
def token_by_rounds(token, mine):
    """A loop over the ranks: in each round one of them sends and its right neighbour receives and adds."""
    rank, n, to, source = around()
    if rank == 0:
        token.add_(mine)
    for sender in range(n - 1):
        if rank == sender:
            send(token, sender + 1)
        if rank == sender + 1:
            recv(token, sender)
            torch.add(token, mine, out=token)
        dist.barrier()
    if n > 1 and rank == n - 1:
        send(token, 0)
    if n > 1 and rank == 0:
        recv(token, n - 1)


@right(TOKEN)
def token_receive_posted_first(token, mine):
    """Every rank posts its receive into a buffer of its own before anything else."""
    rank, n, to, source = around()
    if n == 1:
        token += mine
        return
    buffer = torch.empty_like(token)
    receiving = dist.irecv(buffer, source)
    if rank == 0:
        token += mine
        sending = dist.isend(token, to)
        receiving.wait()
        sending.wait()
        token.copy_(buffer)
    else:
        receiving.wait()
        token.copy_(buffer + mine)
        dist.isend(token, to).wait()


@right(TOKEN)
def token_from_anybody(token, mine):
    """recv without a source takes a message from whoever sends one."""
    rank, n, to, source = around()
    if rank:
        dist.recv(token)
    token += mine
    if n > 1:
        dist.send(token, dst=to)
    if n > 1 and not rank:
        assert dist.recv(token) == source


@right(TOKEN)
def token_in_a_batch(token, mine):
    """Every message in a batch of its own; returns the token as well."""
    rank, n, to, source = around()

    def one(operation, peer):
        for work in dist.batch_isend_irecv([dist.P2POp(operation, token, peer)]):
            work.wait()

    if rank != 0:
        one(dist.irecv, source)
    token += mine
    if n > 1:
        one(dist.isend, to)
        if rank == 0:
            one(dist.irecv, source)
    return token


@right(TOKEN)
def token_with_tags(token, mine):
    """The tag says who sends."""
    rank, n, to, source = around()
    if rank > 0:
        irecv(tensor=token, src=source, tag=source).wait()
    token += mine
    if n > 1:
        isend(tensor=token, dst=to, tag=rank).wait()
        if rank == 0:
            irecv(tensor=token, src=source, tag=source).wait()


@right(TOKEN)
def token_as_bytes(token, mine):
    """Sends bytes, in a group that it makes itself."""
    rank, n, to, source = around()
    group = dist.new_group(list(range(n)))
    if rank > 0:
        dist.recv(token.view(torch.uint8), source, group=group)
    token += mine
    if n > 1:
        dist.send(token.view(torch.uint8), to, group=group)
        if rank == 0:
            dist.recv(token.view(torch.uint8), source, group=group)


@right(TOKEN)
def token_received_in_a_thread(token, mine):
    """Rank 0 waits for the token's return in a thread, into a buffer, while it sends."""
    rank, n, to, source = around()
    if rank > 0:
        dist.recv(token, source)
    token += mine
    if n == 1:
        return
    home = torch.empty_like(token)
    waiting = threading.Thread(target=dist.recv, args=(home, source))
    if rank == 0:
        waiting.start()
    dist.send(token, to)
    if rank == 0:
        waiting.join()
        token[:] = home


@right(TOKEN)
def token_recursive(token, mine, step=0):
    """One rank's turn after the other, by recursion, with prints and a flag that all ranks share."""
    rank, n = get_rank(), get_world_size()
    dist.all_reduce(torch.ones(1))
    if step == rank:
        print("my turn", token)
        token += mine
        if n > 1:
            dist.send(token.clone(), (rank + 1) % n)
    if n > 1 and (step + 1) % n == rank:
        dist.recv(token, step)
    if step + 1 < n:
        token_recursive(token, mine, step + 1)


@right(TOKEN)
def token_number_by_number(token, mine):
    """Adds in Python, number by number, but sends all of them at once."""
    rank, n, to, source = around()
    if rank > 0:
        dist.recv(token, source)
    for index in range(len(token)):
        token[index] += mine[index]
    if n == 1:
        return
    dist.send(token, to)
    if rank == 0:
        dist.recv(token, source)
