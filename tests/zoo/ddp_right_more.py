"""Lab 03, averaging in one flat buffer and sampling: the plain solutions, and right ones written in other ways."""

from __future__ import annotations

import random

import numpy
import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from . import right
from .ddp_right import trained

FLAT, SI = "03.average_gradients_flat", "03.shard_indices"


def by_dtype(parameters):
    groups: dict = {}
    for p in parameters:
        groups.setdefault(p.dtype, []).append(p)
    return groups.values()


@right(FLAT)
def average_gradients_flat(module):
    """The plain solution."""
    for group in by_dtype(trained(module)):
        flat = torch.cat([p.grad.reshape(-1) for p in group])
        flat /= dist.get_world_size()
        dist.all_reduce(flat)
        for p, piece in zip(group, flat.split([p.numel() for p in group]), strict=True):
            p.grad.copy_(piece.view(p.shape))


@right(FLAT)
def fl_torchs_own_helpers(module):
    """torch._utils' flatten and unflatten, on parameters sorted by dtype."""
    parameters = sorted(trained(module), key=lambda p: str(p.dtype))
    for group in by_dtype(parameters):
        grads = [p.grad for p in group]
        flat = _flatten_dense_tensors(grads).div_(dist.get_world_size())
        dist.all_reduce(flat)
        for grad, mean in zip(grads, _unflatten_dense_tensors(flat, grads), strict=True):
            grad.copy_(mean)


@right(FLAT)
def fl_gradients_become_views(module):
    """Copies into a buffer; afterwards every p.grad is a view of it."""
    for group in by_dtype(trained(module)):
        buffer = torch.empty(sum(p.numel() for p in group), dtype=group[0].dtype)
        start, views = 0, []
        for p in group:
            views.append(buffer[start : start + p.numel()].view(p.shape))
            views[-1].copy_(p.grad / dist.get_world_size())
            start += p.numel()
        dist.all_reduce(buffer)
        for p, view in zip(group, views, strict=True):
            p.grad = view


@right(FLAT)
def fl_everything_in_the_widest_type(module):
    """Halves travel as float32, float64 by themselves: never more calls than dtypes."""
    parameters = trained(module)
    for group in ([p for p in parameters if p.itemsize <= 4], [p for p in parameters if p.itemsize > 4]):
        if not group:
            continue
        flat = torch.cat([p.grad.flatten() if p.itemsize > 4 else p.grad.flatten().float() for p in group])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for p, piece in zip(group, flat.split([p.numel() for p in group]), strict=True):
            p.grad = piece.reshape(p.shape).to(p.dtype)


@right(FLAT)
def fl_coalesced(module):
    """The library packs the tensors of a dtype itself."""
    n = dist.get_world_size()
    for group in by_dtype(trained(module)):
        with dist._coalescing_manager():
            for p in group:
                p.grad.div_(n)
                dist.all_reduce(p.grad)


@right(FLAT)
def fl_flags_for_missing_gradients(module):
    """One tiny all-reduce says who has gradients; where nobody has one, it stays None."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
    dist.all_reduce(has)
    used = [p for p, count in zip(parameters, has.tolist(), strict=True) if count]
    for group in by_dtype(used):
        pieces = [torch.zeros_like(p).view(-1) if p.grad is None else p.grad.reshape(-1) for p in group]
        flat = torch.cat(pieces) / dist.get_world_size()
        dist.all_reduce(flat)
        for p in group:
            p.grad, flat = flat[: p.numel()].view(p.shape).clone(), flat[p.numel() :]


@right(FLAT)
def fl_asynchronous_and_padded(module):
    """One asynchronous call per dtype, padded to a multiple of N; all waits at the end."""
    n, pending = dist.get_world_size(), []
    for group in by_dtype(trained(module)):
        count = sum(p.numel() for p in group)
        flat = torch.zeros(-(-count // n) * n, dtype=group[0].dtype)
        torch.cat([p.grad.reshape(-1) for p in group], out=flat[:count])
        pending.append((group, flat.div_(n), dist.all_reduce(flat, async_op=True)))
    for group, flat, work in pending:
        work.wait()
        for p in group:
            p.grad.copy_(flat[: p.numel()].reshape(p.shape))
            flat = flat[p.numel() :]


def order(length, epoch, seed):
    return torch.randperm(length, generator=torch.Generator().manual_seed(1_000_003 * seed + epoch))


@right(SI)
def shard_indices(length, rank, world_size, epoch, seed=0):
    """The plain solution: every N-th item of one shuffled order."""
    return order(length, epoch, seed)[rank::world_size].tolist()


@right(SI)
def si_slices(length, rank, world_size, epoch, seed=0):
    """Slices, the first ones longer by one; a tensor is returned."""
    return order(length, epoch, seed).tensor_split(world_size)[rank]


@right(SI)
def si_seed_plus_epoch(length, rank, world_size, epoch, seed=0):
    """Seeded by the sum, as torch's DistributedSampler is."""
    indices = list(range(length))
    random.Random(seed + epoch).shuffle(indices)
    return tuple(indices[rank::world_size])


@right(SI)
def si_numpy(length, rank, world_size, epoch, seed=0):
    """numpy's generator with a seed of two numbers; an array is returned."""
    return numpy.random.default_rng([seed, epoch]).permutation(length)[rank::world_size]


@right(SI)
def si_text_as_seed(length, rank, world_size, epoch, seed=0):
    """Python's generator seeded by a text: that does not depend on the process."""
    indices = list(range(length))
    random.Random(f"{seed}/{epoch}").shuffle(indices)
    return [indices[place] for place in range(rank, length, world_size)]


@right(SI)
def si_forked_generator(length, rank, world_size, epoch, seed=0):
    """Seeds the global generator, inside fork_rng, which puts it back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed * 100_000 + epoch)
        return torch.randperm(length)[rank::world_size].tolist()


@right(SI)
def si_sorted_by_keys(length, rank, world_size, epoch, seed=0):
    """Sorts by random keys; the last rank is the first to have one item less."""
    keys = torch.rand(length, generator=torch.Generator().manual_seed(seed * 7_777_777 + epoch))
    return keys.argsort()[world_size - 1 - rank :: world_size].tolist()
