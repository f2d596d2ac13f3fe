"""Curves over steps and stacked bars of model states."""

from __future__ import annotations

import pytest

from shardlab.errors import UsageError
from shardlab.widgets.colours import KINDS, contrast
from shardlab.widgets.curves import curves
from shardlab.widgets.state_bars import state_bars

STATES = {"weights": 200.0, "gradients": 200.0, "master weights": 400.0, "first moment": 400.0, "second moment": 400.0}


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_a_curve_per_name_that_differ_without_colour():
    figure = curves({"fp32": [3.0, 2.0, 1.0], "fp16": [3.0, 2.1]}, ylabel="loss", title="both")
    (axes,) = figure.axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[3.0, 2.0, 1.0], [3.0, 2.1]]
    assert len({(line.get_linestyle(), line.get_marker()) for line in axes.lines}) == 2
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["fp32", "fp16"]
    assert axes.get_ylabel() == "loss" and axes.get_xlabel() == "step"


def test_what_is_exactly_equal_stays_on_a_logarithmic_picture():
    (axes,) = curves({"drift": [0.0, 1e-12, 1e-3]}, ylabel="difference", log=True, floor=1e-9).figure.axes
    assert list(axes.lines[0].get_ydata()) == [1e-9, 1e-9, 1e-3]
    assert axes.get_yscale() == "log"
    assert texts(axes) == ["0 to 1e-09"]


@pytest.mark.parametrize("series", [{}, {"a": []}])
def test_no_curve_to_draw(series):
    with pytest.raises(UsageError, match="nothing to draw"):
        curves(series, ylabel="loss")


def test_bars_are_stacked_and_labelled():
    (axes,) = state_bars({"device 0": STATES, "device 1": {"weights": 200.0}}, predicted={"device 0": 1600.0}).axes
    bottoms = [(patch.get_y(), patch.get_height()) for patch in axes.patches]
    assert bottoms == [(0, 200), (200, 200), (400, 400), (800, 400), (1200, 400), (0, 200)]
    assert texts(axes) == ["W 200 B", "G 200 B", "M 400 B", "m 400 B", "v 400 B", "W 200 B"]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels[-1] == "formula" and labels[-2] == "W: weights"


def test_a_piece_too_thin_for_a_number_has_none():
    (axes,) = state_bars({"device 0": {"weights": 10.0, "other": 990.0}}).axes
    assert texts(axes) == ["? 990 B"]


@pytest.mark.parametrize("bars", [{}, {"device 0": {"activations": 1.0}}])
def test_kinds_are_the_known_ones(bars):
    with pytest.raises(UsageError, match="there are weights, gradients"):
        state_bars(bars)


def test_kinds_differ_without_colour_and_can_be_read():
    assert len({(kind.sign, kind.hatch) for kind in KINDS.values()}) == len(KINDS)
    for kind in KINDS.values():
        assert contrast(kind.text, kind.fill) >= 4.5


def test_long_names_go_on_in_a_second_line():
    (axes,) = state_bars({"float32, AdamW": STATES, "float16, your engine": STATES}).axes
    names = [label.get_text() for label in axes.get_xticklabels()]
    assert names == ["float32,\nAdamW", "float16, your\nengine"]
