"""Reads a communication call: which operation, on which tensors, with whom.

The same operation reaches torch by several doors: `dist.all_gather`, `dist.all_gather_into_tensor`, FSDP and
DDP. All end in a method of `ProcessGroup` (called from Python) or an operator `c10d::*` (called from C++), whose first
arguments are alike, so one table serves both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Signature:
    """op: the name torch.distributed gives the operation. tensors: which argument holds this rank's part.

    whole: True when this argument is the full tensor, False when it is one of `world_size` parts of it.
    uneven: True when ranks may rightly hand in parts of different sizes.
    """

    op: str
    tensors: int = 0
    whole: bool = True
    uneven: bool = False


_GATHERS = Signature("all_gather", tensors=1, whole=False)
_REDUCE_SCATTERS = Signature("reduce_scatter", tensors=1)
_ALL_TO_ALL = Signature("all_to_all", tensors=1, uneven=True)

METHODS: dict[str, Signature] = {
    "send": Signature("send"),
    "recv": Signature("recv"),
    "recv_anysource": Signature("recv"),
    "broadcast": Signature("broadcast"),
    "allreduce": Signature("all_reduce"),
    "allreduce_coalesced": Signature("all_reduce"),
    "reduce": Signature("reduce"),
    "allgather": Signature("all_gather", tensors=1, whole=False, uneven=True),
    "allgather_coalesced": _GATHERS,
    "allgather_into_tensor_coalesced": _GATHERS,
    "_allgather_base": _GATHERS,
    "all_gather_single": _GATHERS,
    "all_gather_single_coalesced": _GATHERS,
    "gather": Signature("gather", tensors=1, whole=False),
    "scatter": Signature("scatter", tensors=0, whole=False),
    "reduce_scatter": Signature("reduce_scatter", tensors=1, uneven=True),
    "reduce_scatter_tensor_coalesced": _REDUCE_SCATTERS,
    "_reduce_scatter_base": _REDUCE_SCATTERS,
    "reduce_scatter_single": _REDUCE_SCATTERS,
    "reduce_scatter_single_coalesced": _REDUCE_SCATTERS,
    "alltoall": _ALL_TO_ALL,
    "alltoall_base": _ALL_TO_ALL,
    "all_to_all_single": _ALL_TO_ALL,
    "barrier": Signature("barrier"),
    "monitored_barrier": Signature("barrier"),
}

_C10D_NAMES = {
    **{f"{name}_": signature for name, signature in METHODS.items()},
    "send": METHODS["send"],
    "barrier": METHODS["barrier"],
    "recv_any_source_": METHODS["recv"],
}

_FUNCTIONAL = {
    "all_reduce": Signature("all_reduce"),
    "broadcast": Signature("broadcast"),
    "reduce_scatter_tensor": Signature("reduce_scatter"),
    "all_gather_into_tensor": Signature("all_gather", whole=False),
    "all_to_all_single": Signature("all_to_all", uneven=True),
}


def signature_of_operator(name: str) -> Signature | None:
    """The signature of a dispatcher operator such as "c10d::allreduce_", or None when it moves no data."""
    namespace, _, bare = name.partition("::")
    if namespace == "c10d":
        return _C10D_NAMES.get(bare)
    if namespace == "_c10d_functional":
        bare = bare.rstrip("_").removesuffix("_out").removesuffix("_coalesced")
        return _FUNCTIONAL.get(bare)
    return None


def tensors_in(argument: Any) -> list[torch.Tensor]:
    """All tensors in a tensor, a list of tensors, or a list of lists of tensors."""
    if isinstance(argument, torch.Tensor):
        return [argument]
    if isinstance(argument, (list, tuple)):
        return [tensor for item in argument for tensor in tensors_in(item)]
    return []


def root_of(method: str, args: tuple, kwargs: dict) -> int | None:
    """The group rank of the peer (send, recv) or of the root; None when the operation has neither."""
    if method in ("send", "recv"):
        return args[1] if len(args) > 1 else kwargs.get("dstRank", kwargs.get("srcRank"))
    if method in ("broadcast", "reduce", "gather", "scatter"):
        options = args[-1] if args else kwargs.get("opts")
        return getattr(options, "rootRank", None)
    return None


def tag_of(method: str, args: tuple, kwargs: dict) -> int:
    """The tag of a message; 0 for a collective."""
    position = {"send": 2, "recv": 2, "recv_anysource": 1}.get(method)
    if position is None:
        return 0
    return args[position] if len(args) > position else kwargs.get("tag", 0)


def ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """The global ranks of a process group, in group order."""
    return tuple(dist.get_process_group_ranks(group))
