"""Charts, numbers, predictions and tables, without a browser."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest

from ring_simulator import ring_run
from shardlab.errors import UsageError
from shardlab.records import Call, RingTrace, Run
from shardlab.widgets import predict, show, table
from shardlab.widgets.predict import Comparison, Prediction
from shardlab.widgets.saved import VIEW
from shardlab.widgets.units import number_text, parse_number

# show


def test_show_draws_a_run():
    from matplotlib import pyplot

    figure = show(ring_run(4))
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts.count("3.00 kB") == 4 and len(texts) == 16
    assert pyplot.get_fignums() == []  # or a notebook shows the figure twice
    figure.canvas.draw()


def test_show_tells_of_bytes_that_are_not_on_the_map():
    run = ring_run(2)
    run.calls[0].append(Call(0, 2, "all_reduce", None, 1000, "float32", 4000.0, 4000.0, 0.0))
    assert "4.00 kB of library collectives" in show(run).axes[0].get_title()


@pytest.mark.parametrize("record", [None, 3, "run", RingTrace, [1]])
def test_show_says_what_it_can_draw(record):
    with pytest.raises(UsageError, match="It draws: Exchange, RingTrace, Run, ShardMap, Timeline"):
        show(record)


def test_show_of_an_unmetered_run():
    with pytest.raises(UsageError, match="meter=True"):
        show(Run(2, "cpu", "gloo", 0.1, [None, None]))


# Charts


def test_charts_draw_and_close():
    from matplotlib import pyplot

    from shardlab.widgets import charts

    figures = [
        charts.bytes_per_rank([(2, [10.0, 10.0], 10.0), (4, 15, None)]),
        charts.alpha_beta_fit([(4, 1e-4), (4e6, 1e-2), (0, 0)], 1e-4, 2.5e-9),
        charts.alpha_beta_fit([(4, 1e-4)], 0.0, 0.0),
        charts.steps_against([1, 2, 3], {"N = 2": [2, 2, 2], "N = 4": [6, 6, 6]}, xlabel="parameters"),
    ]
    for figure in figures:
        figure.canvas.draw()
    assert pyplot.get_fignums() == []
    with pytest.raises(UsageError, match="has 1 values, expected 2"):
        charts.steps_against([1, 2], {"a": [1]}, xlabel="x")
    with pytest.raises(UsageError):
        charts.bytes_per_rank([])
    with pytest.raises(UsageError):
        charts.alpha_beta_fit([], 0, 0)


# Predictions that are no numbers


@pytest.mark.parametrize("typed", ["twenty", "4 GB or so", "1 2", "2 ** ", "(N"])
def test_what_could_not_be_read_is_said(typed):
    prediction = Prediction("how many things that cannot be read?", names={"N": 4})
    prediction.text = typed
    shown = prediction.compare(20)
    assert "could not be read" in shown.sentence and typed.strip() in shown.sentence
    assert "not a number" in repr(shown) and "no prediction" not in repr(shown).lower()
    for nothing in ("", "  "):
        prediction.text = nothing
        assert prediction.compare(20).sentence == "No prediction was made."


@pytest.mark.parametrize("typed", ["5 x 4", "5x4", "5 X 4", "N x 5", "5 x N", "(N+1) x N", "5 × 4"])
def test_a_times_sign_can_be_an_x(typed):
    assert parse_number(typed, {"N": 4}) == 20


def test_a_name_x_stays_a_name():
    assert parse_number("2 x + x", {"x": 3}) == 9


# Numbers


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3_145_728", 3145728),
        ("3,145,728", 3145728),
        ("3e6", 3_000_000),
        ("3 MB", 3_000_000),
        ("3MB", 3_000_000),
        ("3 MiB", 3 * 2**20),
        ("1.5 kB", 1500),
        ("12 bytes", 12),
        ("12 B", 12),
        ("3 M", 3_000_000),
        ("2*3/4*4e6", 6_000_000),
        ("2*(4-1)/4 * 4 MB", 6_000_000),
        ("2 × 3", 6),
        ("2**20", 2**20),
        ("-1", -1),
        ("0.1", 0.1),
        ("2*(N-1)/N*n", 1500),
        ("2(N-1)/N n", 1500),
        ("(N-1)n", 3000),
        ("3n", 3000),
        ("N n", 4000),
        ("n", 1000),
    ],
)
def test_numbers_people_type(text, value):
    assert parse_number(text, {"N": 4, "n": 1000}) == value


@pytest.mark.parametrize(
    "text",
    ["", "  ", "abc", "1 +", "__import__('os')", "(1).real", "[1]", "1/0", "2^3", "9**9**9", "1e400", "x", "3 XB",
     "1j", "True", "'3'", "lambda: 1", "(-8)**0.5", "1 if 1 else 2", "10**99", "(" * 500, "1,5"],
)  # fmt: skip
def test_what_is_no_number_is_refused_with_a_sentence(text):
    with pytest.raises(ValueError, match=r"\w+ \w+") as refused:
        parse_number(text)
    assert type(refused.value) is ValueError


def test_numbers_for_people():
    assert [number_text(v) for v in (3145728, 3.0, 2 / 3, 1e20)] == ["3,145,728", "3", "0.6667", "1e+20"]


# Predict, then measure


def test_a_prediction_is_kept_when_the_notebook_runs_again():
    first = predict("kept?", unit="bytes")
    assert first.value is None
    first.field.value = "3 MB"
    assert first.value == 3_000_000
    again = predict("kept?", unit="bytes")
    assert again.value == 3_000_000 and again.field.value == "3 MB"
    assert predict("another question").value is None


def test_the_form_says_how_it_understood():
    prediction = Prediction("understood?", "bytes", {"N": 4})
    reading = prediction.form.children[1].children[1]
    prediction.field.value = "3 MiB"
    assert reading.value == "= 3,145,728 bytes (3.15 MB)"
    prediction.field.value = "M"
    assert "names you can use: N" in reading.value and prediction.value is None
    assert prediction.form.children[0].value == "<b>Predict:</b> understood? [bytes]; you can use N = 4"


def test_comparison_without_a_prediction_is_no_error():
    comparison = Prediction("nobody typed", "bytes").compare(6_291_456)
    assert repr(comparison).splitlines() == [
        "nobody typed",
        "prediction     measured                   ratio",
        "-------------  -------------------------  -----",
        "no prediction  6,291,456 bytes (6.29 MB)  -",
        "No prediction was made.",
    ]
    assert "<table>" in comparison._repr_html_()


@pytest.mark.parametrize(
    ("predicted", "measured", "sentence"),
    [
        (4, 4, "Exactly as predicted."),
        (4.01, 4, "Within 1 %"),
        (8, 4, "2 times the measurement: less"),
        (2, 4, "The measurement is 2 times the prediction"),
        (-2, 4, "far from"),
        (2, 0, "far from"),
        (0, 0, "Exactly"),
        (0, 5, "far from"),
    ],
)
def test_comparison_in_a_sentence(predicted, measured, sentence):
    assert sentence in Comparison("?", "", predicted, measured).sentence


def test_a_prediction_is_shown_once_per_cell(monkeypatch):
    shown = []
    shell = SimpleNamespace(execution_count=1)
    module = importlib.import_module("shardlab.widgets.predict")
    monkeypatch.setattr(module, "_shell", lambda: shell)
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data))
    prediction = predict("shown?")
    prediction._ipython_display_()
    assert len(shown) == 1 and VIEW in shown[0] and shown[0]["text/plain"] == "Predict: shown?: no prediction"
    shell.execution_count = 2
    prediction._ipython_display_()
    assert len(shown) == 2


# Tables


def test_table_text_is_exact():
    rows = [
        {"N": 2, "predicted": 4_194_304, "measured": 4_194_304},
        {"N": 4, "predicted": 6291456, "measured": 6291456.5},
        {"N": 8, "predicted": None, "measured": 1},
    ]
    assert str(table(rows, title="bytes", equal=("predicted", "measured"))) == "\n".join(
        [
            "bytes",
            "N  predicted   measured  equal",
            "-  ---------  ---------  -----",
            "2  4,194,304  4,194,304  yes",
            "4  6,291,456  6.291e+06  NO",
            "8          -          1  -",
        ]
    )


def test_table_html_is_escaped():
    html = table([("<b>", 1)], ("name", "n"))._repr_html_()
    assert "<b>" not in html and "&lt;b&gt;" in html


def test_table_refuses_rows_that_do_not_fit():
    with pytest.raises(UsageError, match="has 1 values, expected 2"):
        table([(1,)], ("a", "b"))
    with pytest.raises(UsageError, match="no column 'c'"):
        table([(1, 2)], ("a", "b"), equal=("a", "c"))
    with pytest.raises(UsageError, match="say what the columns are"):
        table([])
