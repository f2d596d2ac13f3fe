"""Are the replicas of a model equal? One number that all ranks can compare, and how far apart they are if not."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn


def fingerprint(module: nn.Module) -> str:
    """Eight hexadecimal digits of a hash over every bit of all parameters and buffers, in the order of their names.

    Equal states give equal fingerprints, on any device. Different ones differ, but for a chance of one in 2**32.
    Nothing is sent and no random number is drawn.
    """
    digest = hashlib.blake2b(digest_size=4)
    for _, tensor in _states(module):
        digest.update(tensor.cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def largest_difference(module: nn.Module) -> float:
    """The largest difference between any two ranks in any element of the parameters and floating-point buffers.

    0.0 means that all replicas are equal. Every rank must call it; all get the same answer. It costs two all-reduces as
    large as the model, so it is an instrument and not part of training.
    """
    flat = torch.cat([tensor.reshape(-1).double() for _, tensor in _states(module) if tensor.is_floating_point()])
    highest, lowest = flat, flat.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    return (highest - lowest).max().item()


def _states(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return ((name, tensor.detach()) for name, tensor in sorted(named.items()))
