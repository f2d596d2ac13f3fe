"""Lab 00: more tokens that go astray: what is sent, and how often."""

from __future__ import annotations

import torch
import torch.distributed as dist

from . import wrong
from .messages_right import TOKEN, around, pass_the_token

_kept = []


@wrong(TOKEN, reason="hang", says=r"(?s)rank 0 calls barrier, and rank 1 does not.*dist.barrier\(\)")
def t_barrier_on_rank_0_alone(token, mine):
    """A barrier inside `if rank == 0`."""
    pass_the_token(token, mine)
    if dist.get_rank() == 0:
        dist.barrier()


@wrong(TOKEN, reason="hang", says=r"by their tags")
def t_tags_of_the_receiver(token, mine):
    """Sender and receiver each use their own rank as the tag: they never meet."""
    rank, n, to, source = around()
    if rank > 0:
        dist.recv(token, source, tag=rank)
    token += mine
    if n > 1:
        dist.send(token, to, tag=rank)
        if rank == 0:
            dist.recv(token, source, tag=rank)


@wrong(TOKEN, reason="bytes", says=r"(?s)1000 elements.*a message of 8,000 bytes.*4,000 bytes")
def t_sends_doubles(token, mine):
    """Turns the token into float64 on the way."""
    wide = token.double()
    pass_the_token(wide, mine.double())
    token.copy_(wide)


@wrong(TOKEN, reason="calls", says=r"sends 3 messages")
def t_number_by_number(token, mine):
    """A message for every number."""
    for index in range(len(token)):
        pass_the_token(token[index : index + 1], mine[index : index + 1])


@wrong(TOKEN, reason="calls", says=r"N = 2.*(sends|receives) 2 messages")
def t_acknowledges(token, mine):
    """Every receipt is confirmed by a message of one number."""
    rank, n, to, source = around()
    note = torch.zeros(1)
    if rank > 0:
        dist.recv(token, source)
        dist.send(note, source)
    token += mine
    if n > 1:
        dist.send(token, to)
        dist.recv(note, to)
        if rank == 0:
            dist.recv(token, source)
            dist.send(note, source)


@wrong(TOKEN, reason="values|hang", says=r"N = 2")
def t_acknowledges_and_deadlocks(token, mine):
    """The same with the receipts the wrong way about: rank 0 waits for its receipt after it has the token back."""
    rank, n, to, source = around()
    note = torch.zeros(1)
    if rank > 0:
        dist.recv(token, source)
    token += mine
    if n > 1:
        dist.send(token, to)
        if rank == 0:
            dist.recv(token, source)
        dist.send(note, source)
        dist.recv(note, to)


@wrong(TOKEN, reason="values", says=r"(?s)rank 0, N = 2.*rank 0's part and rank 1's part\n")
def t_starts_from_zero(token, mine):
    """Clears the token first."""
    if dist.get_rank() == 0:
        token.zero_()
    pass_the_token(token, mine)


@wrong(TOKEN, reason="values", says=r"rank 0, N = 2.*element 0 of `token` is")
def t_adds_its_number(token, mine):
    """Adds its rank instead of its part."""
    pass_the_token(token, torch.full_like(mine, dist.get_rank()))


@wrong(TOKEN, reason="hang", says=r"N = 3")
def t_receives_from_the_right(token, mine):
    """Sends to the right and receives from the right: with two ranks that is the same."""
    rank, n, to, _ = around()
    if rank > 0:
        dist.recv(token, to)
    token += mine
    if n > 1:
        dist.send(token, to)
        if rank == 0:
            dist.recv(token, to)


@wrong(TOKEN, reason="calls", says=r"sends 2 messages|was sent but never received")
def t_one_send_too_many(token, mine):
    """A second isend that nobody receives."""
    rank, n, to, source = around()
    pass_the_token(token, mine)
    if n > 1:
        _kept.append(dist.isend(token.clone(), to))


@wrong(TOKEN, reason="values", says=r"element 1 of `token` holds the token alone")
def t_first_number_only(token, mine):
    """Adds one number of its part."""
    rank, n, to, source = around()
    if rank > 0:
        dist.recv(token, source)
    token[:1] += mine[:1]
    if n > 1:
        dist.send(token, to)
        if rank == 0:
            dist.recv(token, source)


@wrong(TOKEN, reason="values", says=r"what stood there before the call|nan")
def t_even_ranks_send_first(token, mine):
    """Even ranks send, then receive; odd ranks receive, then send: no deadlock, no token."""
    rank, n, to, source = around()
    if n == 1:
        token += mine
    elif rank % 2 == 0:
        token += mine
        dist.send(token, to)
        dist.recv(token, source)
    else:
        dist.recv(token, source)
        token += mine
        dist.send(token, to)


@wrong(TOKEN, reason="values", says=r"element 0 of `token` is")
def t_average(token, mine):
    """Divides by N at the end."""
    pass_the_token(token, mine)
    token /= dist.get_world_size()


