"""Lab 03, averaging in one flat buffer: plausible mistakes, and what the check must say of each."""

from __future__ import annotations

import torch
import torch.distributed as dist

from . import wrong
from .ddp_right import average_gradients, trained
from .ddp_right_more import FLAT, by_dtype


def unflatten(parameters, flat):
    for p, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad.copy_(piece.view(p.shape))


def flatten(parameters):
    return torch.cat([p.grad.reshape(-1) for p in parameters])


@wrong(FLAT, reason="not written", says="not written yet")
def fl_stub(module):
    """The cell as the learner finds it."""
    raise NotImplementedError("not written yet")


@wrong(FLAT, reason="calls", says=r"(?s)9 all_reduce calls.*one all_reduce for each dtype, here 1")
def fl_per_parameter(module):
    """The exercise before."""
    average_gradients(module)


@wrong(FLAT, reason="values", says=r"sum over the ranks, not divided")
def fl_never_divides(module):
    """The sum."""
    for group in by_dtype(trained(module)):
        flat = flatten(group)
        dist.all_reduce(flat)
        unflatten(group, flat)


@wrong(FLAT, reason="values", says=r"N = 3.*sum divided by 2")
def fl_divides_by_two(module):
    """A literal 2."""
    for group in by_dtype(trained(module)):
        flat = flatten(group) / 2
        dist.all_reduce(flat)
        unflatten(group, flat)


@wrong(FLAT, reason="values", says=r"this rank's own gradient: it has not been averaged")
def fl_never_copied_back(module):
    """cat makes a copy; the result stays in it."""
    for group in by_dtype(trained(module)):
        flat = flatten(group) / dist.get_world_size()
        dist.all_reduce(flat)


@wrong(FLAT, reason="values", says=r"of_double.*(?s:.*)digits were lost")
def fl_one_float32_buffer(module):
    """All dtypes into one float32 buffer: float64 loses digits."""
    parameters = trained(module)
    if not parameters:
        return
    flat = torch.cat([p.grad.reshape(-1).float() for p in parameters]) / dist.get_world_size()
    dist.all_reduce(flat)
    unflatten(parameters, flat)


@wrong(FLAT, reason="bytes", says=r"(?s)four dtypes|float32, 16, 64.*own dtype")
def fl_cat_of_all_dtypes(module):
    """torch.cat turns everything into float64: twice the bytes for float32."""
    parameters = trained(module)
    if not parameters:
        return
    flat = flatten(parameters) / dist.get_world_size()
    dist.all_reduce(flat)
    unflatten(parameters, flat)


@wrong(FLAT, reason="values", says=r"(?s)'head.embedding'|'embedding'|'layers|'frozen'|'bias'")
def fl_slices_start_again(module):
    """The place in the buffer is not moved on."""
    for group in by_dtype(trained(module)):
        flat = flatten(group) / dist.get_world_size()
        dist.all_reduce(flat)
        for p in group:
            p.grad.copy_(flat[: p.numel()].view(p.shape))


@wrong(FLAT, reason="calls|hang|values", says=r"rank 1 has no gradient of 'second'")
def fl_missing_gradients_left_out(module):
    """The buffer holds what this rank has: the ranks' buffers do not line up."""
    parameters = [p for p in module.parameters() if p.grad is not None]
    for group in by_dtype(parameters):
        flat = flatten(group) / dist.get_world_size()
        dist.all_reduce(flat)
        unflatten(group, flat)


