"""Lab 01: right engines, written in their own ways."""

from __future__ import annotations

import torch
import torch.distributed as dist

from . import right
from .states_engine import ENGINE, Engine

right(ENGINE)(Engine)


@right(ENGINE)
class SumsTheFlags(Engine):
    """All-reduce with SUM: an overflow on any rank makes the sum positive."""

    def agreed(self, bad):
        if dist.is_initialized():
            flag = torch.tensor(int(bad))
            dist.all_reduce(flag)
            return flag.item() != 0
        return bad


@right(ENGINE)
class GathersTheFlags(Engine):
    """All ranks' flags by all-gather, and a barrier that nobody needs."""

    def agreed(self, bad):
        if not dist.is_initialized():
            return bad
        flags = [torch.zeros(1) for _ in range(dist.get_world_size())]
        dist.all_gather(flags, torch.tensor([float(bad)]))
        dist.barrier()
        return any(flag.item() for flag in flags)


@right(ENGINE)
class GathersObjects(Engine):
    """all_gather_object of a bool: two small collectives."""

    def agreed(self, bad):
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return bad
        answers = [None] * dist.get_world_size()
        dist.all_gather_object(answers, bool(bad))
        return any(answers)


@right(ENGINE)
class ChecksAfterTheReduction(Engine):
    """A sum over all gradients, in fp32, is reduced; then everybody looks whether it is finite."""

    def overflow(self, parameters):
        total = torch.zeros(())
        for parameter in parameters:
            total += parameter.grad.float().abs().sum()
        if dist.is_initialized():
            dist.all_reduce(total)
        return not torch.isfinite(total)

    def agreed(self, bad):
        return bad


@right(ENGINE)
class WaitsForAnAsynchronousFlag(Engine):
    """Starts the all-reduce with async_op and waits for it."""

    def agreed(self, bad):
        if not dist.is_initialized():
            return bad
        flag = torch.tensor([float(bad)])
        work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, async_op=True)
        work.wait()
        return bool(flag)


@right(ENGINE)
class FoldsTheScaleIntoTheUpdate(Engine):
    """Never makes an unscaled gradient: the inverse scale goes into the moments' weights; .grad stays scaled."""

    def update(self, p):
        s, (b1, b2) = self.state[p], self.betas
        s["step"] += 1
        inverse = 1.0 / self.scale
        g = p.grad.float()
        s["first_moment"].mul_(b1).add_(g, alpha=(1 - b1) * inverse)
        s["second_moment"].mul_(b2).addcmul_(g, g, value=(1 - b2) * inverse**2)
        self.descend(p, s)


