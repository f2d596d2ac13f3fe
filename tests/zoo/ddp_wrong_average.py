"""Lab 03, averaging per parameter: plausible mistakes, and what the check must say of each."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from . import wrong
from .ddp_right import AG, trained
from .ddp_right_more import average_gradients_flat


@wrong(AG, reason="not written", says="not written yet")
def ag_stub(module):
    """The cell as the learner finds it."""
    raise NotImplementedError("not written yet")


@wrong(AG, reason="values", says=r"(?s)N = 2.*'weight'.grad is this rank's own gradient.*no rank sent anything")
def ag_does_nothing(module):
    """No averaging."""


@wrong(AG, reason="values", says=r"is the sum over the ranks, not divided by N")
def ag_never_divides(module):
    """The sum. AdamW would hide it."""
    for p in trained(module):
        dist.all_reduce(p.grad)


@wrong(AG, reason="values", says=r"N = 3.*the sum divided by 2; there are 3 ranks")
def ag_divides_by_two(module):
    """A literal 2 where the world size belongs."""
    for p in trained(module):
        p.grad /= 2
        dist.all_reduce(p.grad)


@wrong(AG, reason="values", says=r"the mean divided by N once more")
def ag_divides_twice(module):
    """Before and after."""
    n = dist.get_world_size()
    for p in trained(module):
        p.grad /= n
        dist.all_reduce(p.grad)
        p.grad /= n


@wrong(AG, reason="values", says=r"(?s)parameter 'weight' itself has changed: it is the mean of the ranks' parameters")
def ag_averages_parameters(module):
    """Averages the weights instead of the gradients."""
    for p in trained(module):
        p.data /= dist.get_world_size()
        dist.all_reduce(p.data)


@wrong(AG, reason="values", says=r"'weight'.grad is this rank's own gradient: it has not been averaged")
def ag_returns_the_result(module):
    """Averages copies and returns them."""
    means = []
    for p in trained(module):
        mean = p.grad / dist.get_world_size()
        dist.all_reduce(mean)
        means.append(mean)
    return means


@wrong(
    AG, reason="calls|hang", says=r"(?s)rank 1 has no gradient of 'second'.*call 2 is all_reduce of 7 float32 on rank 0"
)
def ag_skips_missing_gradients(module):
    """A rank without a gradient skips the call: the others meet the wrong one, or wait for ever."""
    for p in module.parameters():
        if p.grad is not None:
            p.grad /= dist.get_world_size()
            dist.all_reduce(p.grad)


@wrong(AG, reason="values", says=r"(?s)rank 1, N = 2, rank 1 has no gradient of 'second': 'second'.grad is None")
def ag_zeros_are_thrown_away(module):
    """Takes part with zeros, but does not keep the result."""
    for p in module.parameters():
        if p.requires_grad:
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            grad /= dist.get_world_size()
            dist.all_reduce(grad)


@wrong(AG, reason="values", says=r"the sum divided by the number of ranks that have a gradient")
def ag_divides_by_those_that_have_one(module):
    """Divides by the number of ranks that have a gradient."""
    for p in module.parameters():
        if p.requires_grad:
            has = torch.tensor(float(p.grad is not None))
            dist.all_reduce(has)
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            grad = grad / has.clamp(min=1)
            dist.all_reduce(grad)
            p.grad = grad


@wrong(AG, reason="values", says=r"(?s)frozen parameter 'frozen'.*has a gradient now")
def ag_frozen_get_zeros(module):
    """Frozen parameters get a gradient of zeros: weight decay then moves them."""
    for p in module.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        p.grad /= dist.get_world_size()
        dist.all_reduce(p.grad)


@wrong(AG, reason="values", says=r"(?s)40,000.*inf.*65,504")
def ag_sums_halves_first(module):
    """Sums float16 before dividing: 40,000 + 40,000 is inf."""
    for p in trained(module):
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


@wrong(AG, reason="bytes", says=r"(?s)N = 3.*gather and broadcast.*2.00 n")
def ag_through_rank_0(module):
    """Rank 0 gathers all gradients, averages, and broadcasts: its link carries everything."""
    n = dist.get_world_size()
    for p in trained(module):
        parts = [torch.empty_like(p) for _ in range(n)] if dist.get_rank() == 0 else None
        dist.gather(p.grad, parts, dst=0)
        if parts:
            p.grad.copy_(sum(part / n for part in parts))
        dist.broadcast(p.grad, src=0)


@wrong(AG, reason="bytes", says=r"(?s)N = 3.*all_gather.*2.00 n")
def ag_gathers_everything(module):
    """Every rank collects all gradients and takes the mean: N/2 times the bytes."""
    n = dist.get_world_size()
    for p in trained(module):
        parts = [torch.empty_like(p.grad) for _ in range(n)]
        dist.all_gather(parts, p.grad)
        p.grad.copy_(torch.stack([part / n for part in parts]).sum(0))


@wrong(AG, reason="bytes", says=r"(?s)N = 3.*reduce and broadcast.*2.00 n")
def ag_reduces_then_broadcasts(module):
    """A reduce to rank 0, then a broadcast: two whole passes."""
    for p in trained(module):
        p.grad /= dist.get_world_size()
        dist.reduce(p.grad, dst=0)
        dist.broadcast(p.grad, src=0)


@wrong(AG, reason="values", says=r"do not end with the same bits")
def ag_own_part_first(module):
    """Each rank adds what the others have to its own part: the same mean, but for the last bit."""
    n = dist.get_world_size()
    for p in trained(module):
        mine = p.grad / n
        total = mine.clone()
        dist.all_reduce(total)
        others = total - mine
        p.grad = mine + others


@wrong(AG, reason="order", says=r"(?s)nobody waits for an asynchronous all_reduce.*async_op=True")
def ag_never_waits(module):
    """Starts all, waits for none."""
    for p in trained(module):
        p.grad /= dist.get_world_size()
        dist.all_reduce(p.grad, async_op=True)


@wrong(AG, reason="order", says=r"nobody waits for an asynchronous all_reduce")
def ag_waits_for_the_last(module):
    """Waits for the last handle only."""
    work = None
    for p in trained(module):
        p.grad /= dist.get_world_size()
        work = dist.all_reduce(p.grad, async_op=True)
    if work is not None:
        work.wait()


@wrong(AG, reason="order", says=r"(?s)used before wait\(\).*async_op=True.*; used in .*/= n")
def ag_divides_before_the_wait(module):
    """Divides while the sum is still on its way."""
    n = dist.get_world_size()
    works = []
    for p in trained(module):
        works.append(dist.all_reduce(p.grad, async_op=True))
        p.grad /= n
    for work in works:
        work.wait()


@wrong(AG, reason="calls", says=r"(?s)10 all_reduce calls with gradients.*9 parameters.*tied")
def ag_tied_twice(module):
    """Walks over the modules: a tied weight comes twice. Its value is right, since a mean of means is the mean."""
    n = dist.get_world_size()
    seen_frozen = [p for p in trained(module) if not p.requires_grad]
    for owner in module.modules():
        for p in owner.parameters(recurse=False):
            if p.requires_grad and p not in seen_frozen:
                p.grad /= n
                dist.all_reduce(p.grad)


@wrong(AG, reason="calls", says=r"(?s)1 all_reduce call with.*flat way is the next")
def ag_flat_already(module):
    """The next exercise's solution."""
    average_gradients_flat(module)


