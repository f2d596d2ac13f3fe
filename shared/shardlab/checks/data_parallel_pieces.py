"""Lab 02: looks at what `scatter` and `gather` did, inside the process that has the devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..records import RankTraffic
from .device_trial import Bench, Case, Fault

DTYPES = {"float32": torch.float32, "int64": torch.int64, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class Batch:
    """Rows to scatter, or to gather in pieces. order: the devices by number. sizes: rows of each piece, to gather."""

    order: tuple[int, ...]
    rows: int
    width: tuple[int, ...] = (3,)
    dtype: str = "float32"
    layout: str = ""  # "transposed": not contiguous; "leaf": requires grad
    sizes: tuple[int, ...] = ()
    target: int = 0

    @property
    def name(self) -> str:
        kind = f", {self.dtype}" if self.dtype != "float32" else ""
        kind += f", {self.layout}" if self.layout else ""
        kind += f", {1 + len(self.width)}-D" if len(self.width) != 1 else ""
        if self.order != tuple(range(len(self.order))):
            kind += f", devices {list(self.order)}"
        if self.sizes:
            to = f", to device {self.target}" if self.target != self.order[0] else ""
            return f"N = {len(self.order)}, pieces of {', '.join(map(str, self.sizes))} rows{kind}{to}"
        return f"N = {len(self.order)}, {self.rows} rows{kind}"

    def tensor(self) -> torch.Tensor:
        """Row r begins with r+1: every row is another, and none is all zeros. On the host."""
        shape = (self.rows, *self.width)
        values = 1 + torch.arange(self.rows).view(-1, *(1 for _ in self.width)).expand(shape).clone()
        for place in range(len(self.width)):
            values += 100 * torch.arange(shape[place + 1]).view(-1, *(1 for _ in shape[place + 2 :]))
        values = values.to(DTYPES[self.dtype])
        return values.transpose(0, 1).contiguous().transpose(0, 1) if self.layout == "transposed" else values


def scatter_cases() -> list[Case]:
    batches = [
        Batch((0, 1), 6),
        Batch((0, 1, 2, 3), 12),
        *(
            Batch(tuple(range(n)), rows)
            for n, rows in ((4, 13), (3, 7), (4, 9), (5, 12), (4, 2), (3, 1), (1, 5), (2, 3))
        ),
        Batch((2, 0, 3), 8),
        Batch((3, 1, 0, 2), 2, (2,), "int64"),
        Batch((0, 1, 2), 7, (), "int64"),
        Batch((0, 1, 2), 7, (2, 3), "float64"),
        Batch((0, 1), 5, (4,), "float16", "transposed"),
        Batch((0, 1), 5, layout="leaf"),
    ]
    return [Case(batch.name, partial(judge_scatter, batch=batch)) for batch in batches]


def gather_cases() -> list[Case]:
    def pieces(order: tuple[int, ...], sizes: tuple[int, ...], **more: Any) -> Batch:
        return Batch(order, sum(sizes), sizes=sizes, **{"target": order[0], **more})

    batches = [
        pieces((0, 1), (3, 3)),
        pieces((0, 1, 2, 3), (3, 3, 3, 3)),
        pieces((0, 1, 2, 3), (4, 3, 3, 3)),
        pieces((0, 1, 2), (1, 4, 2)),
        pieces((0, 1, 2, 3), (1, 1, 0, 0)),
        pieces((0, 1, 2), (2, 0, 3)),
        pieces((0, 1), (0, 0)),
        pieces((0,), (4,)),
        pieces((2, 0, 3), (3, 2, 1)),
        pieces((0, 1, 2), (2, 2, 2), target=2),
        pieces((0, 1), (2, 3), target=3),
        pieces((0, 1, 2), (2, 3, 1), width=(), dtype="int64"),
        pieces((0, 1, 2), (2, 3, 1), width=(2, 3), dtype="float64"),
        pieces((0, 1), (2, 3), dtype="float16"),
        pieces((0, 1), (2, 3), layout="leaf"),
    ]
    return [Case(batch.name, partial(judge_gather, batch=batch)) for batch in batches]


def judge_scatter(bench: Bench, batch: Batch) -> Fault | None:
    devices = bench.devices(batch.order)
    tensor = batch.tensor().to(devices[0])  # type: ignore[arg-type]
    tensor.requires_grad_(batch.layout == "leaf")
    host = batch.tensor()
    with bench.traffic() as traffic:
        pieces = bench.call(bench.solution, tensor, devices)
    count = len(devices)
    if not isinstance(pieces, (list, tuple)) or not all(isinstance(one, torch.Tensor) for one in pieces):
        return Fault("values", f"{_kind(pieces)} was returned", f"a list of {count} tensors, one per device")
    if len(pieces) != count:
        said = f"{len(pieces)} piece{'s' * (len(pieces) != 1)} for {count} devices"
        look = "torch.chunk may give fewer pieces than asked for" if len(pieces) < count else ""
        look = _BY_SIZE if _cut_by_size(list(map(len, pieces)), count) else look
        return Fault("values", said, "one piece per device; a piece may be empty", look)
    for place, piece in enumerate(pieces):
        wrong = _shape_or_place(bench, f"piece {place}", piece, batch, batch.order[place])
        if wrong:
            return wrong
    rows = [_rows(piece) for piece in pieces]
    if [one for part in rows for one in part] != list(range(batch.rows)) or not _same(pieces, host):
        return _misplaced(rows, batch)
    sizes = [len(piece) for piece in pieces]
    most = -(-batch.rows // count)
    if max(sizes) > most:
        expected = f"no piece of more than {most} rows: {batch.rows} / {count}, rounded up"
        return Fault("values", f"the pieces have {_listed(sizes)} rows", expected)
    if not torch.equal(_off(tensor), host):
        return Fault("values", "the tensor that was handed in has changed", "pieces of it, and the tensor as it was")
    return _scatter_traffic(bench, batch, sizes, traffic)


def _scatter_traffic(bench: Bench, batch: Batch, sizes: list[int], traffic: list[RankTraffic]) -> Fault | None:
    row = batch.tensor()[:1].nbytes
    want = {index: size * row for index, size in zip(batch.order, sizes, strict=True)}
    want[batch.order[0]] = 0
    hint = "cut first, then move each piece, and nothing but the piece, straight to its device"
    for index, one in enumerate(traffic):
        if one.received != want.get(index, 0):
            said = f"device {index} received {one.received:,.0f} bytes"
            return Fault("bytes", said, f"{want.get(index, 0):,}: its piece", hint)
    sent = sum(want.values())
    bench.facts.setdefault("sent", []).append(sent)
    return None


def judge_gather(bench: Bench, batch: Batch) -> Fault | None:
    devices = bench.devices(batch.order)
    host = batch.tensor()
    pieces = [
        part.clone().to(device)
        for part, device in zip(host.split(list(batch.sizes)), devices, strict=True)  # type: ignore[arg-type]
    ]
    for piece in pieces:
        piece.requires_grad_(batch.layout == "leaf")
    with bench.traffic() as traffic:
        whole = bench.call(bench.solution, list(pieces), bench.all_devices[batch.target])
    if not isinstance(whole, torch.Tensor):
        return Fault("values", f"{_kind(whole)} was returned", "one tensor, the pieces one after the other")
    wrong = _shape_or_place(bench, "the result", whole, batch, batch.target)
    if wrong:
        return wrong
    if len(whole) != batch.rows:
        return Fault("values", f"the result has {len(whole)} rows", f"{batch.rows}: all pieces, one after the other")
    if not torch.equal(_off(whole), host):
        return _misplaced([_rows(whole)], batch)
    for piece, part in zip(pieces, host.split(list(batch.sizes)), strict=True):
        if not torch.equal(_off(piece), part):
            return Fault("values", "a piece that was handed in has changed", "the pieces as they were")
    nbytes = dict.fromkeys(range(len(traffic)), 0)
    nbytes |= {index: piece.nbytes for index, piece in zip(batch.order, pieces, strict=True)}
    expected = sum(nbytes.values()) - nbytes[batch.target]
    for index, one in enumerate(traffic):
        want = 0 if index == batch.target else nbytes[index]
        if one.sent != want or (index != batch.target and one.received):
            said = f"device {index} sent {one.sent:,.0f} and received {one.received:,.0f} bytes"
            want_said = f"it sends {want:,} bytes, its piece, straight to device {batch.target}, and receives nothing"
            return Fault("bytes", said, want_said if want else "it has nothing to send")
    bench.facts.setdefault("sent", []).append(expected)
    return None


def _shape_or_place(bench: Bench, name: str, piece: torch.Tensor, batch: Batch, index: int) -> Fault | None:
    if piece.dtype != DTYPES[batch.dtype]:
        now = str(piece.dtype).removeprefix("torch.")
        return Fault("values", f"{name} is {now}", f"{batch.dtype}, as handed in")
    if piece.dim() != 1 + len(batch.width) or tuple(piece.shape[1:]) != batch.width:
        said = f"{name} has the shape {tuple(piece.shape)}"
        return Fault("values", said, f"rows of the shape {batch.width}; only dimension 0 is cut or joined")
    found = bench.index_of(piece)
    if found != index:
        where = "on the host" if found is None else f"on device {found}"
        return Fault("device", f"{name} lives {where}", f"on device {index}", "move(tensor, device) takes it there")
    return None


def _misplaced(rows: Sequence[list[int]], batch: Batch) -> Fault:
    """Says which rows are lost, doubled or out of order; in scatter, `rows` has a list per piece."""
    flat = [row for part in rows for row in part]
    lost = sorted(set(range(batch.rows)) - set(flat))
    doubled = sorted({row for row in flat if flat.count(row) > 1 and row in range(batch.rows)})
    if lost:
        said = f"row{'s' * (len(lost) > 1)} {_listed(lost)} of {batch.rows} {'are' if len(lost) > 1 else 'is'} lost"
        tail = len(rows) > 1 and lost == list(range(batch.rows - len(lost), batch.rows))
        look = "the remainder when N does not divide the rows" if tail and batch.rows % len(rows) else ""
        look = _BY_SIZE if tail and _cut_by_size(list(map(len, rows)), len(batch.order)) else look
        return Fault("values", said, "every row once, in order", look)
    if doubled:
        return Fault("values", f"row {doubled[0]} is there {flat.count(doubled[0])} times", "every row once, in order")
    if flat != list(range(batch.rows)):
        shown = "; ".join(_listed(part) for part in rows)
        return Fault("values", f"the rows come as {shown}", "every row once, in order")
    return Fault("values", "the rows are in place, but their numbers have changed", "every row as it was")


_BY_SIZE = "the second argument of torch.split is the number of rows in a piece, not the number of pieces"


def _cut_by_size(sizes: list[int], count: int) -> bool:
    """Whether N was taken for the size of a piece: N rows each, the last one what is left."""
    return bool(sizes) and count > 1 and all(size == count for size in sizes[:-1]) and 0 < sizes[-1] <= count


def _rows(piece: torch.Tensor) -> list[int]:
    """Which rows these are, by their first number; -1 for what is none."""
    first: Any = _off(piece).reshape(len(piece), -1)[:, 0] if piece.numel() else []
    return [int(value) - 1 if value == value and 0 < value <= 100 else -1 for value in map(float, first)]


def _same(pieces: Sequence[torch.Tensor], host: torch.Tensor) -> bool:
    return torch.equal(torch.cat([_off(piece) for piece in pieces]), host)


def _off(tensor: torch.Tensor) -> torch.Tensor:
    """The values on the host; no transfer between devices."""
    return torch.from_numpy(tensor.detach().numpy().copy())


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) or "none"
    return shown + (", ..." if len(numbers) > 8 else "")


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
