"""The picture of who owns what."""

from __future__ import annotations

import pytest
from matplotlib.colors import to_hex

from shardlab.errors import UsageError
from shardlab.widgets.colours import rank_look
from shardlab.widgets.owners import owners

SIZES, NAMES = (60, 40), ("first", "second")
CUT = [[(0, 0, 50)], [(0, 50, 60), (1, 0, 40)]]


def stretches(axes) -> list[tuple[float, float, str]]:
    """Begin, length and colour of all that is filled."""
    bars = [bar for bar in axes.patches if bar.get_fill()]
    return [(bar.get_x(), bar.get_width(), to_hex(bar.get_facecolor()).upper()) for bar in bars]


def test_each_rank_owns_its_stretch_in_its_colour():
    (axes,) = owners({"cut": CUT}, SIZES, NAMES).figure.axes
    assert stretches(axes) == [(0, 50, rank_look(0).fill), (50, 50, rank_look(1).fill)]
    assert [text.get_text() for text in axes.texts] == ["0", "1", "first", "second"]


def test_a_strip_per_partition():
    whole = [[(0, 0, 60)], [(1, 0, 40)]]
    (axes,) = owners({"whole": whole, "cut": CUT}, SIZES, NAMES, title="who").figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["whole", "cut"]
    assert [begin for begin, _, _ in stretches(axes)] == [0, 60, 0, 50]
    assert axes.get_title() == "who"


def test_what_nobody_owns_is_not_filled():
    (axes,) = owners({"cut": [[(0, 0, 10)], []]}, SIZES, NAMES).figure.axes
    assert stretches(axes) == [(0, 10, rank_look(0).fill)]


@pytest.mark.parametrize(("partitions", "sizes"), [({}, SIZES), ({"cut": CUT}, (60,)), ({"none": [[]]}, (0, 0))])
def test_nothing_to_draw(partitions, sizes):
    with pytest.raises(UsageError, match="owners"):
        owners(partitions, sizes, NAMES)
