"""Lab 03, broadcasting parameters and buffers: plausible mistakes, and what the check must say of each."""

from __future__ import annotations

import torch
import torch.distributed as dist

from . import wrong
from .ddp_right import BP


@wrong(BP, reason="not written", says="not written yet")
def bp_stub(module):
    """The cell as the learner finds it."""
    raise NotImplementedError("not written yet")


@wrong(BP, reason="values", says=r"(?s)N = 2.*'first' is still this rank's own.*no rank sent anything")
def bp_seeds_equally(module):
    """Trusts that every rank has drawn the same weights from the same seed."""
    torch.manual_seed(0)


@wrong(BP, reason="values", says=r"(?s)BatchNorm.*buffer '1.running_mean' is still.*module.buffers")
def bp_parameters_only(module):
    """Forgets the buffers."""
    for p in module.parameters():
        dist.broadcast(p.data, src=0)


@wrong(BP, reason="values", says=r"(?s)buffer '1.num_batches_tracked' is still this rank's own")
def bp_floating_point_only(module):
    """Leaves out what is no floating-point number."""
    for t in [*module.parameters(), *module.buffers()]:
        if t.is_floating_point():
            dist.broadcast(t.data, src=0)


@wrong(BP, reason="values", says=r"(?s)frozen parameter 'frozen' is still")
def bp_trained_parameters_only(module):
    """Skips frozen parameters."""
    for p in module.parameters():
        if p.requires_grad:
            dist.broadcast(p.data, src=0)
    for b in module.buffers():
        dist.broadcast(b, src=0)


@wrong(BP, reason="values", says=r"(?s)buffer 'cache' is still.*persistent=False")
def bp_state_dict(module):
    """state_dict() leaves out buffers that are registered with persistent=False."""
    for t in module.state_dict().values():
        dist.broadcast(t, src=0)


@wrong(BP, reason="values", says=r"(?s)'inner.third' is still this rank's own.*inner modules")
def bp_top_level_only(module):
    """Does not look into the inner modules."""
    for t in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        dist.broadcast(t.data, src=0)


@wrong(BP, reason="values", says=r"'first' is the mean over the ranks")
def bp_averages(module):
    """Equal afterwards, but nobody's: the average over the ranks. The running count of BatchNorm is averaged too."""
    for t in [*module.parameters(), *module.buffers()]:
        total = t.data.double()
        dist.all_reduce(total)
        t.data.copy_(total / dist.get_world_size())


@wrong(BP, reason="values", says=r"rank 0, N = 2.*'first' is rank 1's")
def bp_from_the_last_rank(module):
    """The last rank is the root."""
    for t in [*module.parameters(), *module.buffers()]:
        dist.broadcast(t.data, src=dist.get_world_size() - 1)


@wrong(BP, reason="calls", says=r"(?s)broadcast from rank 0.*broadcast from rank 1")
def bp_root_is_oneself(module):
    """Every rank names itself as the root."""
    for t in [*module.parameters(), *module.buffers()]:
        dist.broadcast(t.data, src=dist.get_rank())


@wrong(
    BP,
    reason="hang",
    says=r"(?s)call 1 is broadcast.* on rank 0, and none: it has returned on rank 1.*all ranks make the same",
)
def bp_only_rank_0_calls(module):
    """Only rank 0 calls broadcast, as if the others had nothing to do."""
    if dist.get_rank() == 0:
        for t in [*module.parameters(), *module.buffers()]:
            dist.broadcast(t.data, src=0)


@wrong(BP, reason="values", says=r"'first' is still this rank's own")
def bp_into_a_copy(module):
    """Receives into a clone and forgets to copy it back."""
    for t in [*module.parameters(), *module.buffers()]:
        dist.broadcast(t.detach().clone(), src=0)


@wrong(BP, reason="values", says=r"(?s)parameter 'first' is another object now.*the optimizer")
def bp_new_parameters(module):
    """Puts new Parameter objects into the module: an optimizer made before holds the old ones."""
    for owner in module.modules():
        for name, p in list(owner.named_parameters(recurse=False)):
            dist.broadcast(p.data, src=0)
            setattr(owner, name, torch.nn.Parameter(p.data.clone(), requires_grad=p.requires_grad))
        for b in owner.buffers(recurse=False):
            dist.broadcast(b, src=0)


@wrong(BP, reason="order", says=r"(?s)nobody waits for an asynchronous broadcast.*line \d+.*async_op=True")
def bp_never_waits(module):
    """Starts all broadcasts and returns."""
    for t in [*module.parameters(), *module.buffers()]:
        dist.broadcast(t.data, src=0, async_op=True)


@wrong(BP, reason="order", says="nobody waits for an asynchronous broadcast")
def bp_waits_for_the_last_only(module):
    """Waits for the last handle, as if that meant all."""
    work = None
    for t in [*module.parameters(), *module.buffers()]:
        work = dist.broadcast(t.data, src=0, async_op=True)
    if work is not None:
        work.wait()


@wrong(BP, reason="calls|hang", says=r"call \d+ is broadcast from rank 0 of .* on rank 0, and broadcast from rank 0 of")
def bp_in_the_order_of_a_set(module):
    """A set has an order of its own in every process."""
    for p in set(module.parameters()):
        dist.broadcast(p.data, src=0)
    for b in module.buffers():
        dist.broadcast(b, src=0)


@wrong(BP, reason="values", says=r"of_double.* is almost rank 0")
def bp_through_one_float32_buffer(module):
    """Everything is flattened into one float32 vector: float64 values lose digits."""
    states = [t.data for t in [*module.parameters(), *module.buffers()]]
    if not states:
        return
    flat = torch.cat([t.reshape(-1).float() for t in states])
    dist.broadcast(flat, src=0)
    for t, piece in zip(states, flat.split([t.numel() for t in states]), strict=True):
        t.copy_(piece.view(t.shape))


@wrong(BP, reason="crash", says=r"AttributeError.*(?s:.*)broadcast_\w+ = |AttributeError")
def bp_misspelt_method(module):
    """module.buffer instead of module.buffers."""
    for t in [*module.parameters(), *module.buffer()]:
        dist.broadcast(t.data, src=0)


@wrong(BP, reason="signature", says=r"\(module\)")
def bp_asks_for_the_rank(module, rank):
    """Takes the rank as an argument."""


@wrong(BP, reason="values", says=r"(?s)'first' is still this rank's own.*own parameters were left out.*parameters\(\)")
def bp_children_only(module):
    """Goes through the inner modules, and leaves out what the module has itself."""
    for _, child in module.named_children():
        for tensor in [*child.parameters(), *child.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
