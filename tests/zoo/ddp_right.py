"""Lab 03, broadcasting and averaging per parameter: the plain solutions, and right ones written in other ways."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, all_reduce, get_world_size

from . import right

BP, AG = "03.broadcast_parameters", "03.average_gradients"


def trained(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Parameters with gradients; zeros where this rank has none."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    return parameters


@right(BP)
def broadcast_parameters(module):
    """The plain solution."""
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.detach(), src=0)


@right(BP)
def bp_data_asynchronous(module):
    """All broadcasts at once, through .data, then all waits."""
    works = [dist.broadcast(p.data, 0, async_op=True) for p in module.parameters()]
    works += [dist.broadcast(b, 0, async_op=True) for b in module.buffers()]
    for work in works:
        work.wait()


@right(BP)
def bp_the_parameter_itself(module):
    """The leaf tensor is handed in as it is; named_* with names nobody needs."""
    for _, p in module.named_parameters():
        dist.broadcast(p, src=0)
    for _, b in module.named_buffers():
        dist.broadcast(b, src=0)


@right(BP)
def bp_one_flat_buffer_per_dtype(module):
    """Flattened by dtype, one broadcast each, copied back."""
    states = [t.detach() for t in [*module.parameters(), *module.buffers()]]
    for dtype in dict.fromkeys(t.dtype for t in states):
        group = [t for t in states if t.dtype == dtype]
        flat = torch.cat([t.reshape(-1) for t in group])
        dist.broadcast(flat, 0)
        for t, piece in zip(group, flat.split([t.numel() for t in group]), strict=True):
            t.copy_(piece.view(t.shape))


@right(BP)
def bp_new_data(module):
    """Receives into a new tensor and makes it the parameter's data."""
    with torch.no_grad():
        for t in [*module.parameters(), *module.buffers()]:
            fresh = t.detach().clone()
            dist.broadcast(fresh, 0)
            t.data = fresh


@right(BP)
def bp_by_hand_in_a_star(module):
    """Rank 0 sends everything to everybody: slow, and right."""
    for t in [*module.parameters(), *module.buffers()]:
        whole = t.detach().contiguous()
        if dist.get_rank() == 0:
            for other in range(1, dist.get_world_size()):
                dist.send(whole, other)
        else:
            dist.recv(whole, 0)
        t.detach().copy_(whole)


@right(BP)
def bp_objects(module):
    """One list of all values as Python objects."""
    states = [t.detach() for t in [*module.parameters(), *module.buffers()]]
    box = [[t.clone() for t in states]]
    dist.broadcast_object_list(box, src=0)
    for t, value in zip(states, box[0], strict=True):
        t.copy_(value)


@right(BP)
@torch.no_grad()
def bp_recursive_with_barrier(module):
    """Each module its own tensors, then its children; a barrier at the end."""
    for t in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        dist.broadcast(t, 0)
    for child in module.children():
        bp_recursive_with_barrier(child)
    dist.barrier()


@right(AG)
def average_gradients(module):
    """The plain solution: divide, then sum."""
    n = dist.get_world_size()
    for p in trained(module):
        p.grad /= n
        dist.all_reduce(p.grad)


@right(AG)
def ag_divide_after_in_float32(module):
    """Sums halves in float32, divides after."""
    for p in trained(module):
        wide = p.grad.float() if p.grad.dtype is torch.float16 else p.grad
        all_reduce(wide)
        wide /= get_world_size()
        p.grad.copy_(wide)


@right(AG)
def ag_new_tensor(module):
    """p.grad becomes a new tensor."""
    for p in trained(module):
        mean = p.grad / dist.get_world_size()
        dist.all_reduce(mean, op=ReduceOp.SUM)
        p.grad = mean


@right(AG)
def ag_square_root_twice(module):
    """Divides by sqrt(N) before and after."""
    root = math.sqrt(dist.get_world_size())
    for p in trained(module):
        p.grad.div_(root)
        dist.all_reduce(p.grad)
        p.grad.div_(root)


@right(AG)
def ag_average_of_the_library(module):
    """ReduceOp.AVG where it does; halves are divided before."""
    for p in trained(module):
        if p.grad.dtype is torch.float16:
            p.grad /= dist.get_world_size()
            dist.all_reduce(p.grad)
        else:
            dist.all_reduce(p.grad, op=ReduceOp.AVG)


@right(AG)
def ag_all_at_once(module):
    """All reductions asynchronous, last parameter first, then all waits."""
    n, works = dist.get_world_size(), []
    for p in reversed(trained(module)):
        p.grad.div_(n)
        works.append(dist.all_reduce(p.grad, async_op=True))
    for work in works:
        work.wait()


@right(AG)
def ag_futures(module):
    """Divides in the callback of a future."""
    n, futures = dist.get_world_size(), []
    for p in trained(module):
        if p.grad.dtype is torch.float16:
            p.grad /= n
            dist.all_reduce(p.grad)
            continue
        future = dist.all_reduce(p.grad, async_op=True).get_future()
        futures.append(future.then(lambda done: done.value()[0].div_(n)))
    for future in futures:
        future.wait()


@right(AG)
def ag_flag_first(module):
    """Asks first whether any rank has a gradient; where none has, it stays None."""
    for p in module.parameters():
        if not p.requires_grad:
            continue
        has = torch.tensor([float(p.grad is not None)])
        dist.all_reduce(has)
        if has.item() == 0:
            continue
        mine = torch.zeros_like(p) if p.grad is None else p.grad
        mine = mine / dist.get_world_size()
        dist.all_reduce(mine)
        p.grad = mine


@right(AG)
def ag_sorted_by_name(module):
    """In the order of names, with a barrier; what it prints is not shown."""
    print("averaging")
    for _, p in sorted(module.named_parameters()):
        if p.requires_grad:
            grad = torch.zeros_like(p.data) if p.grad is None else p.grad.data
            grad.mul_(1 / dist.get_world_size())
            dist.all_reduce(grad)
            p.grad = grad
    dist.barrier()


@right(AG)
@torch.no_grad()
def ag_functional(module):
    """Functional collectives, which return the result."""
    from torch.distributed._functional_collectives import all_reduce as reduced

    for p in trained(module):
        p.grad.copy_(reduced(p.grad / dist.get_world_size(), "sum", dist.group.WORLD))