@right(ENGINE)
class UsesTorchsAdamW(Engine):
    """fp32 master weights as parameters of torch.optim.AdamW, which does the update."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, **scaling):
        super().__init__(parameters, lr, betas, eps, weight_decay, **scaling)
        self.state = {}
        self.masters = [torch.nn.Parameter(p.detach().float().clone()) for p in self.parameters]
        self.inner = torch.optim.AdamW(self.masters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def new_state(self, p):
        return {}

    def update_all(self, with_gradient):
        for p, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None if p.grad is None else p.grad.float() / self.scale
        self.inner.step()
        self.inner.zero_grad()
        for p, master in zip(self.parameters, self.masters, strict=True):
            p.copy_(master)
            if kept := self.inner.state.get(master):
                moments = {"first_moment": kept["exp_avg"], "second_moment": kept["exp_avg_sq"]}
                self.state[p] = {"master": master, **moments}


@right(ENGINE)
class OneFlatBuffer(Engine):
    """Masters and moments are slices of three long buffers; one step count for all parameters."""

    def __init__(self, parameters, *args, **kwargs):
        super().__init__(parameters, *args, **kwargs)
        self.steps, at = 0, 0
        self.flat = torch.cat([p.detach().float().reshape(-1) for p in self.parameters])
        self.first, self.second = torch.zeros_like(self.flat), torch.zeros_like(self.flat)
        self.slices = {}
        for p in self.parameters:
            self.slices[p] = here = slice(at, at + p.numel())
            self.state[p] = {
                "master": self.flat[here],
                "first_moment": self.first[here],
                "second_moment": self.second[here],
            }
            at += p.numel()

    def new_state(self, p):
        return {}

    def update_all(self, with_gradient):
        self.steps += 1
        b1, b2 = self.betas
        for p in with_gradient:
            here = self.slices[p]
            w, m, v = self.flat[here], self.first[here], self.second[here]
            g = p.grad.float().reshape(-1) / self.scale
            m.mul_(b1).add_((1 - b1) * g)
            v.mul_(b2).add_((1 - b2) * g * g)
            w.mul_(1 - self.lr * self.weight_decay)
            denominator = (v / (1 - b2**self.steps)).sqrt() + self.eps
            w.addcdiv_(m, denominator, value=-self.lr / (1 - b1**self.steps))
            p.copy_(w.view_as(p))


@right(ENGINE)
class MakesStateWhenNeeded(Engine):
    """Masters and moments are made in a parameter's first step, as torch's optimizers do."""

    def new_state(self, p):
        return {}

    def update(self, p):
        if not self.state[p]:
            self.state[p].update(super().new_state(p))
        super().update(p)


@right(ENGINE)
class UnscalesAllFirst(Engine):
    """fp32 copies of all gradients are made, looked at, and used; they are gone after the step."""

    def step(self):
        with torch.no_grad():
            self.true = {p: p.grad.float().div_(self.scale) for p in self.parameters if p.grad is not None}
            bad = self.agreed(not all(torch.isfinite(g).all() for g in self.true.values()))
            if bad:
                self.shrink()
            else:
                self.update_all(list(self.true))
                self.grow()
            del self.true
            return not bad

    def gradient(self, p):
        return self.true[p]


@right(ENGINE)
class RestoresFromACopy(Engine):
    """Steps first, into copies, and takes them over only when all is well."""

    def step(self):
        with torch.no_grad():
            bad = self.agreed(self.overflow([p for p in self.parameters if p.grad is not None]))
            kept = {p: {k: v.clone() if torch.is_tensor(v) else v for k, v in s.items()} for p, s in self.state.items()}
            weights = [p.detach().clone() for p in self.parameters]
            self.update_all([p for p in self.parameters if p.grad is not None])
            if bad:
                for p, weight in zip(self.parameters, weights, strict=True):
                    p.copy_(weight)
                    self.state[p] = kept[p]
                self.shrink()
                return False
            self.grow()
            return True


@right(ENGINE)
class ScaleIsAProperty(Engine):
    """The scale is a tensor behind a property; zero_grad leaves zeros."""

    @property
    def scale(self):
        return self._scale.item()

    @scale.setter
    def scale(self, value):
        self._scale = torch.tensor(float(value))

    def zero_grad(self):
        for p in self.parameters:
            if p.grad is not None:
                p.grad.zero_()


@right(ENGINE)
class FindsOverflowByMultiplyingWithZero(Engine):
    """0 times inf or NaN is NaN; new storage for the parameters each step."""

    def overflow(self, parameters):
        return any(((p.grad.double() * 0).sum() != 0).item() for p in parameters)

    def write(self, p, master):
        p.data = master.to(p.dtype, copy=True)


@right(ENGINE)
class ForEach(Engine):
    """torch._foreach operations on lists of all parameters; one count for all."""

    def update_all(self, with_gradient):
        if not with_gradient:
            return
        b1, b2 = self.betas
        states = [self.state[p] for p in with_gradient]
        self.count = getattr(self, "count", 0) + 1
        g = torch._foreach_div([p.grad.float() for p in with_gradient], self.scale)
        m, v, w = ([s[name] for s in states] for name in ("first_moment", "second_moment", "master"))
        torch._foreach_lerp_(m, g, 1 - b1)
        torch._foreach_mul_(v, b2)
        torch._foreach_addcmul_(v, g, g, 1 - b2)
        torch._foreach_mul_(w, 1 - self.lr * self.weight_decay)
        root = torch._foreach_sqrt(torch._foreach_div(v, 1 - b2**self.count))
        torch._foreach_add_(root, self.eps)
        torch._foreach_addcdiv_(w, m, root, -self.lr / (1 - b1**self.count))
        for p, master in zip(with_gradient, w, strict=True):
            p.data.copy_(master)


@right(ENGINE)
class GrowsByAModulo(Engine):
    """Counts the good steps in a row without end and doubles at each multiple of the interval; powers of two."""

    def grow(self):
        self.good += 1
        if self.good % self.growth_interval == 0:
            self.scale = self.scale * 2.0

    def shrink(self):
        self.good = 0
        self.scale = max(1.0, 0.5 * self.scale)
