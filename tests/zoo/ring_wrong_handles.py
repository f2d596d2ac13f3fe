"""Lab 04: handles that nobody waits for."""

from __future__ import annotations

import torch
import torch.distributed as dist

from . import wrong
from .ring_right import AG, RS, ring, ring_all_gather, ring_reduce_scatter
from .ring_right_all_reduce import AR, run_both

_kept = []


@wrong(RS, reason="order", says=r"(?s)drops its handle.*keep what isend returns")
def rs_drops_the_handle_of_isend(chunks):
    """Calls isend like send: the handle is gone at once, and with it perhaps the message."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        mine = chunks[(rank - step - 2) % n]
        incoming = torch.empty_like(mine)
        dist.isend(chunks[(rank - step - 1) % n], to)
        dist.recv(incoming, source)
        mine += incoming


@wrong(RS, reason="order", says=r"never waits for a receive")
def rs_drops_the_handle_of_irecv(chunks):
    """Calls irecv like recv."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        mine = chunks[(rank - step - 2) % n]
        incoming = torch.zeros_like(mine)
        dist.irecv(incoming, source)
        dist.send(chunks[(rank - step - 1) % n], to)
        mine += incoming


@wrong(AG, reason="order", says=r"(?s)changed before its send.*before the function returns")
def ag_returns_while_still_sending(chunks):
    """Keeps the handles of its sends and never waits: the caller may change the chunks while they are being sent."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        _kept.append(dist.isend(chunks[(rank - step) % n], to))
        dist.recv(chunks[(rank - step - 1) % n], source)


@wrong(AG, reason="order", says=r"drops its handle")
def ag_waits_for_the_last_send_only(chunks):
    """One variable for all handles: only the last send is waited for."""
    rank, n, to, source = ring()
    sending = None
    for step in range(n - 1):
        sending = dist.isend(chunks[(rank - step) % n], to)
        dist.recv(chunks[(rank - step - 1) % n], source)
    if sending is not None:
        sending.wait()


@wrong(AR, reason="order", says=r"(?s)before wait\(\) has returned.*irecv.*; used in .*mine \+= incoming")
def ar_waits_after_the_sum(tensor):
    """Waits for both handles, but only after it has added what one of them was to bring."""
    rank, n, to, source = ring()
    flat = tensor.reshape(-1).clone()
    chunks = list(flat.tensor_split(n))
    for step in range(n - 1):
        mine = chunks[(rank - step - 2) % n]
        incoming = torch.zeros_like(mine)
        works = [dist.irecv(incoming, source), dist.isend(chunks[(rank - step - 1) % n], to)]
        mine += incoming
        for work in works:
            work.wait()
    ring_all_gather(chunks)
    tensor.copy_(flat.view(tensor.shape))


@wrong(AR, reason="order", says=r"before its send is complete")
def ar_clears_what_it_has_just_sent(tensor):
    """Sets a chunk to zero as soon as isend has returned, to have a clean place for the second phase."""

    def reduce_scatter(chunks):
        rank, n, to, source = ring()
        for step in range(n - 1):
            outgoing, mine = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
            incoming = torch.empty_like(mine)
            sending = dist.isend(outgoing, to)
            outgoing.zero_()
            dist.recv(incoming, source)
            sending.wait()
            mine += incoming

    run_both(tensor, reduce_scatter, ring_all_gather)


@wrong(AR, reason="order", says=r"wait\(\) for a receive|never waits")
def ar_second_phase_never_waits(tensor):
    """The second phase starts all its operations and leaves; the copy back takes what is there."""

    def all_gather(chunks):
        rank, n, to, source = ring()
        for step in range(n - 1):
            _kept.append(dist.irecv(chunks[(rank - step - 1) % n], source))
            _kept.append(dist.isend(chunks[(rank - step) % n], to))

    run_both(tensor, ring_reduce_scatter, all_gather)


@wrong(AG, reason="order", says=r"drops its handle")
def ag_never_waits_for_a_send(chunks):
    """Gives every handle a name and waits for none of the sends."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        receiving = dist.irecv(chunks[(rank - step - 1) % n], source)
        sending = dist.isend(chunks[(rank - step) % n], to)  # noqa: F841
        receiving.wait()


@wrong(RS, reason="order", says=r"N = 3(?s:.*)drops its handle")
def rs_dictionary_with_one_key(chunks):
    """Keeps its sends in a dictionary, all under the same key."""
    rank, n, to, source = ring()
    handles = {}
    for step in range(n - 1):
        mine = chunks[(rank - step - 2) % n]
        incoming = torch.empty_like(mine)
        handles["send"] = dist.isend(chunks[(rank - step - 1) % n], to)
        dist.recv(incoming, source)
        mine += incoming
    for handle in handles.values():
        handle.wait()


@wrong(AG, reason="order", says=r"drops its handle")
def ag_waits_for_the_last_of_a_list(chunks):
    """Keeps all handles in a list until the end, and waits for the last."""
    rank, n, to, source = ring()
    sends = []
    for step in range(n - 1):
        sends.append(dist.isend(chunks[(rank - step) % n], to))
        dist.recv(chunks[(rank - step - 1) % n], source)
    if sends:
        sends[-1].wait()


@wrong(RS, reason="order", says=r"before wait\(\) has returned")
def rs_waits_when_the_loop_is_over(chunks):
    """Collects all handles and waits for all of them, when everything has been added."""
    rank, n, to, source = ring()
    handles = []
    for step in range(n - 1):
        mine = chunks[(rank - step - 2) % n]
        incoming = torch.empty_like(mine)
        handles.append(dist.irecv(incoming, source))
        handles.append(dist.isend(chunks[(rank - step - 1) % n], to))
        mine += incoming
    for handle in handles:
        handle.wait()


@wrong(RS, reason="hang", says=r"waits a second time for the same message", patience=2)
def rs_waits_twice(chunks):
    """Waits for a send in the loop and once more at the end."""
    rank, n, to, source = ring()
    sends = []
    for step in range(n - 1):
        mine = chunks[(rank - step - 2) % n]
        incoming = torch.empty_like(mine)
        sends.append(dist.isend(chunks[(rank - step - 1) % n], to))
        dist.recv(incoming, source)
        sends[-1].wait()
        mine += incoming
    for sending in sends:
        sending.wait()


@wrong(AG, reason="hang", says=r"(?s)is_completed\(\) does not turn True.*while not receiving.is_completed", patience=2)
def ag_polls(chunks):
    """Asks again and again whether the message is there, instead of waiting for it."""
    rank, n, to, source = ring()
    for step in range(n - 1):
        receiving = dist.irecv(chunks[(rank - step - 1) % n], source)
        sending = dist.isend(chunks[(rank - step) % n], to)
        while not receiving.is_completed():
            pass
        sending.wait()
