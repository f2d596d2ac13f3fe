"""Tries a collective operation on data that says where it came from, and records who had what before and after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..errors import UsageError
from ..exchange import NOTHING, OPERATIONS, ROOTED, Cell, Exchange, given
from ..runtime import launch
from .marked import Marks

MOST_RANKS = 12  # for more, counts have too few bits in a float64


def trace_collective(
    fn: Callable, operation: str, world_size: int = 4, *, root: int = 0, timeout: float = 20.0
) -> Exchange:
    """Runs `fn(mine)` on every rank and records what it started with and what it returned, right or wrong.

    operation: "broadcast", "reduce", "all_reduce", "gather", "scatter", "all_gather" or "reduce_scatter": decides what
    `mine` is, and what the picture compares with. mine: a float64 tensor of N numbers, of one number (gather,
    all_gather), or of none (scatter, on all ranks but the root). fn returns what the rank has in the end: a tensor or a
    list of tensors of N numbers, or of one, or None for nothing.

    Raises UsageError for arguments that cannot work, and LaunchError when the run does not end well.
    """
    if operation not in OPERATIONS:
        raise UsageError(f"operation is one of {', '.join(OPERATIONS)}; got {operation!r}")
    if isinstance(world_size, int) and world_size > MOST_RANKS:
        raise UsageError(f"trace_collective follows up to {MOST_RANKS} ranks; got world_size={world_size}")
    if not callable(fn):
        raise UsageError(f"trace_collective needs a function to try; got {fn!r:.60}")
    if isinstance(world_size, int) and root not in range(max(world_size, 1)):
        raise UsageError(f"root is a rank, 0 to {world_size - 1}; got {root!r}")
    run = launch(_try, world_size, (fn, operation, root), device="cpu", timeout=timeout)
    rooted = f" {'to' if operation in ('reduce', 'gather') else 'from'} rank {root}" if operation in ROOTED else ""
    name = getattr(fn, "__name__", "the function")
    return Exchange(
        operation,
        world_size,
        root if operation in ROOTED else None,
        given(operation, world_size, root),
        tuple(run.results),
        f"{name}: {operation.replace('_', '-')}{rooted}, {world_size} ranks",
    )


def _try(fn: Callable, operation: str, root: int) -> tuple[Cell, ...]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    marks = Marks(world_size, torch.float64)
    row = marks.part(rank, world_size)
    has = [cell != NOTHING for cell in given(operation, world_size, root)[rank]]
    returned = fn(row[torch.tensor(has)].clone())
    return _row(returned, marks, rank)


def _row(returned: Any, marks: Marks, rank: int) -> tuple[Cell, ...]:
    """The cells of a rank. N numbers fill its row in order; fewer lie in the pieces that they belong to."""
    numbers = _numbers(returned)
    row: list[Cell] = [NOTHING] * marks.world_size
    for place, number in enumerate(numbers[: marks.world_size]):
        mark = marks.read(number)
        position = None if mark is None else mark.position
        if len(numbers) < marks.world_size:
            place = rank if position is None else position
        if place < marks.world_size:
            row[place] = mark.counts if mark is not None and position == place else None
    return tuple(row)


def _numbers(returned: Any) -> list[float]:
    if isinstance(returned, torch.Tensor):
        return returned.detach().reshape(-1).tolist()
    if isinstance(returned, (list, tuple)):
        return [number for one in returned for number in _numbers(one)]
    return []