@wrong(FLAT, reason="values", says=r"(?s)rank 1, N = 2.*'second'.grad is None")
def fl_zeros_not_kept(module):
    """Zeros go into the buffer, but the mean is copied back only where a gradient was."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    for group in by_dtype(parameters):
        pieces = [torch.zeros_like(p).view(-1) if p.grad is None else p.grad.reshape(-1) for p in group]
        flat = torch.cat(pieces) / dist.get_world_size()
        dist.all_reduce(flat)
        for p, piece in zip(group, flat.split([p.numel() for p in group]), strict=True):
            if p.grad is not None:
                p.grad.copy_(piece.view(p.shape))


@wrong(FLAT, reason="crash", says=r"(?s)no rank has any gradient|a model without parameters.*torch.cat")
def fl_nothing_to_cat(module):
    """torch.cat of an empty list."""
    parameters = trained(module)
    dtypes = {p.dtype for p in parameters} or {torch.float32}
    for dtype in sorted(dtypes, key=str):
        group = [p for p in parameters if p.dtype == dtype]
        flat = flatten(group) / dist.get_world_size()
        dist.all_reduce(flat)
        unflatten(group, flat)


@wrong(FLAT, reason="calls|values", says=r"float32, 16, 64 and bfloat16")
def fl_order_of_a_set_of_dtypes(module):
    """Dtypes in the order of a set whose order depends on where objects lie: here, on the rank."""
    parameters = trained(module)
    groups = list(by_dtype(parameters))
    for group in groups if dist.get_rank() == 0 else groups[::-1]:
        flat = flatten(group) / dist.get_world_size()
        dist.all_reduce(flat)
        unflatten(group, flat)


@wrong(FLAT, reason="calls", says=r"(?s)9 tiny ones.*one tiny one more is fine")
def fl_a_flag_for_each(module):
    """One flat buffer, and one tiny all-reduce per parameter: as many calls as before."""
    for p in module.parameters():
        if p.requires_grad:
            has = torch.tensor(float(p.grad is not None))
            dist.all_reduce(has)
    for group in by_dtype(trained(module)):
        flat = flatten(group) / dist.get_world_size()
        dist.all_reduce(flat)
        unflatten(group, flat)


@wrong(FLAT, reason="bytes", says=r"no frozen ones")
def fl_frozen_travel_too(module):
    """Frozen parameters are in the buffer, as zeros."""
    parameters = trained(module)
    for group in by_dtype(parameters):
        frozen = [torch.zeros(p.numel(), dtype=p.dtype) for p in module.parameters() if not p.requires_grad]
        flat = torch.cat([flatten(group), *(one for one in frozen if one.dtype == group[0].dtype)])
        flat /= dist.get_world_size()
        dist.all_reduce(flat)
        unflatten(group, flat[: sum(p.numel() for p in group)])


@wrong(FLAT, reason="bytes", says=r"(?s)N = 3.*all_gather")
def fl_gathers_everything(module):
    """All ranks' buffers, then the mean."""
    n = dist.get_world_size()
    for group in by_dtype(trained(module)):
        flat = flatten(group)
        parts = [torch.empty_like(flat) for _ in range(n)]
        dist.all_gather(parts, flat)
        unflatten(group, torch.stack([part / n for part in parts]).sum(0))


@wrong(FLAT, reason="order", says=r"(?s)nobody waits|used before wait")
def fl_copies_before_the_wait(module):
    """Copies back first, and waits then."""
    for group in by_dtype(trained(module)):
        flat = flatten(group) / dist.get_world_size()
        work = dist.all_reduce(flat, async_op=True)
        unflatten(group, flat)
        work.wait()


@wrong(FLAT, reason="values", says=r"(?s)same model with new gradients.*mean of the gradients of the call before")
def fl_buffer_filled_once(module):
    """Keeps the buffer from the first call, and forgets to fill it again."""
    groups = list(by_dtype(trained(module)))
    if not hasattr(module, "buffers_of_mine"):
        module.buffers_of_mine = [flatten(group) for group in groups]
        for flat in module.buffers_of_mine:
            flat /= dist.get_world_size()
            dist.all_reduce(flat)
    for group, flat in zip(groups, module.buffers_of_mine, strict=True):
        unflatten(group, flat)


@wrong(FLAT, reason="crash", says=r"(?s)transposed.*view size is not compatible.*view\(-1\)")
def fl_view_of_a_transposed_one(module):
    """view(-1) where reshape(-1) is needed."""
    for group in by_dtype(trained(module)):
        flat = torch.cat([p.grad.view(-1) for p in group]) / dist.get_world_size()
        dist.all_reduce(flat)
        unflatten(group, flat)


@wrong(FLAT, reason="values", says=r"(?s)40,000.*inf.*65,504")
def fl_sums_halves_first(module):
    """Divides after the sum."""
    for group in by_dtype(trained(module)):
        flat = flatten(group)
        dist.all_reduce(flat)
        unflatten(group, flat / dist.get_world_size())


@wrong(FLAT, reason="values", says=r"parameter 'weight' itself has changed: it is the mean of the ranks' parameters")
def fl_flattens_parameters(module):
    """Flattens p instead of p.grad."""
    for group in by_dtype(trained(module)):
        flat = torch.cat([p.data.reshape(-1) for p in group]) / dist.get_world_size()
        dist.all_reduce(flat)
        for p, piece in zip(group, flat.split([p.numel() for p in group]), strict=True):
            p.data.copy_(piece.view(p.shape))


@wrong(FLAT, reason="crash", says=r"(?s)bfloat16 in one model.*one buffer per dtype")
def fl_cat_of_all_dtypes_as_views(module):
    """torch.cat turns everything into float64, and the pieces become the gradients."""
    parameters = trained(module)
    if not parameters:
        return
    flat = flatten(parameters) / dist.get_world_size()
    dist.all_reduce(flat)
    for p, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad = piece.view(p.shape)
