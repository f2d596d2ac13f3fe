"""What a rank sends and receives in one training step, by strategy.

Every strategy but "dp" is a list of collectives on psi elements, and the list is all there is to its cost. Gradient
accumulation, buffers (BatchNorm) and the loss scaler's one flag are left out.
"""

from __future__ import annotations

from shardlab.theory.arguments import one_of, rank_of, ranks, whole
from shardlab.theory.chunks import chunk_sizes
from shardlab.theory.collectives import Volume, collective_cost
from shardlab.theory.ring import ring_volume

# DDP: gradients are all-reduced (DDP section 3.2; ZeRO section 7.1).
# ZeRO-1 and 2: gradients go to their owner, updated parameters come back (ZeRO section 7.2.1).
# ZeRO-3: parameters are gathered for forward, again for backward, then gradients go to their owner (ZeRO section 7.2.2,
# FSDP section 3.2.1). FSDP can keep the outermost unit gathered between the two (section 3.3.1) and then sends less.
# zero1_all_reduce: ZeRO-1 as it should not be done. The all-reduce brings whole gradients, of which 1/N is used.
STEP_COLLECTIVES: dict[str, tuple[str, ...]] = {
    "ddp": ("all_reduce",),
    "zero1": ("reduce_scatter", "all_gather"),
    "zero2": ("reduce_scatter", "all_gather"),
    "zero3": ("all_gather", "all_gather", "reduce_scatter"),
    "zero1_all_reduce": ("all_reduce", "all_gather"),
}


def step_volume(strategy: str, parameters: float, world_size: int, rank: int = 0) -> Volume:
    """Elements out of (`sent`) and into (`received`) this rank per step; times the element size these are bytes.

    | strategy         | sent and received                                                        |
    |------------------|--------------------------------------------------------------------------|
    | dp, device 0     | (N-1) psi gradients come in, (N-1) psi parameters go out                 |
    | dp, any other    | psi parameters come in, psi gradients go out                             |
    | ddp              | 2 psi (N-1)/N                                                            |
    | zero1, zero2     | 2 psi (N-1)/N: reduce-scatter + all-gather                               |
    | zero3            | 3 psi (N-1)/N: all-gather + all-gather + reduce-scatter, 1.5 times ddp   |
    | zero1_all_reduce | 3 psi (N-1)/N: all-reduce + all-gather, the same numbers at 1.5 the cost |

    `rank` matters for "dp" (one process, one thread per device, torch.nn.DataParallel) only. Where N does not divide
    psi the other rows are averages over the ranks; `ring_step_volume` has the integers. The ZeRO paper drops (N-1)/N.
    Sources: ZeRO section 7; FSDP section 3.2.2, for the ratios.
    """
    one_of("strategy", strategy, ["dp", *STEP_COLLECTIVES])
    psi, count = whole("parameters", parameters), ranks(world_size)
    here = rank_of(rank, count)
    if strategy == "dp":
        moved = (count - 1) * psi if here == 0 else psi
        return Volume(moved, moved)
    costs = [collective_cost(op, psi, count, here) for op in STEP_COLLECTIVES[strategy]]
    return Volume(sum(cost.sent for cost in costs), sum(cost.received for cost in costs))


def ring_step_volume(strategy: str, parameters: float, world_size: int, rank: int, split: str = "balanced") -> Volume:
    """Elements, as exact integers, out of and into this rank per step when every collective is one ring over psi
    elements, split as `chunk_sizes(psi, N, split)` says."""
    one_of("strategy", strategy, STEP_COLLECTIVES)
    sizes = chunk_sizes(parameters, world_size, split)
    costs = [ring_volume(op, sizes, rank) for op in STEP_COLLECTIVES[strategy]]
    return Volume(sum(cost.sent for cost in costs), sum(cost.received for cost in costs))
