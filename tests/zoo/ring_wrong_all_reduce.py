"""Lab 04, all-reduce on a ring: plausible mistakes, and what the check must say of each."""

from __future__ import annotations

import torch
import torch.distributed as dist

from . import wrong
from .ring_right import exchange, ring, ring_all_gather, ring_reduce_scatter
from .ring_right_all_reduce import AR, ring_all_reduce, run_both
from .ring_wrong_all_gather import ag_adds, ag_index_runs_the_wrong_way
from .ring_wrong_reduce_scatter import rs_n_steps, rs_send_first_blocking, rs_staging_buffer_reused


@wrong(AR, reason="crash", says=r"list index out of range")
def ar_torch_chunk(tensor):
    """torch.chunk gives fewer than N pieces for (9, 4), (5, 4), (2, 3)."""
    flat = tensor.reshape(-1).clone()
    chunks = list(flat.chunk(dist.get_world_size()))
    ring_reduce_scatter(chunks)
    ring_all_gather(chunks)
    tensor.copy_(flat.view(tensor.shape))


@wrong(AR, reason="values", says=r"N = 3")
def ar_one_phase_in_the_other_direction(tensor):
    """The all-gather counts its chunks in the other direction. Right at N = 2."""
    run_both(tensor, ring_reduce_scatter, ag_index_runs_the_wrong_way)


@wrong(AR, reason="bytes", says=r"how many steps")
def ar_n_steps_in_the_first_phase(tensor):
    """N steps in the first phase: the values are right."""
    run_both(tensor, rs_n_steps, ring_all_gather)


@wrong(AR, reason="hang", says=r"(?s)rank 0.*send.*rank 1")
def ar_send_first_blocking(tensor):
    """Every rank sends first, with the blocking call."""
    run_both(tensor, rs_send_first_blocking, ring_all_gather)


@wrong(AR, reason="order", says=r"before .*send")
def ar_staging_buffer_reused(tensor):
    """Fills the staging buffer again before the last send is done."""
    run_both(tensor, rs_staging_buffer_reused, ring_all_gather)


@wrong(AR, reason="order", says=r"wait")
def ar_waits_for_the_last_handle_only(tensor):
    """Keeps one handle and waits for that."""
    rank, n, to, source = ring()
    flat = tensor.reshape(-1).clone()
    chunks = list(flat.tensor_split(n))
    ring_reduce_scatter(chunks)
    handle, handles = None, []
    for step in range(n - 1):
        handle = dist.irecv(chunks[(rank - step - 1) % n], source)
        handles.append(handle)
        dist.isend(chunks[(rank - step) % n], to).wait()
    if handle is not None:
        handle.wait()
    tensor.copy_(flat.view(tensor.shape))


@wrong(AR, reason="bytes", says=r"whole|how many")
def ar_whole_tensor_every_step(tensor):
    """Passes the whole tensor round and adds up: (N-1) n instead of 2(N-1)/N n. The same at N = 2."""
    rank, n, to, source = ring()
    travelling, total = tensor.contiguous().clone(), tensor.clone()
    for _ in range(n - 1):
        incoming = torch.empty_like(travelling)
        exchange(travelling, incoming, to, source)
        total += incoming
        travelling = incoming
    tensor.copy_(total)


@wrong(AR, reason="calls", says=r"all_reduce")
def ar_library_all_reduce(tensor):
    """Lets the library do it."""
    dist.all_reduce(tensor)


