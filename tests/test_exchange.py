"""Collectives as records and as pictures: what is promised, what a real run shows, and that a wrong one looks wrong."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist

from shardlab import show, trace_collective
from shardlab.errors import UsageError
from shardlab.exchange import NOTHING, OPERATIONS, Exchange, alone, given, in_short, promised


def parts_of(mine: torch.Tensor) -> list[torch.Tensor]:
    return [torch.empty_like(mine) for _ in range(dist.get_world_size())]


def broadcast(mine):
    dist.broadcast(mine, 1)
    return mine


def reduce(mine):
    dist.reduce(mine, 1)
    return mine


def all_reduce(mine):
    dist.all_reduce(mine)
    return mine


def gather(mine):
    parts = parts_of(mine) if dist.get_rank() == 1 else None
    dist.gather(mine, parts, 1)
    return parts


def scatter(mine):
    received = mine.new_empty(1)
    dist.scatter(received, list(mine.split(1)) if dist.get_rank() == 1 else None, 1)
    return received


def all_gather(mine):
    parts = parts_of(mine)
    dist.all_gather(parts, mine)
    return parts


def reduce_scatter(mine):
    received = mine.new_empty(1)
    dist.reduce_scatter(received, list(mine.split(1)))
    return received


REAL = (broadcast, reduce, all_reduce, gather, scatter, all_gather, reduce_scatter)


@pytest.mark.parametrize("fn", REAL, ids=lambda fn: fn.__name__)
def test_the_library_does_what_is_promised(fn) -> None:
    exchange = trace_collective(fn, fn.__name__, 3, root=1)
    assert exchange.before == given(fn.__name__, 3, 1)
    assert exchange.wrong == []
    for after, wanted in zip(exchange.after, exchange.promised, strict=True):
        assert all(want in (NOTHING, cell) for cell, want in zip(after, wanted, strict=True))
    assert "as promised" in repr(show(exchange))


def test_what_is_promised_with_two_ranks() -> None:
    first, second, both = (1, 0), (0, 1), (1, 1)
    assert promised("broadcast", 2, 1) == ((second, second), (second, second))
    assert promised("all_reduce", 2) == ((both, both), (both, both))
    assert promised("reduce", 2, 0) == ((both, both), (NOTHING, NOTHING))
    assert promised("gather", 2, 1) == ((NOTHING, NOTHING), (first, second))
    assert promised("scatter", 2, 1) == ((second, NOTHING), (NOTHING, second))
    assert promised("all_gather", 2) == ((first, second), (first, second))
    assert promised("reduce_scatter", 2) == ((both, NOTHING), (NOTHING, both))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_with_one_rank_nothing_has_to_move(operation: str) -> None:
    assert given(operation, 1) == promised(operation, 1) == ((alone(0, 1),),)


def shifted(mine):
    dist.all_reduce(mine)
    return mine[(dist.get_rank() + 1) % 3]


def test_a_piece_in_the_wrong_place_looks_wrong() -> None:
    """Rank r ends with piece r + 1: complete, and not where it should be."""
    exchange = trace_collective(shifted, "reduce_scatter", 3)
    assert exchange.wrong == [(0, 0), (1, 1), (2, 2)]
    assert exchange.after[0] == (NOTHING, (1, 1, 1), NOTHING)
    picture = show(exchange)._repr_svg_()
    assert picture.count(">!</tspan>") == 3
    assert "wrong: piece 0 on rank 0 is -, not all" in picture
    assert "wrong: piece 0 on rank 0 is -, not all" in repr(show(exchange))


def added_twice(mine):
    dist.all_reduce(mine)
    return [mine[:1], 2 * mine[1:2], mine[2:] + 0.5]


def test_what_counts_twice_and_what_is_no_sum() -> None:
    exchange = trace_collective(added_twice, "all_reduce", 3)
    assert exchange.after[1] == ((1, 1, 1), (2, 2, 2), None)
    picture = show(exchange)._repr_svg_()
    assert picture.count("×2</tspan>") == picture.count(">?</tspan>") == 3


def test_numbers_in_the_wrong_order_are_something_else() -> None:
    def turned_round(mine):
        return all_gather(mine)[::-1]

    exchange = trace_collective(turned_round, "all_gather", 3)
    assert exchange.after[0] == (None, alone(1, 3), None)


def test_nothing_and_nonsense_are_recorded_too() -> None:
    assert trace_collective(lambda mine: None, "all_gather", 2).after == ((NOTHING,) * 2,) * 2
    assert trace_collective(lambda mine: "text", "all_reduce", 2).after == ((NOTHING,) * 2,) * 2
    assert trace_collective(lambda mine: torch.tensor(-1.0), "scatter", 2).after == ((None, NOTHING), (NOTHING, None))


def test_other_arguments_are_explained() -> None:
    for arguments in (("all-reduce", 2), ("all_reduce", 13)):
        with pytest.raises(UsageError):
            trace_collective(all_reduce, *arguments)
    with pytest.raises(UsageError, match="root is a rank, 0 to 1; got 2"):
        trace_collective(broadcast, "broadcast", 2, root=2)
    with pytest.raises(UsageError, match="needs a function"):
        trace_collective(None, "broadcast", 2)  # type: ignore[arg-type]


# The picture


def record(operation: str, n: int, root: int | None = None) -> Exchange:
    rows = given(operation, n, root or 0), promised(operation, n, root or 0)
    return Exchange(operation, n, root, *rows, "a < b: & more")


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("n", [1, 2, 5, 12])
def test_every_picture_is_plain_svg(operation: str, n: int) -> None:
    text = show(record(operation, n))._repr_svg_()
    root = ElementTree.fromstring(text)
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for shape in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(shape.get("x", 0)) + float(shape.get("width", 0)) <= width
        assert float(shape.get("y", 0)) + float(shape.get("height", 0)) <= height
    assert all(word not in text for word in ("<style", "<script", " id=", "url("))
    assert len(text) < 40_000
    assert ">!<" not in text


def test_cells_in_letters() -> None:
    cells = [(), (0, 0), (0, 1), (1, 1), (2, 1), None]
    assert [in_short(cell) for cell in cells] == ["-", "-", "1", "all", "2×0+1", "?"]


def test_a_record_that_cannot_be_drawn() -> None:
    with pytest.raises(UsageError, match="13 ranks"):
        show(record("broadcast", 13))
    with pytest.raises(UsageError, match="rows"):
        show(replace(record("broadcast", 3), after=((),)))
