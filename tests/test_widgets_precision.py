"""Pictures of lab 01: exponents of numbers, the scale over steps, a chart as an SVG that stays the same."""

from __future__ import annotations

import base64
import math
import xml.etree.ElementTree as ElementTree

import pytest

from shardlab.errors import UsageError
from shardlab.widgets.exponents import HIGHEST, LOWEST, counts, exponents
from shardlab.widgets.scales import scale_steps
from shardlab.widgets.state_bars import state_bars
from shardlab.widgets.svg import as_svg


def test_counts_by_power_of_two() -> None:
    shares = counts([1.0, -1.5, 2.0, 0.0, 2.0**-24])
    assert shares == {-24: 0.25, 0: 0.5, 1: 0.25}


def test_what_is_beyond_the_panel_is_at_its_edge() -> None:
    assert counts([1e-300, math.inf, -math.inf, math.nan, 1e300]) == {LOWEST: 0.2, HIGHEST: 0.8}


def test_a_panel_for_each_group() -> None:
    figure = exponents({"small": [2.0**-20], "scaled": [2.0**-4, 2.0**-3]})
    assert [axes.get_title() for axes in figure.axes] == ["small", "scaled"]
    assert [len(axes.patches) - 4 for axes in figure.axes] == [1, 2]  # four bands in each, and a bar per exponent


@pytest.mark.parametrize("groups", [{}, {"empty": []}])
def test_nothing_to_draw(groups: dict) -> None:
    with pytest.raises(UsageError, match="nothing to draw"):
        exponents(groups)


def test_only_zeros_are_no_reason_to_fail() -> None:
    assert counts([0.0, 0.0]) == {}
    exponents({"zeros": [0.0]})


def test_skipped_and_grown_steps_are_marked() -> None:
    figure = scale_steps([8.0, 4.0, 4.0, 8.0], [False, True, True, True])
    marks = {line.get_label(): list(line.get_xdata()) for line in figure.axes[0].lines}
    assert marks["step made"] == [1, 2, 3]
    assert marks["overflow: skipped"] == [0]
    assert marks["grown: doubled"] == [3]


@pytest.mark.parametrize("arguments", [([], []), ([1.0], [])])
def test_as_many_scales_as_steps(arguments: tuple) -> None:
    with pytest.raises(UsageError, match="as many"):
        scale_steps(*arguments)


def bars():
    return state_bars({"a": {"weights": 4.0, "gradients": 4.0}}, predicted={"a": 8.0})


def test_the_same_chart_is_the_same_svg() -> None:
    first, second = as_svg(bars(), "two bars"), as_svg(bars(), "two bars")
    assert first == second
    assert "date" not in first.svg.lower()


def test_an_svg_has_words_a_title_and_pixels_beside_it() -> None:
    bundle = as_svg(bars(), "two bars")._repr_mimebundle_()
    root = ElementTree.fromstring(bundle["image/svg+xml"])
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "bytes held" in words
    assert root.findtext("{http://www.w3.org/2000/svg}title") == "two bars" == bundle["text/plain"]
    assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG")
