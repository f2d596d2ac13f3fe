"""What the engines of labs 06 to 08 talk through: a few collectives on flat tensors, in place, not waited for.

A communicator is any object with these methods. Each starts an operation and returns a handle; `handle.wait()` returns
when it is done. Until then the tensor belongs to the operation. `flat` is 1-D and contiguous. Where chunks are spoken
of it holds N equal ones, and chunk r belongs to rank r.

    reduce_scatter(flat)      chunk r of rank r becomes the sum of all ranks' chunks r; the others are undefined after
    all_gather(flat)          chunk r of every rank becomes rank r's
    all_reduce(flat)          becomes the sum over all ranks, on every rank; any size
    reduce(flat, owner)       becomes the sum on rank `owner`; undefined on the others; any size
    broadcast(flat, owner)    becomes rank `owner`'s on every rank; any size

All ranks call them in the same order, with the same sizes. Bytes sent by a rank, of n bytes in all: reduce_scatter and
all_gather (N-1)/N n, all_reduce 2(N-1)/N n (`theory.collective_cost`).
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

# torch 2.13 gave these new names and warns of the old ones.
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Handle(Protocol):
    """An operation that has been started."""

    def wait(self) -> object: ...


class Communicator(Protocol):
    """The three that every engine of the course needs; see the module for all five."""

    def reduce_scatter(self, flat: torch.Tensor) -> Handle: ...

    def all_gather(self, flat: torch.Tensor) -> Handle: ...

    def all_reduce(self, flat: torch.Tensor) -> Handle: ...


class Library:
    """torch.distributed's own collectives. Holds nothing, copies nothing."""

    def reduce_scatter(self, flat: torch.Tensor) -> Handle:
        return _scatter(mine_of(flat), flat, async_op=True)

    def all_gather(self, flat: torch.Tensor) -> Handle:
        return _gather(flat, mine_of(flat), async_op=True)

    def all_reduce(self, flat: torch.Tensor) -> Handle:
        return dist.all_reduce(flat, async_op=True)

    def reduce(self, flat: torch.Tensor, owner: int) -> Handle:
        return dist.reduce(flat, owner, async_op=True)

    def broadcast(self, flat: torch.Tensor, owner: int) -> Handle:
        return dist.broadcast(flat, owner, async_op=True)


def mine_of(flat: torch.Tensor) -> torch.Tensor:
    """This rank's chunk of a flat tensor, a view. ValueError when N does not divide its size."""
    count = dist.get_world_size()
    if flat.dim() != 1 or flat.numel() % count:
        raise ValueError(f"expected a 1-D tensor of {count} equal chunks, got the shape {tuple(flat.shape)}")
    return flat.view(count, -1)[dist.get_rank()]
