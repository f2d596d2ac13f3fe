"""Lab 00: broadcasts that go astray: who sends to whom, and in how many rounds."""

from __future__ import annotations

import math
import threading

import torch
import torch.distributed as dist

from . import wrong
from .messages_right import BROADCAST
from .messages_right_broadcast import broadcast, seen_from


@wrong(BROADCAST, reason="not written", says=r"raise NotImplementedError")
def b_stub(tensor, root):
    """The cell as it is handed out."""
    raise NotImplementedError("not written yet")


@wrong(BROADCAST, reason="values", says=r"rank 1, N = 2, root 0(?s:.*)has not changed(?s:.*)no rank sent anything")
def b_nothing(tensor, root):
    """Does nothing."""


@wrong(BROADCAST, reason="rounds", says=r"(?s)N = 4, root 0.*3 rounds, a chain.*log2 N\) = 2 rounds.*round 2: 2 ranks")
def b_chain(tensor, root):
    """The worked example of the lab: from rank to rank."""
    rank, n, me = seen_from(root)
    if me > 0:
        dist.recv(tensor, (rank - 1) % n)
    if me < n - 1:
        dist.send(tensor, (rank + 1) % n)


@wrong(BROADCAST, reason="rounds", says=r"(?s)N = 4, root 0.*3 rounds, a star.*= 2 rounds")
def b_star(tensor, root):
    """The root sends to everybody."""
    rank, n, me = seen_from(root)
    if me:
        dist.recv(tensor, root)
        return
    for other in range(n):
        if other != root:
            dist.send(tensor, other)


@wrong(BROADCAST, reason="rounds", says=r"3 rounds, a star")
def b_star_at_once(tensor, root):
    """Starts all sends of the star at once: one link carries them all, one after the other."""
    rank, n, me = seen_from(root)
    if me:
        dist.recv(tensor, root)
    else:
        for sending in [dist.isend(tensor, other) for other in range(n) if other != root]:
            sending.wait()