@wrong(AG, reason="calls|hang", says=r"call \d is all_reduce of [\d,]+ float32 on rank 0, and all_reduce of [\d,]+")
def ag_in_the_order_of_a_set(module):
    """A set has an order of its own in every process."""
    n = dist.get_world_size()
    for p in set(trained(module)):
        p.grad /= n
        dist.all_reduce(p.grad)


@wrong(AG, reason="calls", says=r"(?s)\d+ all_reduce calls with gradients.*one all_reduce for each")
def ag_row_by_row(module):
    """One call for each row."""
    for p in trained(module):
        p.grad /= dist.get_world_size()
        for row in p.grad if p.dim() else [p.grad]:
            dist.all_reduce(row)


@wrong(AG, reason="crash", says=r"exit code 3")
def ag_a_rank_dies(module):
    """Rank 1 is gone."""
    if dist.get_rank() == 1:
        os._exit(3)
    for p in trained(module):
        dist.all_reduce(p.grad)


@wrong(AG, reason="values", says=r"is rank 0's gradient")
def ag_broadcasts_gradients(module):
    """Rank 0's gradient for all."""
    for p in trained(module):
        dist.broadcast(p.grad, src=0)


@wrong(AG, reason="values", says=r"'weight'.grad is this rank's own gradient divided by N|own gradient: it has not")
def ag_reduces_a_flattened_copy(module):
    """reshape of a copy: the sum never comes back."""
    for p in trained(module):
        p.grad /= dist.get_world_size()
        dist.all_reduce(p.grad.clone().reshape(-1))


@wrong(AG, reason="hang", says=r"(?s)call 1 is all_reduce .*on rank 0, and none: it has returned on rank 1")
def ag_only_rank_0(module):
    """Only rank 0 averages."""
    if dist.get_rank() == 0:
        for p in trained(module):
            dist.all_reduce(p.grad)


@wrong(AG, reason="values", says=r"(?s)the same model with new gradients")
def ag_only_once(module):
    """Remembers that it has averaged this model already."""
    if getattr(module, "averaged", False):
        return
    for p in trained(module):
        p.grad /= dist.get_world_size()
        dist.all_reduce(p.grad)
    module.averaged = True


@wrong(AG, reason="crash", says=r"(?s)TypeError.*NoneType.*takes part with zeros")
def ag_missing_gradient_crashes(module):
    """No thought of a gradient that is None."""
    for p in module.parameters():
        if p.requires_grad:
            p.grad /= dist.get_world_size()
            dist.all_reduce(p.grad)
