"""Lab 02: scatter, right and wrong."""

from __future__ import annotations

import torch

from shardlab import move, on

from . import right, wrong
from .data_parallel_plain import scatter


@right("02.scatter")
def split_then_move(tensor, devices):
    """tensor_split, and each piece to its device."""
    return scatter(tensor, devices)


@right("02.scatter")
def as_chunk_does(tensor, devices):
    """torch.chunk's sizes, with empty pieces where it gives too few."""
    pieces = list(tensor.chunk(len(devices)))
    pieces += [tensor[:0]] * (len(devices) - len(pieces))
    return tuple(move(piece, device) for piece, device in zip(pieces, devices, strict=True))


@right("02.scatter")
def by_hand(tensor, devices):
    """Slices between rounded boundaries, moved with .to()."""
    count = len(devices)
    bounds = [round(i * len(tensor) / count) for i in range(count + 1)]
    return [tensor[a:b].to(device) for a, b, device in zip(bounds, bounds[1:], devices, strict=False)]


@right("02.scatter")
def largest_last(tensor, devices):
    """The last devices get the rows that are left over."""
    count = len(devices)
    sizes = [(len(tensor) + i) // count for i in range(count)]
    return [move(piece, device) for piece, device in zip(tensor.split(sizes), devices, strict=True)]


@right("02.scatter")
def into_new_memory(tensor, devices):
    """Makes the pieces on their devices first and copies into them."""
    pieces = []
    for piece, device in zip(tensor.detach().tensor_split(len(devices)), devices, strict=True):
        with on(device):
            mine = torch.empty(piece.shape, dtype=piece.dtype)
        mine.copy_(piece)
        pieces.append(mine)
    return pieces


@right("02.scatter")
def row_by_row(tensor, devices):
    """Many small messages: the same bytes."""
    result = []
    for piece, device in zip(tensor.tensor_split(len(devices)), devices, strict=True):
        rows = [move(row, device) for row in piece]
        result.append(torch.stack(rows) if rows else move(piece, device))
    return result


@wrong("02.scatter", reason="values", says="3 pieces for 4 devices.*\n.*\n.*chunk may give fewer")
def chunk_as_it_is(tensor, devices):
    """torch.chunk gives fewer pieces than asked for: 9 rows in 4."""
    return [move(piece, device) for piece, device in zip(tensor.chunk(len(devices)), devices, strict=False)]


@wrong("02.scatter", reason="values", says="N = 2, 6 rows: rows 4, 5 .*\n.*\n.*torch.split is the number of rows")
def rows_for_pieces(tensor, devices):
    """torch.split takes the rows of a piece, and zip drops the pieces that are too many."""
    return [move(piece, device) for piece, device in zip(torch.split(tensor, len(devices)), devices, strict=False)]


@wrong("02.scatter", reason="values", says="3 pieces for 2 devices.*\n.*\n.*torch.split is the number of rows")
def rows_for_pieces_all(tensor, devices):
    """The same, and all pieces are returned."""
    pieces = tensor.split(len(devices))
    return [move(piece, devices[i % len(devices)]) for i, piece in enumerate(pieces)]


@wrong("02.scatter", reason="crash", says="device_of.*\n  look at: [^;]*$")
def to_the_device_of_torch(tensor, devices):
    """`tensor.device` of a logical device is the CPU; and a comprehension is no call."""
    pieces = tensor.tensor_split(len(devices))
    return [move(piece, pieces[0].device) for piece in pieces]


@wrong("02.scatter", reason="values", says="N = 4, 13 rows: row 12 of 13 is lost")
def floor_sizes(tensor, devices):
    """Rounds the size down: the tail is dropped."""
    size = len(tensor) // len(devices)
    return [move(tensor[i * size : (i + 1) * size], device) for i, device in enumerate(devices)]


@wrong("02.scatter", reason="values", says="4 rows\n.*no piece of more than 3 rows")
def remainder_to_the_last(tensor, devices):
    """The last device gets its part and all that is left over."""
    size = len(tensor) // len(devices)
    ends = [size * (i + 1) for i in range(len(devices) - 1)]
    return [move(piece, device) for piece, device in zip(tensor.tensor_split(ends), devices, strict=True)]


@wrong("02.scatter", reason="values", says="the rows come as 0, 2, 4; 1, 3, 5")
def dealt_like_cards(tensor, devices):
    """Every N-th row: nothing is lost, but the order is."""
    return [move(tensor[i :: len(devices)], device) for i, device in enumerate(devices)]


@wrong("02.scatter", reason="device", says="piece 1 lives on device 0")
def not_moved(tensor, devices):
    """Cuts, and leaves everything where it is."""
    return list(tensor.tensor_split(len(devices)))


@wrong("02.scatter", reason="bytes", says="device 1 received 72 bytes\n.*36: its piece")
def move_then_cut(tensor, devices):
    """The whole batch goes everywhere."""
    return [move(tensor, device).tensor_split(len(devices))[i] for i, device in enumerate(devices)]


@wrong("02.scatter", reason="bytes", says="device 1 received")
def from_hand_to_hand(tensor, devices):
    """Each piece travels over all devices before its own."""
    result = []
    for number, piece in enumerate(tensor.tensor_split(len(devices))):
        for device in devices[: number + 1]:
            piece = move(piece, device)
        result.append(piece)
    return result


@wrong("02.scatter", reason="values", says="the rows come as")
def last_first(tensor, devices):
    """Piece 0 goes to the last device... and the list is turned round."""
    pieces = tensor.tensor_split(len(devices))[::-1]
    return [move(piece, device) for piece, device in zip(pieces, devices, strict=True)]


@wrong("02.scatter", reason="device", says="N = 3, 8 rows, devices .2, 0, 3.: piece 0 lives on device 0")
def numbers_for_devices(tensor, devices):
    """Takes for granted that devices[i] is device i."""
    pieces = tensor.tensor_split(len(devices))
    everyone = sorted(devices, key=lambda device: device.index)
    return [move(piece, everyone[i]) for i, piece in enumerate(pieces)]


@wrong("02.scatter", reason="values", says="only dimension 0")
def flattened(tensor, devices):
    """Cuts the elements, not the rows."""
    pieces = tensor.reshape(-1).tensor_split(len(devices))
    return [move(piece, device) for piece, device in zip(pieces, devices, strict=True)]


@wrong("02.scatter", reason="values", says="N = 4, 2 rows: 2 pieces for 4 devices")
def no_empty_pieces(tensor, devices):
    """Leaves out the devices that get nothing."""
    return [piece for piece in scatter(tensor, devices) if len(piece)]


@wrong("02.scatter", reason="values", says="int64.*piece 0 is float32")
def all_floats(tensor, devices):
    """Everything becomes float32 on the way."""
    return [piece.float() if piece.dtype != torch.float64 else piece for piece in scatter(tensor, devices)]


@wrong("02.scatter", reason="crash", says="not numbers")
def to_the_number(tensor, devices):
    """`move` with a number, as .to(1) takes one."""
    return [move(piece, i) for i, piece in enumerate(tensor.tensor_split(len(devices)))]


@wrong("02.scatter", reason="values", says="a generator was returned")
def lazily(tensor, devices):
    """A generator instead of a list."""
    return (piece for piece in scatter(tensor, devices))


@wrong("02.scatter", reason="not written", says="not written yet")
def scatter_stub(tensor, devices):
    """What the notebook starts with."""
    raise NotImplementedError


@wrong("02.scatter", reason="signature", says="a function of 2 arguments")
def without_devices(tensor):
    """Forgets the devices."""
    return [tensor]


@wrong("02.scatter", reason="hang", says="nothing has moved", patience=1.5)
def for_ever(tensor, devices):
    """A loop whose counter stands still."""
    done = 0
    while done < len(devices):
        pass
    return []