@wrong(BROADCAST, reason="rounds", says=r"3 rounds, a star")
def b_star_of_threads(tensor, root):
    """A thread for each message of the star."""
    rank, n, me = seen_from(root)
    if me:
        dist.recv(tensor, root)
        return
    threads = [threading.Thread(target=dist.send, args=(tensor, (root + k) % n)) for k in range(1, n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@wrong(BROADCAST, reason="rounds", says=r"(?s)N = 8.*4 rounds.*round 3: 4 ranks have the data, 2 messages sent")
def b_two_chains(tensor, root):
    """To both neighbours, and on from there: half as many rounds as a chain, plus one."""
    rank, n, me = seen_from(root)
    half = n // 2
    if me == 0:
        if n > 1:
            dist.send(tensor, (rank + 1) % n)
        if n > 2:
            dist.send(tensor, (rank - 1) % n)
    elif me <= half:
        dist.recv(tensor, (rank - 1) % n)
        if me < half:
            dist.send(tensor, (rank + 1) % n)
    else:
        dist.recv(tensor, (rank + 1) % n)
        if me > half + 1:
            dist.send(tensor, (rank - 1) % n)


@wrong(BROADCAST, reason="rounds", says=r"(?s)N = 8.*4 rounds.*= 3 rounds")
def b_heap(tensor, root):
    """A tree as in a heap: rank k sends to 2k + 1 and 2k + 2. Quick enough up to five ranks, not at eight."""
    rank, n, me = seen_from(root)
    if me:
        dist.recv(tensor, ((me - 1) // 2 + root) % n)
    for child in (2 * me + 1, 2 * me + 2):
        if child < n:
            dist.send(tensor, (child + root) % n)


@wrong(BROADCAST, reason="rounds", says=r"(?s)N = 4, root 0.*3 rounds;.*round 2: 2 ranks have the data, 1 message sent")
def b_smallest_part_first(tensor, root):
    """The tree of MPICH, but each rank serves its smallest part first, so that the largest starts last."""
    rank, n, me = seen_from(root)
    mask = 1
    while mask < n and not me & mask:
        mask <<= 1
    if me:
        dist.recv(tensor, (rank - mask) % n)
    distance = 1
    while distance < mask:
        if me + distance < n:
            dist.send(tensor, (rank + distance) % n)
        distance <<= 1


@wrong(BROADCAST, reason="values|hang|crash", says=r"N = 2, root 1")
def b_from_rank_0(tensor, root):
    """Forgets the root: rank 0 is where it starts."""
    broadcast(tensor, 0)


@wrong(BROADCAST, reason="crash", says=r"root 1(?s:.*)|rank \d (sends to|receives from) rank (2|-1); ranks are 0 and 1")
def b_no_modulo(tensor, root):
    """Counts from the root, but not round the end."""
    rank, n = dist.get_rank(), dist.get_world_size()
    me, distance = (rank - root) % n, 1
    while distance < n:
        if me < distance and me + distance < n:
            dist.send(tensor, rank + distance)
        elif distance <= me < 2 * distance:
            dist.recv(tensor, rank - distance)
        distance *= 2


@wrong(BROADCAST, reason="values|hang", says=r"N = 3, root [12]")
def b_plus_instead_of_minus(tensor, root):
    """(rank + root) % n instead of (rank - root) % n: the same with two ranks."""
    rank, n = dist.get_rank(), dist.get_world_size()
    me, distance = (rank + root) % n, 1
    while distance < n:
        if me < distance and me + distance < n:
            dist.send(tensor, (rank + distance) % n)
        elif distance <= me < 2 * distance:
            dist.recv(tensor, (rank - distance) % n)
        distance *= 2


@wrong(BROADCAST, reason="crash", says=r"N = 3(?s:.*)rank \d (sends to|receives from) rank [34]; ranks are 0 to 2")
def b_powers_of_two(tensor, root):
    """Partners by XOR: right when N is a power of two."""
    rank, n = dist.get_rank(), dist.get_world_size()
    me, distance = rank ^ root, 1
    while distance < n:
        if me < distance:
            dist.send(tensor, rank ^ distance)
        elif me < 2 * distance:
            dist.recv(tensor, rank ^ distance)
        distance *= 2


@wrong(BROADCAST, reason="values|hang|crash", says=r"N = 3")
def b_xor_within_bounds(tensor, root):
    """XOR with the root, and whoever has no partner stands by."""
    rank, n = dist.get_rank(), dist.get_world_size()
    me, distance = rank ^ root, 1
    while distance < n:
        if me < distance and rank ^ distance < n:
            dist.send(tensor, rank ^ distance)
        elif distance <= me < 2 * distance:
            dist.recv(tensor, rank ^ distance)
        distance *= 2


@wrong(BROADCAST, reason="values", says=r"(?s)rank 2, N = 3, root 0.*has not changed.*rank 2 receives no message")
def b_log_rounded_down(tensor, root):
    """int(log2 N) rounds: one too few when N is no power of two."""
    rank, n, me = seen_from(root)
    for step in range(int(math.log2(n))):
        distance = 2**step
        if me < distance and me + distance < n:
            dist.send(tensor, (rank + distance) % n)
        elif distance <= me < 2 * distance:
            dist.recv(tensor, (rank - distance) % n)


@wrong(BROADCAST, reason="hang", says=r"N = 3, root 0(?s:.*)0 sends and 1 recv from rank 0 to rank 2")
def b_receiver_knows_more(tensor, root):
    """The sender stops one round early, the receiver does not."""
    rank, n, me = seen_from(root)
    distance = 1
    while distance < n:
        if me < distance and me + distance < n and 2 * distance <= n:
            dist.send(tensor, (rank + distance) % n)
        elif distance <= me < 2 * distance:
            dist.recv(tensor, (rank - distance) % n)
        distance *= 2


@wrong(BROADCAST, reason="hang", says=r"waits in send")
def b_everybody_sends_first(tensor, root):
    """Both partners of a round send, then receive."""
    rank, n, me = seen_from(root)
    if n > 1 and me < 2:
        other = (rank + (1 if me == 0 else -1)) % n
        dist.send(tensor, other)
        dist.recv(tensor, other)


@wrong(
    BROADCAST, reason="values", says=r"N = 4|N = 3|the root's own tensor has changed|has not changed|holds what rank"
)
def b_forwards_before_it_receives(tensor, root):
    """Ascending distances with the test for descending ones: ranks pass on what they have not got yet."""
    rank, n, me = seen_from(root)
    distance = 1
    while distance < n:
        if me % (2 * distance) == 0:
            if me + distance < n:
                dist.send(tensor, (rank + distance) % n)
        elif me % distance == 0:
            dist.recv(tensor, (rank - distance) % n)
        distance *= 2


@wrong(BROADCAST, reason="calls", says=r"rank 1, N = 2.*receives 2 messages; 2 are sent in all")
def b_twice(tensor, root):
    """Once more, to be on the safe side."""
    broadcast(tensor, root)
    broadcast(tensor, root)


@wrong(
    BROADCAST,
    reason="calls",
    says=r"rank 0, N = 2, root 0(?s:.*)receives 1 message; 2 are sent in all(?s:.*)none to the root",
)
def b_confirms(tensor, root):
    """Whoever has received tells the root."""
    rank, n, me = seen_from(root)
    broadcast(tensor, root)
    note = torch.zeros(1)
    if me:
        dist.send(note, root)
    else:
        for other in range(n):
            if other != root:
                dist.recv(note, other)


@wrong(BROADCAST, reason="calls", says=r"rank 0, N = 2, root 0(?s:.*)receives 1 message(?s:.*)none to the root")
def b_exchanges_both_ways(tensor, root):
    """In every round partners swap what they have, and keep the right one."""
    rank, n, me = seen_from(root)
    distance = 1
    while distance < n:
        partner = me ^ distance
        if me < 2 * distance and partner < n and partner < 2 * distance:
            theirs = torch.empty_like(tensor)
            sending = dist.isend(tensor.clone(), (partner + root) % n)
            dist.recv(theirs, (partner + root) % n)
            sending.wait()
            if me > partner:
                tensor.copy_(theirs)
        distance *= 2


@wrong(BROADCAST, reason="calls", says=r"receives 4 messages")
def b_in_pieces(tensor, root):
    """Four pieces, so that the next one can follow at once: a pipeline, which is another exercise."""
    for piece in tensor.view(-1).tensor_split(4):
        broadcast(piece, root)
