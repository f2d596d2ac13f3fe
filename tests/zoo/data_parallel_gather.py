"""Lab 02: gather, right and wrong."""

from __future__ import annotations

import os
import sys

import torch

from shardlab import move, on

from . import right, wrong
from .data_parallel_plain import gather


@right("02.gather")
def move_then_cat(pieces, device):
    """Each piece to the device, then one cat."""
    return gather(pieces, device)


@right("02.gather")
def into_one(pieces, device):
    """Makes the result first and copies every piece to its place."""
    with on(device), torch.no_grad():
        whole = torch.empty((sum(map(len, pieces)), *pieces[0].shape[1:]), dtype=pieces[0].dtype)
        begin = 0
        for piece in pieces:
            whole[begin : begin + len(piece)] = piece
            begin += len(piece)
    return whole


@right("02.gather")
def pairwise(pieces, device):
    """Grows the result piece by piece."""
    whole = move(pieces[0], device)
    for piece in pieces[1:]:
        whole = torch.cat((whole, piece.to(device)))
    return whole


@right("02.gather")
def without_the_empty(pieces, device):
    """Leaves out empty pieces, but for the last one left."""
    full = [piece for piece in pieces if piece.numel()] or pieces[:1]
    return torch.cat([move(piece, device) for piece in full])


@right("02.gather")
def row_after_row(pieces, device):
    """Stacks single rows."""
    rows = [move(row, device) for piece in pieces for row in piece]
    return torch.stack(rows) if rows else move(pieces[0], device)


@wrong("02.gather", reason="crash", says="pieces of 0, 0 rows: .*\n.*even all of them")
def nothing_left(pieces, device):
    """Leaves out empty pieces, and cat gets none when all are."""
    return torch.cat([move(piece, device) for piece in pieces if len(piece)])


@wrong("02.gather", reason="crash", says="cpu.*\n.*with on\\(device\\)")
def from_an_empty_one(pieces, device):
    """Begins with an empty tensor, which is on the host."""
    whole = torch.empty(0, *pieces[0].shape[1:])
    for piece in pieces:
        whole = torch.cat([whole, move(piece, device)])
    return whole


@wrong("02.gather", reason="crash", says="same device.*\n.*move")
def cat_alone(pieces, device):
    """Forgets to move: on GPUs the same error."""
    return torch.cat(pieces)


@wrong("02.gather", reason="values", says="shape \\(2, 3, 3\\)")
def stacked(pieces, device):
    """stack makes a new dimension."""
    return torch.stack([move(piece, device) for piece in pieces])


@wrong("02.gather", reason="values", says="the rows come as 3, 4, 5, 0, 1, 2")
def turned_round(pieces, device):
    """Last piece first."""
    return torch.cat([move(piece, device) for piece in reversed(pieces)])


@wrong("02.gather", reason="device", says="lives on device 0\n.*on device 2")
def to_the_first(pieces, device):
    """Gathers where the first piece is, whatever the caller said."""
    home = pieces[0]
    whole = home
    for piece in pieces[1:]:
        there = home.detach().new_empty(piece.shape)
        there.copy_(piece)
        whole = torch.cat([whole, there])
    return whole


@wrong("02.gather", reason="values|crash", says="N = 4, pieces of 4, 3, 3, 3 rows")
def equal_sizes_assumed(pieces, device):
    """Reckons with pieces of one size."""
    with on(device):
        whole = torch.zeros((len(pieces) * len(pieces[0]), *pieces[0].shape[1:]), dtype=pieces[0].dtype)
    for number, piece in enumerate(pieces):
        whole[number * len(pieces[0]) :][: len(piece)] = piece.detach()
    return whole


@wrong("02.gather", reason="values", says="the rows come as")
def largest_first(pieces, device):
    """Sorts by size."""
    return gather(sorted(pieces, key=len, reverse=True), device)


@wrong("02.gather", reason="values", says="a list was returned")
def list_of_moved(pieces, device):
    """Moves and forgets to join."""
    return [move(piece, device) for piece in pieces]


@wrong("02.gather", reason="values", says="the result has 3 rows\n.*6: all pieces")
def summed(pieces, device):
    """Adds where it should join: that is reduce."""
    return sum(move(piece, device) for piece in pieces)


@wrong("02.gather", reason="bytes", says="device 1 sent 0")
def behind_the_back(pieces, device):
    """Through numpy: on GPUs there is no such way, here nothing is counted."""
    with on(device):
        return torch.cat([torch.tensor(piece.detach().numpy()) for piece in pieces])


@wrong("02.gather", reason="bytes", says="device 0 sent 36.*\n.*nothing to send")
def by_way_of_the_first(pieces, device):
    """Everything over the first piece's neighbour: twice the way."""
    with torch.no_grad():
        collected = []
        for piece in pieces:
            neighbour = pieces[-1].new_empty(piece.shape)
            neighbour.copy_(piece)
            collected.append(move(neighbour, device))
        return torch.cat(collected)


@wrong("02.gather", reason="values", says="only dimension 0|shape")
def side_by_side(pieces, device):
    """Joins along the last dimension."""
    return torch.cat([move(piece, device) for piece in pieces], dim=-1)


@wrong("02.gather", reason="values", says="is float32\n.*int64")
def gathered_as_floats(pieces, device):
    """Everything becomes float32."""
    moved = [move(piece, device) for piece in pieces]
    return torch.cat([one if one.dtype.is_floating_point else one.float() for one in moved])


@wrong("02.gather", reason="crash", says="SystemExit: sys.exit")
def leaves(pieces, device):
    """Ends the program."""
    sys.exit(1)


@wrong("02.gather", reason="crash", says="exit code 3")
def leaves_at_once(pieces, device):
    """Ends the process without a word."""
    os._exit(3)


@wrong("02.gather", reason="not written", says="not written yet")
def gather_stub(pieces, device):
    """What the notebook starts with."""
    raise NotImplementedError


@wrong("02.gather", reason="values", says="row 0 is there|are lost|is lost")
def first_only(pieces, device):
    """Returns the first piece as often as there are pieces."""
    return torch.cat([move(pieces[0], device)] * len(pieces))
