"""Lab 00: tokens that are kept in the wrong memory, or used before they are there."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from . import wrong
from .messages_right import TOKEN, around, pass_the_token

_kept = []


@wrong(TOKEN, reason="values", says=r"(?s)rank 1, N = 2.*the token and rank 0's part\n.*`token = token \+ mine` makes")
def t_rebinds_the_name(token, mine):
    """`token = token + mine` makes a new tensor, which is passed on; the one handed in lacks the own part."""
    rank, n, to, source = around()
    home = token
    if rank > 0:
        dist.recv(token, source)
    token = token + mine
    if n > 1:
        dist.send(token, to)
        if rank == 0:
            dist.recv(home, source)


@wrong(TOKEN, reason="values", says=r"(?s)rank 0, N = 2.*rank 0's part\n.*rank 0 does not receive into `token`")
def t_receives_home_into_a_new_tensor(token, mine):
    """Rank 0 receives what comes home, into a tensor that is then forgotten."""
    rank, n, to, source = around()
    if rank > 0:
        dist.recv(token, source)
    token += mine
    if n > 1:
        dist.send(token, to)
    if n > 1 and rank == 0:
        token = torch.empty_like(token)
        dist.recv(token, source)
    return token


@wrong(TOKEN, reason="order", says=r"(?s)drops its handle.*keep what isend returns")
def t_drops_the_handle(token, mine):
    """isend like send."""
    rank, n, to, source = around()
    if rank > 0:
        dist.recv(token, source)
    token += mine
    if n > 1:
        dist.isend(token, to)
        if rank == 0:
            dist.recv(token, source)


@wrong(TOKEN, reason="order", says=r"never waits for a receive")
def t_irecv_like_recv(token, mine):
    """irecv like recv: adds to what is not there yet."""
    rank, n, to, source = around()
    if rank > 0:
        dist.irecv(token, source)
    token += mine
    if n > 1:
        dist.send(token, to)
        if rank == 0:
            dist.recv(token, source)


@wrong(TOKEN, reason="order", says=r"never waits for a receive")
def t_sleeps_instead_of_waiting(token, mine):
    """Gives the message a moment."""
    rank, n, to, source = around()
    if rank > 0:
        _kept.append(dist.irecv(token, source))
        time.sleep(0.02)
    token += mine
    if n > 1:
        dist.send(token, to)
        if rank == 0:
            dist.recv(token, source)


@wrong(TOKEN, reason="order", says=r"(?s)before its send is complete.*isend.*; changed in .*recv")
def t_receives_over_what_it_sends(token, mine):
    """Rank 0 posts its receive into the token while the same memory is being sent."""
    rank, n, to, source = around()
    if rank > 0:
        dist.recv(token, source)
    token += mine
    if n > 1:
        sending = dist.isend(token, to)
        if rank == 0:
            dist.recv(token, source)
        sending.wait()


@wrong(TOKEN, reason="order", says=r"(?s)wait\(\) for a send.*before the function returns")
def t_never_waits_for_its_send(token, mine):
    """Keeps the handles, and leaves while the token is being sent."""
    rank, n, to, source = around()
    if rank > 0:
        dist.recv(token, source)
    token += mine
    if n > 1:
        outgoing = token if rank else token.clone()
        _kept.append(dist.isend(outgoing, to))
        if rank == 0:
            dist.recv(token, source)


@wrong(TOKEN, reason="order", says=r"(?s)uses the buffer of a receive before wait.*token \+= mine")
def t_waits_after_adding(token, mine):
    """Waits, but too late."""
    rank, n, to, source = around()
    if rank > 0:
        receiving = dist.irecv(token, source)
        token += mine
        receiving.wait()
    else:
        token += mine
    if n > 1:
        dist.send(token, to)
        if rank == 0:
            dist.recv(token, source)


@wrong(TOKEN, reason="values", says=r"`mine` has been changed")
def t_adds_the_token_to_mine(token, mine):
    """`mine += token`, and copies that."""
    rank, n, to, source = around()
    if rank > 0:
        dist.recv(token, source)
    mine += token
    token.copy_(mine)
    if n > 1:
        dist.send(token, to)
        if rank == 0:
            dist.recv(token, source)


@wrong(TOKEN, reason="values", says=r"(?s)stands for other memory.*copy_\(\)")
def t_rebinds_data(token, mine):
    """`token.data = token + mine`."""
    rank, n, to, source = around()
    if rank > 0:
        dist.recv(token, source)
    token.data = token + mine
    if n > 1:
        dist.send(token, to)
        if rank == 0:
            dist.recv(token, source)


@wrong(TOKEN, reason="values", says=r"(?s)`token` has not changed; a new tensor was returned.*in place")
def t_returns_a_new_tensor(token, mine):
    """Works on a copy and returns it."""
    mine_and_token = token.clone()
    pass_the_token(mine_and_token, mine)
    return mine_and_token


@wrong(TOKEN, reason="values", says=r"rank 1, N = 2.*`token` has not changed")
def t_keeps_it_in_a_buffer(token, mine):
    """All ranks but 0 work in a buffer and leave the token as it was."""
    rank, n, to, source = around()
    if rank == 0:
        return pass_the_token(token, mine)
    buffer = torch.empty_like(token)
    dist.recv(buffer, source)
    buffer += mine
    dist.send(buffer, to)


@wrong(TOKEN, reason="hang", says=r"is_completed\(\) does not turn True", patience=1.5)
def t_polls(token, mine):
    """Asks again and again whether the message is through."""
    rank, n, to, source = around()
    if rank > 0:
        receiving = dist.irecv(token, source)
        while not receiving.is_completed():
            pass
    token += mine
    if n > 1:
        dist.send(token, to)
        if rank == 0:
            dist.recv(token, source)


@wrong(TOKEN, reason="order", says=r"(?s)before wait\(\) has returned.*irecv\(token.*; used in .*token \+= mine")
def t_receives_into_the_token_from_the_start(token, mine):
    """Rank 0 posts its receive first, into the token that it has yet to send."""
    rank, n, to, source = around()
    if rank > 0:
        return pass_the_token(token, mine)
    receiving = dist.irecv(token, source) if n > 1 else None
    token += mine
    if receiving:
        dist.send(token, to)
        receiving.wait()


@wrong(TOKEN, reason="order", says=r"drops its handle")
def t_wait_without_parentheses(token, mine):
    """`.wait` names the method and does not call it."""
    rank, n, to, source = around()
    if rank > 0:
        dist.recv(token, source)
    token += mine
    if n > 1:
        dist.isend(token, to).wait  # noqa: B018
        if rank == 0:
            dist.recv(token, source)


@wrong(TOKEN, reason="values", says=r"(?s)rank 0's part is in what rank 1 received.*`token = token \+ mine` makes")
def t_rebinds_the_name_everywhere(token, mine):
    """`token = token + mine`, and rank 0 receives what comes home into the new tensor too."""
    rank, n, to, source = around()
    if rank > 0:
        dist.recv(token, source)
    token = token + mine
    if n > 1:
        dist.send(token, to)
        if rank == 0:
            dist.recv(token, source)


@wrong(TOKEN, reason="values", says=r"`mine` has changed on rank [01]: `token \+= mine` changes the token")
def t_adds_the_token_to_its_part(token, mine):
    """`mine += token`: the sum is in the wrong one of the two, and the token travels as it was."""
    rank, n, to, source = around()
    if rank > 0:
        dist.recv(token, source)
    mine += token
    if n > 1:
        dist.send(token, to)
        if rank == 0:
            dist.recv(token, source)


@wrong(
    TOKEN, reason="hang", says=r"(?s)of nothing but operations on tensors.*recv waits for it.*torch.equal", patience=1
)
def t_watches_the_memory(token, mine):
    """Waits for the token in a loop, as if others wrote into this rank's memory."""
    rank, n, to, source = around()
    before = token.clone()
    while rank > 0 and torch.equal(token, before):
        time.sleep(0.01)
    pass_the_token(token, mine)