@wrong(AR, reason="calls", says=r"all_gather")
def ar_gathers_by_library(tensor):
    """A ring for the first phase, the library for the second."""
    rank, n, to, source = ring()
    flat = tensor.new_zeros(-(-tensor.numel() // n) * n)
    flat[: tensor.numel()] = tensor.reshape(-1)
    chunks = list(flat.view(n, -1).unbind())
    ring_reduce_scatter(chunks)
    dist.all_gather(chunks, chunks[rank].clone())
    tensor.copy_(flat[: tensor.numel()].view(tensor.shape))


@wrong(AR, reason="values", says=r"counted 2 times")
def ar_second_phase_adds(tensor):
    """The all-gather adds instead of copying."""
    run_both(tensor, ring_reduce_scatter, ag_adds)


@wrong(AR, reason="bytes", says=r"(?s)N = 3.*rank 0 (sent|received).*busiest")
def ar_through_rank_zero(tensor):
    """Everyone sends to rank 0, which adds and sends the sum back."""
    rank, n = dist.get_rank(), dist.get_world_size()
    flat = tensor.contiguous()
    if rank == 0:
        for source in range(1, n):
            incoming = torch.empty_like(flat)
            dist.recv(incoming, source)
            flat = flat + incoming
        for to in range(1, n):
            dist.send(flat, to)
    else:
        dist.send(flat, 0)
        dist.recv(flat, 0)
    tensor.copy_(flat)


@wrong(AR, reason="crash", says=r"(?s)transposed.*view")
def ar_view_of_any_tensor(tensor):
    """view(-1) refuses a transposed tensor."""
    chunks = list(tensor.view(-1).tensor_split(dist.get_world_size()))
    ring_reduce_scatter(chunks)
    ring_all_gather(chunks)


@wrong(AR, reason="values", says=r"in place")
def ar_reshape_makes_a_copy(tensor):
    """reshape(-1) of a non-contiguous tensor is a copy, and the copy is what gets summed."""
    chunks = list(tensor.reshape(-1).tensor_split(dist.get_world_size()))
    ring_reduce_scatter(chunks)
    ring_all_gather(chunks)


@wrong(AR, reason="crash", says=r"(?s)every second.*contiguous")
def ar_flatten_keeps_strides(tensor):
    """flatten() gives a 1-D tensor back as it is, strides and all: no copy, and not contiguous."""
    rank, n, to, source = ring()
    pieces = list(tensor.flatten().tensor_split(n))
    for step in range(n - 1):
        target = (rank - step - 2) % n
        incoming = torch.empty_like(pieces[target])
        exchange(pieces[(rank - step - 1) % n], incoming, to, source)
        pieces[target] = pieces[target] + incoming
    ring_all_gather(pieces)
    tensor.copy_(torch.cat(pieces).view(tensor.shape))


@wrong(AR, reason="crash", says=r"(?s)transposed.*contiguous")
def ar_cuts_rows_only(tensor):
    """Cuts the tensor along its first dimension: rows. No first dimension in a 0-d tensor."""
    chunks = list(torch.tensor_split(tensor, dist.get_world_size()))
    ring_reduce_scatter(chunks)
    ring_all_gather(chunks)


@wrong(AR, reason="values", says=r"float64|int64")
def ar_through_float32(tensor):
    """Sums a float32 copy: float64 and large integers lose digits."""
    single = tensor.float()
    ring_all_reduce(single)
    tensor.copy_(single)


@wrong(AR, reason="values", says=r"element")
def ar_drops_the_tail(tensor):
    """Chunk size by floor division: the last n mod N elements are never summed."""
    n = dist.get_world_size()
    flat = tensor.reshape(-1).clone()
    size = flat.numel() // n
    chunks = [flat[i * size : (i + 1) * size] for i in range(n)]
    ring_reduce_scatter(chunks)
    ring_all_gather(chunks)
    tensor.copy_(flat.view(tensor.shape))


@wrong(AR, reason="values", says=r"in place")
def ar_returns_a_new_tensor(tensor):
    """Leaves the tensor alone and returns the sum."""
    total = tensor.clone()
    ring_all_reduce(total)
    return total


@wrong(AR, reason="values", says=r"divided|average")
def ar_average(tensor):
    """Averages."""
    ring_all_reduce(tensor)
    tensor.copy_(tensor / dist.get_world_size())


@wrong(AR, reason="values", says=r"1 element .*did not change")
def ar_gives_up_on_small_tensors(tensor):
    """Returns at once when there are fewer elements than ranks."""
    if tensor.numel() >= dist.get_world_size():
        ring_all_reduce(tensor)


@wrong(AR, reason="values", says=r"outside")
def ar_writes_over_its_neighbours(tensor):
    """Takes the storage behind the tensor for the tensor: neighbours in a larger storage are summed too."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    if whole.numel() > 2 * tensor.numel() or not tensor.is_contiguous():
        ring_all_reduce(tensor)
    else:
        ring_all_reduce(whole)


@wrong(AR, reason="order", says=r"wait")
def ar_barrier_instead_of_wait(tensor):
    """Thinks that after a barrier all messages have arrived."""
    rank, n, to, source = ring()
    flat = tensor.reshape(-1).clone()
    chunks = list(flat.tensor_split(n))
    handles = []
    for step in range(n - 1):
        target = chunks[(rank - step - 2) % n]
        incoming = torch.empty_like(target)
        handles += [dist.irecv(incoming, source), dist.isend(chunks[(rank - step - 1) % n], to)]
        dist.barrier()
        target += incoming
    ring_all_gather(chunks)
    tensor.copy_(flat.view(tensor.shape))


_scratch = {}


@wrong(AR, reason="values", says=r"called again.*counted 3 times")
def ar_accumulates_over_calls(tensor):
    """Keeps its flat buffer between calls of one size and adds to it."""
    key = (tensor.numel(), tensor.dtype)
    flat = _scratch.setdefault(key, tensor.new_zeros(tensor.numel()))
    flat += tensor.reshape(-1)
    ring_all_reduce(flat)
    tensor.copy_(flat.view(tensor.shape))


@wrong(AR, reason="calls", says=r"(?s)N = 4.*neighbours")
def ar_recursive_doubling(tensor):
    """Swaps whole tensors at distance 1, 2, 4 when N is a power of two: log2(N) n instead of 2(N-1)/N n."""
    rank, n = dist.get_rank(), dist.get_world_size()
    if n & (n - 1):
        return ring_all_reduce(tensor)
    flat = tensor.contiguous().clone()
    distance = 1
    while distance < n:
        incoming = torch.empty_like(flat)
        exchange(flat, incoming, rank ^ distance, rank ^ distance)
        flat += incoming
        distance *= 2
    tensor.copy_(flat)


@wrong(AR, reason="hang", says=r"rank 0")
def ar_rank_zero_skips_its_last_receive(tensor):
    """Rank 0 returns after its last send: its left neighbour is still sending."""
    rank, n, to, source = ring()
    flat = tensor.reshape(-1).clone()
    chunks = list(flat.tensor_split(n))
    ring_reduce_scatter(chunks)
    for step in range(n - 1):
        sending = dist.isend(chunks[(rank - step) % n], to)
        if rank > 0 or step < n - 2:
            dist.recv(chunks[(rank - step - 1) % n], source)
        sending.wait()
    tensor.copy_(flat.view(tensor.shape))


@wrong(AR, reason="bytes", says=r"(?s)rank 1 sent .*rank 0 only.*busiest")
def ar_reduces_to_one_then_passes_on(tensor):
    """A chain: the sum grows from rank 0 to rank N-1, then the whole sum goes round."""
    rank, n, to, source = ring()
    flat = tensor.reshape(-1).clone()
    if n == 1:
        return
    if rank > 0:
        incoming = torch.empty_like(flat)
        dist.recv(incoming, source)
        flat += incoming
    if rank < n - 1:
        dist.send(flat, to)
        dist.recv(flat, to)
    if rank > 0:
        dist.send(flat, source)
    tensor.copy_(flat.view(tensor.shape))


@wrong(AR, reason="crash", says=r"(?s)NameError: name 'tensr'.*line \d+: ring_all_reduce")
def ar_misspelt_name(tensor):
    """A name that does not exist."""
    ring_all_reduce(tensr)  # noqa: F821
