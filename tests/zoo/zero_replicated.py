"""What poses as a ZeRO engine: torch's AdamW on every rank, with and without a sum of the gradients."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import nn


class Replicated(nn.Module):
    """DDP and AdamW behind the engine's methods: every rank holds everything."""

    def __init__(
        self, model, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, groups=None, scale=2.0**16, **others
    ):
        super().__init__()
        self.module = model
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.data, src=0)
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.optimizer = torch.optim.AdamW(groups or model.parameters(), **options)
        self.scale, self.param_groups = scale, self.optimizer.param_groups

    def forward(self, *inputs):
        return self.module(*inputs)

    @contextlib.contextmanager
    def gathered(self):
        yield

    def backward(self, loss):
        loss.backward()
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad /= dist.get_world_size()
                dist.all_reduce(parameter.grad)

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        self.optimizer.step()
        return True


class Alone(Replicated):
    """Sends nothing after the start: each rank trains a model of its own."""

    def backward(self, loss):
        loss.backward()
