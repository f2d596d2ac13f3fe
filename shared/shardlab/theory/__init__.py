"""The arithmetic of data-parallel training: what every rank stores, what it sends, how long that takes.

Pure functions of plain numbers; nothing here imports torch. In all of them N (`world_size`) is the number of ranks, psi
(`parameters`) the number of parameters of the model and n (`size`, `nbytes`) the size of one tensor. A function that is
linear in its size gives back the unit it was given: elements in, elements out; bytes in, bytes out.

Sources, cited by their short names in the modules:
- ZeRO: Rajbhandari et al. 2020, arXiv 1910.02054
- DDP: Li et al. 2020, arXiv 2006.15704
- FSDP: Zhao et al. 2023, arXiv 2304.11277
- mixed precision: Micikevicius et al. 2018, arXiv 1710.03740
- Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 117-124
- Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations in MPICH", IJHPCA 19(1), 49-66
- nccl-tests: doc/PERFORMANCE.md of github.com/NVIDIA/nccl-tests
"""

from shardlab.theory.baselines import (
    all_reduce_lower_bound,
    all_reduce_total_lower_bound,
    naive_all_reduce_messages,
    naive_all_reduce_volume,
    tree_rounds,
)
from shardlab.theory.chunks import SPLITS, chunk_sizes, padded_size
from shardlab.theory.collectives import OPERATIONS, Volume, collective_cost
from shardlab.theory.fit import AlphaBeta, fit_alpha_beta
from shardlab.theory.ring import (
    RING_OPERATIONS,
    ring_all_reduce_bytes,
    ring_chunk_bytes,
    ring_messages,
    ring_received_chunks,
    ring_sent_chunks,
    ring_volume,
)
from shardlab.theory.states import (
    FP32_ADAM,
    FP32_SGD,
    MIXED_PRECISION_ADAM,
    SHARDED_STATES,
    ModelStates,
    StateBytes,
    model_state_bytes,
    model_states,
    rank_model_states,
)
from shardlab.theory.strategies import STEP_COLLECTIVES, ring_step_volume, step_volume
from shardlab.theory.timing import (
    algorithm_bandwidth,
    bus_bandwidth,
    bus_bandwidth_factor,
    collective_time,
    message_time,
    naive_all_reduce_time,
    ring_all_reduce_time,
    ring_naive_crossover_bytes,
    ring_phase_time,
    ring_tree_crossover_bytes,
    tree_all_reduce_time,
)
from shardlab.theory.units import format_bytes, format_seconds

__all__ = [
    "FP32_ADAM",
    "FP32_SGD",
    "MIXED_PRECISION_ADAM",
    "OPERATIONS",
    "RING_OPERATIONS",
    "SHARDED_STATES",
    "SPLITS",
    "STEP_COLLECTIVES",
    "AlphaBeta",
    "ModelStates",
    "StateBytes",
    "Volume",
    "algorithm_bandwidth",
    "all_reduce_lower_bound",
    "all_reduce_total_lower_bound",
    "bus_bandwidth",
    "bus_bandwidth_factor",
    "chunk_sizes",
    "collective_cost",
    "collective_time",
    "fit_alpha_beta",
    "format_bytes",
    "format_seconds",
    "message_time",
    "model_state_bytes",
    "model_states",
    "naive_all_reduce_messages",
    "naive_all_reduce_time",
    "naive_all_reduce_volume",
    "padded_size",
    "rank_model_states",
    "ring_all_reduce_bytes",
    "ring_all_reduce_time",
    "ring_chunk_bytes",
    "ring_messages",
    "ring_naive_crossover_bytes",
    "ring_phase_time",
    "ring_received_chunks",
    "ring_sent_chunks",
    "ring_step_volume",
    "ring_tree_crossover_bytes",
    "ring_volume",
    "step_volume",
    "tree_all_reduce_time",
    "tree_rounds",
]