@wrong(TOKEN, reason="values", says=r"nan in `token`.*is nan")
def t_adds_to_what_is_there(token, mine):
    """Ranks other than 0 clear the token by multiplying with 0, and add what arrives: nan stays nan."""
    rank, n, to, source = around()
    if rank > 0:
        incoming = torch.empty_like(token)
        dist.recv(incoming, source)
        token *= 0
        token += incoming
    token += mine
    if n > 1:
        dist.send(token, to)
        if rank == 0:
            dist.recv(token, source)


@wrong(TOKEN, reason="bytes", says=r"views into larger tensors(?s:.*)a message of 72 bytes")
def t_sends_the_whole_storage(token, mine):
    """Sends and receives the whole storage behind the token."""
    whole = torch.empty(0, dtype=token.dtype).set_(token.untyped_storage())
    rest = torch.zeros_like(whole)
    first = token.storage_offset()
    rest[first : first + len(token)] = mine
    pass_the_token(whole, rest)


@wrong(TOKEN, reason="signature", says=r"2 arguments: \(token, mine\)")
def t_wants_the_rank(token, mine, rank, world_size):
    """Expects rank and world size as arguments."""


@wrong(TOKEN, reason="calls", says=r"(?s)rank \d sends 1 float64 to rank \d, which receives 3 float64.*token\[:1\]")
def t_sends_one_number(token, mine):
    """Sends the first number only, the receiver expects all."""
    rank, n, to, source = around()
    if rank > 0:
        dist.recv(token, source)
    token += mine
    if n > 1:
        dist.send(token[:1].clone(), to)
        if rank == 0:
            dist.recv(token, source)


@wrong(TOKEN, reason="values", says=r"rank 0, N = 3(?s:.*)the token, rank 0's part and rank 2's part\n")
def t_skips_every_second_rank(token, mine):
    """Only rank 0 and the last one take part."""
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        token += mine
        if n > 1:
            dist.send(token, n - 1)
            dist.recv(token, n - 1)
    elif rank == n - 1:
        dist.recv(token, 0)
        token += mine
        dist.send(token, 0)


@wrong(TOKEN, reason="calls", says=r"rank 0, N = 2.*sends 2 messages")
def t_as_objects(token, mine):
    """send_object_list: a message with the size, and one with a pickle."""
    rank, n, to, source = around()
    box = [token]
    if rank > 0:
        dist.recv_object_list(box, source)
    token.copy_(box[0] + mine)
    if n > 1:
        dist.send_object_list([token], to)
        if rank == 0:
            dist.recv_object_list(box, source)
            token.copy_(box[0])


@wrong(TOKEN, reason="values|hang", says=r"N = 5|N = 3")
def t_halves_of_the_circle(token, mine):
    """The ranks with even numbers first, then the odd ones: the order is not 0, 1, 2, ..."""
    rank, n = dist.get_rank(), dist.get_world_size()
    order = [*range(0, n, 2), *range(1, n, 2)]
    place = order.index(rank)
    if rank > 0:
        dist.recv(token, order[place - 1])
    token += mine
    if n > 1:
        dist.send(token, order[(place + 1) % n])
        if rank == 0:
            dist.recv(token, order[-1])


@wrong(TOKEN, reason="values", says=r"rank 1 adds its part after it has passed the token on: first add, then send")
def t_others_add_after_passing_on(token, mine):
    """Rank 0 adds and sends; the others receive, pass on, and add then."""
    rank, n, to, source = around()
    if rank == 0:
        token += mine
    else:
        dist.recv(token, source)
    if n > 1:
        dist.send(token, to)
    if rank > 0:
        token += mine
    elif n > 1:
        dist.recv(token, source)


@wrong(TOKEN, reason="values", says=r"rank 1's part is missing on rank 1 already: first receive, then add, then send")
def t_adds_before_it_receives(token, mine):
    """What is added to the token before it arrives is overwritten."""
    rank, n, to, source = around()
    token += mine
    if rank > 0:
        dist.recv(token, source)
    if n > 1:
        dist.send(token, to)
        if rank == 0:
            dist.recv(token, source)


@wrong(TOKEN, reason="values", says=r"rank 0 adds its part, but only after it has passed the token on")
def t_rank_0_adds_at_home(token, mine):
    """Rank 0 adds when the token comes home, and not at the start."""
    rank, n, to, source = around()
    if rank == 0 and n > 1:
        dist.send(token, to)
    if n > 1:
        dist.recv(token, source)
    token += mine
    if rank > 0:
        dist.send(token, to)


@wrong(TOKEN, reason="crash", says=r"(?s)NameError.*print\(\.\.\.\) in a rank.*look at:  .*display\(token\)")
def t_displays(token, mine):
    """`display` is there in a notebook only."""
    display(token)  # noqa: F821
