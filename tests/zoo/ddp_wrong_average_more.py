"""Lab 03, averaging per parameter: more mistakes, with words for what was called or how it was divided."""

from __future__ import annotations

import torch
import torch.distributed as dist

from . import wrong
from .ddp_right import AG, trained


@wrong(AG, reason="values", says=r"(?s)reduce leaves the sum on one rank alone, all_reduce on every rank")
def ag_reduces_to_rank_0(module):
    """reduce instead of all_reduce."""
    for p in trained(module):
        p.grad /= dist.get_world_size()
        dist.reduce(p.grad, dst=0)


@wrong(AG, reason="values", says=r"(?s)rounded down to whole numbers.*// rounds down")
def ag_floor_division(module):
    """//= instead of /=, before the sum."""
    for p in trained(module):
        p.grad //= dist.get_world_size()
        dist.all_reduce(p.grad)


@wrong(AG, reason="values", says=r"(?s)rounded down to whole numbers.*// rounds down")
def ag_floor_division_of_the_sum(module):
    """//= instead of /=, after the sum."""
    for p in trained(module):
        dist.all_reduce(p.grad)
        p.grad //= dist.get_world_size()


@wrong(AG, reason="crash", says=r"(?s)rank 1 has no gradient of 'of_double'.*zeros_like")
def ag_zeros_of_float32(module):
    """torch.zeros(p.shape) is float32, whatever the parameter is."""
    for p in module.parameters():
        if p.requires_grad:
            if p.grad is None:
                p.grad = torch.zeros(p.shape)
            p.grad /= dist.get_world_size()
            dist.all_reduce(p.grad)
