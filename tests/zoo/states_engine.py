"""The plain engine of lab 01, in small methods, so that a specimen can do one of them in its own way."""

from __future__ import annotations

import torch
import torch.distributed as dist

ENGINE = "01.MixedPrecisionAdam"


class Engine:
    """The plain solution: fp32 masters and moments per parameter, the flag by MAX."""

    def __init__(
        self,
        parameters,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        scale=2.0**16,
        growth_interval=2000,
    ):
        self.parameters = list(parameters)
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.scale, self.growth_interval, self.good = float(scale), growth_interval, 0
        self.state = {p: self.new_state(p) for p in self.parameters}

    def new_state(self, p):
        master = p.detach().to(torch.float32, copy=True)
        return {
            "master": master,
            "first_moment": torch.zeros_like(master),
            "second_moment": torch.zeros_like(master),
            "step": 0,
        }

    def backward(self, loss):
        (loss * self.scale).backward()

    @torch.no_grad()
    def step(self):
        with_gradient = [p for p in self.parameters if p.grad is not None]
        if self.agreed(self.overflow(with_gradient)):
            self.shrink()
            return False
        self.update_all(with_gradient)
        self.grow()
        return True

    def overflow(self, parameters):
        return any(not p.grad.isfinite().all() for p in parameters)

    def agreed(self, bad):
        if dist.is_initialized() and dist.get_world_size() > 1:
            flag = torch.tensor(float(bad))
            dist.all_reduce(flag, dist.ReduceOp.MAX)
            return flag.item() > 0
        return bad

    def shrink(self):
        self.scale, self.good = max(self.scale / 2, 1.0), 0

    def grow(self):
        self.good += 1
        if self.good == self.growth_interval:
            self.scale, self.good = self.scale * 2, 0

    def update_all(self, with_gradient):
        for p in with_gradient:
            self.update(p)

    def update(self, p):
        s, (b1, b2) = self.state[p], self.betas
        s["step"] += 1
        g = self.gradient(p)
        s["first_moment"].mul_(b1).add_(g, alpha=1 - b1)
        s["second_moment"].mul_(b2).addcmul_(g, g, value=1 - b2)
        self.descend(p, s)

    def gradient(self, p):
        return p.grad.float() / self.scale

    def descend(self, p, s):
        w = s["master"]
        mean, square = self.corrected(s)
        w.mul_(1 - self.lr * self.weight_decay)
        w.sub_(self.lr * mean / (square.sqrt() + self.eps))
        self.write(p, w)

    def corrected(self, s):
        (b1, b2), t = self.betas, s["step"]
        return s["first_moment"] / (1 - b1**t), s["second_moment"] / (1 - b2**t)

    def write(self, p, master):
        p.copy_(master)

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None
