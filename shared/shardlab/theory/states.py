"""Model states: the bytes a rank holds for weights, gradients and optimizer, whatever the batch.

Activations, temporary buffers and fragmentation come on top (ZeRO section 3.2 calls them residual states).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from shardlab.theory.arguments import one_of, rank_of, ranks, whole
from shardlab.theory.chunks import chunk_sizes


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter of each model state.

    `optimizer` is K of the ZeRO paper (section 3.1): all that only the optimizer step needs, the fp32 master copy of
    the weights included (mixed precision section 3.1).
    """

    weight: int
    gradient: int
    master: int = 0
    first_moment: int = 0
    second_moment: int = 0

    def __post_init__(self) -> None:
        for each in fields(self):
            whole(each.name, getattr(self, each.name))

    @property
    def optimizer(self) -> int:
        return self.master + self.first_moment + self.second_moment

    @property
    def total(self) -> int:
        return self.weight + self.gradient + self.optimizer


# fp16 weights and gradients, everything else fp32: 2 + 2 + K with K = 12 (ZeRO section 3.1).
MIXED_PRECISION_ADAM = StateBytes(weight=2, gradient=2, master=4, first_moment=4, second_moment=4)
FP32_ADAM = StateBytes(weight=4, gradient=4, first_moment=4, second_moment=4)
FP32_SGD = StateBytes(weight=4, gradient=4)

# Which states each strategy splits over the ranks; the others every rank holds in full (ZeRO sections 5.1, 5.2, 5.3).
SHARDED_STATES: dict[str, frozenset[str]] = {
    "ddp": frozenset(),
    "zero1": frozenset({"optimizer"}),
    "zero2": frozenset({"optimizer", "gradients"}),
    "zero3": frozenset({"optimizer", "gradients", "parameters"}),
}


@dataclass(frozen=True)
class ModelStates:
    """Bytes of one rank. `optimizer` includes the master weights."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def _full(psi: int, state: StateBytes) -> dict[str, int]:
    return {"parameters": psi * state.weight, "gradients": psi * state.gradient, "optimizer": psi * state.optimizer}


def model_states(
    strategy: str, parameters: float, world_size: int, state: StateBytes = MIXED_PRECISION_ADAM
) -> ModelStates:
    """Bytes each rank holds, by kind of state, for "ddp", "zero1", "zero2" or "zero3": full size, or full size / N.

    Where N does not divide psi this is the average over the ranks; `rank_model_states` gives each rank's exact bytes.
    Source: ZeRO sections 5.1 to 5.3 and figure 1.
    """
    sharded = SHARDED_STATES[one_of("strategy", strategy, SHARDED_STATES)]
    count = ranks(world_size)
    full = _full(whole("parameters", parameters), state)
    return ModelStates(**{kind: size / count if kind in sharded else size for kind, size in full.items()})


def model_state_bytes(
    strategy: str, parameters: float, world_size: int, state: StateBytes = MIXED_PRECISION_ADAM
) -> float:
    """Bytes each rank holds in all.

    With mixed-precision Adam: ddp 16 psi, zero1 4 psi + 12 psi/N, zero2 2 psi + 14 psi/N, zero3 16 psi/N.
    For psi = 7.5e9 and N = 64 that is 120, 31.4, 16.6 and 1.9 GB.

    Source: ZeRO figure 1.
    """
    return model_states(strategy, parameters, world_size, state).total


def rank_model_states(
    strategy: str,
    parameters: float,
    world_size: int,
    rank: int,
    state: StateBytes = MIXED_PRECISION_ADAM,
    split: str = "balanced",
) -> ModelStates:
    """Bytes, as exact integers, that this rank holds when psi elements are split as `chunk_sizes(psi, N, split)` says.

    A state that the strategy does not split counts psi elements, without padding. One more strategy, "dp": one process
    with a replica on every device (torch.nn.DataParallel). Only device 0 has optimizer state; the other devices hold
    weights and gradients, and these only while a step runs.
    """
    one_of("strategy", strategy, ["dp", *SHARDED_STATES])
    count = ranks(world_size)
    here = rank_of(rank, count)
    psi = whole("parameters", parameters)
    held = _full(psi, state)
    if strategy == "dp":
        return ModelStates(**held) if here == 0 else ModelStates(held["parameters"], held["gradients"], 0)
    mine = _full(chunk_sizes(psi, count, split)[here], state)
    return ModelStates(**{kind: (mine if kind in SHARDED_STATES[strategy] else held)[kind] for kind in held})
