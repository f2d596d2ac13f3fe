"""Lab 00: tokens that go astray: who sends to whom."""

from __future__ import annotations

import torch
import torch.distributed as dist

from . import wrong
from .messages_right import TOKEN, around, pass_the_token


@wrong(TOKEN, reason="not written", says=r"raise NotImplementedError")
def t_stub(token, mine):
    """The cell as it is handed out."""
    raise NotImplementedError("not written yet")


@wrong(TOKEN, reason="values", says=r"(?s)rank 0, N = 2.*rank 0's part 2 times.*adds its part once, at the start")
def t_adds_again_at_home(token, mine):
    """Receive, add, pass on, for rank 0 too: its part is added at the start and at the end."""
    rank, n, to, source = around()
    if rank > 0:
        dist.recv(token, source)
    token += mine
    if n > 1:
        dist.send(token, to)
        if rank == 0:
            dist.recv(token, source)
            token += mine


@wrong(TOKEN, reason="values", says=r"(?s)rank 0, N = 2.*the token and rank 1's part\n")
def t_rank_0_only_starts(token, mine):
    """Rank 0 sends the token off without its own part."""
    rank, n, to, source = around()
    if rank > 0:
        dist.recv(token, source)
        token += mine
    if n > 1:
        dist.send(token, to)
        if rank == 0:
            dist.recv(token, source)


@wrong(TOKEN, reason="values", says=r"(?s)rank 0, N = 2.*`token` holds the token alone")
def t_adds_after_passing_on(token, mine):
    """Adds its part when the token has left."""
    rank, n, to, source = around()
    if rank > 0:
        dist.recv(token, source)
    if n > 1:
        dist.send(token, to)
    token += mine
    if n > 1 and rank == 0:
        dist.recv(token, source)


@wrong(TOKEN, reason="hang", says=r"(?s)waits in send to rank.*every rank sends first")
def t_everybody_sends_first(token, mine):
    """All ranks do the same: add, send, receive."""
    rank, n, to, source = around()
    token += mine
    if n > 1:
        dist.send(token, to)
        dist.recv(token, source)


@wrong(TOKEN, reason="hang", says=r"(?s)every rank receives first.*expected: rank 0 sends first")
def t_everybody_receives_first(token, mine):
    """Nobody starts."""
    rank, n, to, source = around()
    if n > 1:
        dist.recv(token, source)
    token += mine
    if n > 1:
        dist.send(token, to)


@wrong(TOKEN, reason="values", says=r"(?s)what stood there before the call.*receive, then add, then pass it on")
def t_all_at_once(token, mine):
    """A shift: everybody sends what they have, at once. It ends, with garbage."""
    rank, n, to, source = around()
    token += mine
    if n > 1:
        incoming = torch.empty_like(token)
        sending = dist.isend(token, to)
        dist.recv(incoming, source)
        sending.wait()
        token.copy_(incoming)


@wrong(TOKEN, reason="hang", says=r"(?s)recv from rank 1.*0 sends and 1 recv from rank 1 to rank 0")
def t_last_rank_keeps_it(token, mine):
    """The last rank does not send, because nobody stands to its right."""
    rank, n, to, source = around()
    if rank > 0:
        dist.recv(token, source)
    token += mine
    if rank < n - 1:
        dist.send(token, to)
    if n > 1 and rank == 0:
        dist.recv(token, source)


@wrong(TOKEN, reason="hang", says=r"(?s)rank 1 waits in send to rank 0.*1 send and 0 recvs from rank 1 to rank 0")
def t_rank_0_goes_home(token, mine):
    """Rank 0 returns when it has sent."""
    rank, n, to, source = around()
    if rank > 0:
        dist.recv(token, source)
    token += mine
    if n > 1:
        dist.send(token, to)


@wrong(
    TOKEN, reason="values", says=r"(?s)rank 0, N = 2.*the token and rank 0's part\n.*receives the token from rank N-1"
)
def t_a_line_instead_of_a_circle(token, mine):
    """From rank 0 to rank N-1, and no further."""
    rank, n, to, source = around()
    if rank > 0:
        dist.recv(token, source)
    token += mine
    if rank < n - 1:
        dist.send(token, to)


@wrong(TOKEN, reason="crash", says=r"rank 1 sends to rank 2; ranks are 0 and 1: forgotten % N\?")
def t_no_modulo(token, mine):
    """rank + 1 is nobody on the last rank."""
    rank, n, _, source = around()
    if rank > 0:
        dist.recv(token, source)
    token += mine
    if n > 1:
        dist.send(token, rank + 1)
        if rank == 0:
            dist.recv(token, source)


