"""A collective operation as a record: whose data every rank had before, and whose after. Nothing here imports torch.

Every rank's row has N pieces. A cell says whose data is in a piece: a tuple with one count per rank, how many times
that rank's data has been added, as in `records.RingStep`. () says that there is nothing, None that it is something
else.
"""

from __future__ import annotations

from dataclasses import dataclass

Cell = tuple[int, ...] | None
Rows = tuple[tuple[Cell, ...], ...]  # [rank][piece]

OPERATIONS = ("broadcast", "reduce", "all_reduce", "gather", "scatter", "all_gather", "reduce_scatter")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
NOTHING: Cell = ()


@dataclass(frozen=True)
class Exchange:
    """What one run of an operation did. root: None where there is none. title: what the picture is called."""

    operation: str
    world_size: int
    root: int | None
    before: Rows
    after: Rows
    title: str

    @property
    def promised(self) -> Rows:
        return promised(self.operation, self.world_size, self.root or 0)

    @property
    def wrong(self) -> list[tuple[int, int]]:
        """The (rank, piece) that do not hold what the operation promises. What it does not promise is never wrong."""
        return [
            (rank, piece)
            for rank, row in enumerate(self.promised)
            for piece, cell in enumerate(row)
            if cell != NOTHING and self.after[rank][piece] != cell
        ]


def alone(rank: int, world_size: int) -> Cell:
    """One rank's data."""
    return tuple(int(other == rank) for other in range(world_size))


def given(operation: str, world_size: int, root: int = 0) -> Rows:
    """What the ranks have before: their own data in every piece, or in one, or only the root has any."""
    ranks = range(world_size)
    if operation in ("gather", "all_gather"):
        return tuple(tuple(alone(rank, world_size) if rank == piece else NOTHING for piece in ranks) for rank in ranks)
    if operation == "scatter":
        return tuple((alone(root, world_size) if rank == root else NOTHING,) * world_size for rank in ranks)
    return tuple((alone(rank, world_size),) * world_size for rank in ranks)


def promised(operation: str, world_size: int, root: int = 0) -> Rows:
    """What the ranks have after the operation; NOTHING where it makes no promise."""
    ranks = range(world_size)
    total: Cell = (1,) * world_size

    def cell(rank: int, piece: int) -> Cell:
        if operation == "broadcast":
            return alone(root, world_size)
        if operation == "all_reduce":
            return total
        if operation == "all_gather":
            return alone(piece, world_size)
        if operation == "reduce":
            return total if rank == root else NOTHING
        if operation == "gather":
            return alone(piece, world_size) if rank == root else NOTHING
        if rank != piece:
            return NOTHING
        return alone(root, world_size) if operation == "scatter" else total

    return tuple(tuple(cell(rank, piece) for piece in ranks) for rank in ranks)


def in_short(cell: Cell) -> str:
    """ "2" for rank 2's data, "0+2" for a sum, "all" for everybody's, "-" for nothing, "?" for something else."""
    if cell is None:
        return "?"
    if not any(cell):
        return "-"
    if set(cell) == {1} and len(cell) > 1:
        return "all"
    return "+".join(f"{rank}" if count == 1 else f"{count}×{rank}" for rank, count in enumerate(cell) if count)