@wrong(TOKEN, reason="crash", says=r"rank 0 receives from rank -1; ranks are 0 and 1")
def t_no_modulo_on_the_left(token, mine):
    """rank - 1 is nobody on rank 0."""
    rank, n, to, _ = around()
    if rank > 0:
        dist.recv(token, rank - 1)
    token += mine
    if n > 1:
        dist.send(token, to)
        if rank == 0:
            dist.recv(token, rank - 1)


@wrong(TOKEN, reason="crash", says=r"(?s)ranks are 0 and 1.*N = dist.get_world_size\(\), here 2, whatever")
def t_four_ranks(token, mine):
    """Right with four ranks, as in the notebook."""
    rank = dist.get_rank()
    if rank > 0:
        dist.recv(token, rank - 1)
    token += mine
    dist.send(token, (rank + 1) % 4)
    if rank == 0:
        dist.recv(token, 3)


@wrong(TOKEN, reason="hang|crash", says=r"N = 3")
def t_two_ranks(token, mine):
    """Right with two ranks: the other one is 1 - rank."""
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        dist.recv(token, 0)
    token += mine
    if n > 1:
        dist.send(token, 1 if rank == 0 else 0)
        if rank == 0:
            dist.recv(token, 1)


@wrong(TOKEN, reason="values", says=r"(?s)rank 1, N = 3.*look at:  rank 1 receives from rank 2, and the token")
def t_other_way_round(token, mine):
    """From rank 0 to rank N-1, N-2, ...: the same at N = 2."""
    rank, n, source, to = around()
    if rank > 0:
        dist.recv(token, source)
    token += mine
    if n > 1:
        dist.send(token, to)
        if rank == 0:
            dist.recv(token, source)


@wrong(TOKEN, reason="calls", says=r"(?s)rank 0, N = 2.*sends 2 messages.*one message in and one out")
def t_second_lap(token, mine):
    """A second lap tells everybody the total, in a buffer of its own."""
    pass_the_token(token, mine)
    rank, n, to, source = around()
    total = token.clone()
    if rank > 0:
        dist.recv(total, source)
    if rank < n - 1:
        dist.send(total, to)


@wrong(TOKEN, reason="calls", says=r"the library's (broadcast|all_gather), and by no message")
def t_by_the_library(token, mine):
    """The right numbers, from collectives."""
    rank, n = dist.get_rank(), dist.get_world_size()
    parts = [torch.empty_like(mine) for _ in range(n)]
    dist.broadcast(token, 0)
    dist.all_gather(parts, mine)
    token += sum(parts if rank == 0 else parts[: rank + 1])


@wrong(TOKEN, reason="calls", says=r"1000 elements.*the library's all_reduce moves")
def t_large_ones_by_the_library(token, mine):
    """Messages for what is small, an all-reduce for what is large."""
    if token.numel() < 100:
        return pass_the_token(token, mine)
    rank, n = dist.get_rank(), dist.get_world_size()
    rows = torch.zeros(n + 1, token.numel(), dtype=token.dtype)
    rows[rank] = mine
    if rank == 0:
        rows[n] = token
    dist.all_reduce(rows)
    token.copy_(rows[n] + rows[: rank + 1 if rank else n].sum(0))


@wrong(TOKEN, reason="values", says=r"(?s)rank 0, N = 2.*rank 1's part alone")
def t_passes_on_its_part_alone(token, mine):
    """Sends `mine` instead of the token."""
    rank, n, to, source = around()
    if rank > 0:
        dist.recv(token, source)
    token += mine
    if n > 1:
        dist.send(mine, to)
        if rank == 0:
            dist.recv(token, source)


@wrong(TOKEN, reason="crash", says=r"(?s)N = 1.*with N = 1 there is nothing to do that takes a message")
def t_alone_it_sends_to_itself(token, mine):
    """N = 1 was not thought of."""
    rank, _, to, source = around()
    if rank > 0:
        dist.recv(token, source)
    token += mine
    dist.send(token, to)
    if rank == 0:
        dist.recv(token, source)


@wrong(TOKEN, reason="values", says=r"(?s)rank 0, N = 1.*`token` holds the token alone")
def t_alone_it_does_nothing(token, mine):
    """Leaves at once with N = 1."""
    if dist.get_world_size() > 1:
        pass_the_token(token, mine)


@wrong(TOKEN, reason="calls", says=r"rank 0, N = 3.*(sends|receives) 2 messages")
def t_everything_through_rank_0(token, mine):
    """Rank 0 collects the parts and sends each rank its sum: right numbers, and at N = 2 the right messages."""
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        token += mine
        total = token.clone()
        for other in range(1, n):
            dist.send(total, other)
            dist.recv(total, other)
        token.copy_(total)
    else:
        dist.recv(token, 0)
        token += mine
        dist.send(token, 0)
