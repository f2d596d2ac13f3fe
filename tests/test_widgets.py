"""Pictures, forms and tables, without a browser (test_browser.py has one)."""

from __future__ import annotations

import importlib
import json
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import pytest

from ring_simulator import WRONG, gather_only, reduce_to_one, simulate, strange_messages
from shardlab.errors import UsageError
from shardlab.records import Call, RingTrace, Run
from shardlab.widgets import predict, show, table
from shardlab.widgets.colours import FILLS, contrast, rank_look, state_of, text_on
from shardlab.widgets.predict import Comparison, Prediction
from shardlab.widgets.ring_frames import frame_data, frames_of
from shardlab.widgets.ring_stepper import RingStepper
from shardlab.widgets.ring_svg import ring_svg
from shardlab.widgets.saved import VIEW, without_views
from shardlab.widgets.units import bytes_text, number_text, parse_number

ALL_TRACES = [simulate(n) for n in (1, 2, 3, 4, 5, 8, 16)]
ALL_TRACES += [simulate(4, wrong=wrong) for wrong in WRONG]
ALL_TRACES += [simulate(8, wrong="gather_adds"), reduce_to_one(4), strange_messages(), gather_only(4)]


# Colours


def test_text_is_readable_on_every_rank_colour():
    for rank in range(32):
        look = rank_look(rank)
        assert contrast(look.text, look.fill) >= 4.5


def test_contrast_is_the_published_one():
    assert contrast("#000000", "#FFFFFF") == pytest.approx(21)
    assert contrast("#777777", "#FFFFFF") == pytest.approx(4.48, abs=0.01)  # the well-known grey that just fails
    assert text_on("#F0E442") == "#000000"


def test_32_ranks_look_different():
    looks = {(rank_look(rank).fill, rank_look(rank).pattern) for rank in range(32)}
    assert len(looks) == 32
    assert {look[0] for look in looks} == set(FILLS)


@pytest.mark.parametrize(
    ("counts", "name"),
    [
        ((1, 1), "complete"),
        ((1, 0), "partial"),
        ((2, 1), "repeated"),
        ((-1, 1), "repeated"),
        (None, "garbage"),
        ((0, 0), "garbage"),
    ],
)
def test_state_of_a_chunk(counts, name):
    assert state_of(counts).name == name


# Frames


def test_caption_says_who_sends_what_to_whom():
    frames = frames_of(simulate(4))
    assert frames[0].caption == (
        "Before the first message: every rank has its own data in every chunk. 0 of 16 chunks are complete."
    )
    assert frames[2].caption.startswith(
        "Step 2 of 6, reduce-scatter: rank 0 sends chunk 2 (1.0 MB) to rank 1; rank 1 sends chunk 3 (1.0 MB) to rank 2;"
    )
    assert frames[6].caption.endswith("16 of 16 chunks are complete.")


def test_bytes_sent_are_summed_over_the_steps():
    frames = frames_of(simulate(4, chunk_bytes=1000))
    assert frames[0].sent == ("0 B",) * 4
    assert frames[6].sent == ("6.0 kB",) * 4


def test_a_wrong_run_is_called_wrong():
    last = frames_of(simulate(4, wrong="gather_adds"))[-1]
    assert last.wrong > 0
    assert "Wrong: chunk" in last.caption and "data 2 times" in last.caption
    assert frames_of(simulate(4, wrong="garbage"))[-1].wrong > 0
    assert "is garbage" in frames_of(simulate(4, wrong="garbage"))[1].caption
    few = frames_of(simulate(4, wrong="too_few_steps"))[-1]
    assert few.complete < 16


def test_what_is_not_filled_yet_is_not_called_wrong():
    frames = frames_of(gather_only(3))
    assert [cell.state for cell in frames[0].cells[0]] == ["complete", "unfilled", "unfilled"]
    assert [frame.wrong for frame in frames] == [0, 0, 0]
    assert [frame.complete for frame in frames] == [3, 6, 9]
    assert "Wrong" not in frames[0].caption


def test_only_cells_that_changed_are_marked():
    frames = frames_of(simulate(4))
    assert not any(cell.changed for row in frames[0].cells for cell in row)
    assert [cell.changed for cell in frames[1].cells[1]] == [False, False, False, True]


@pytest.mark.parametrize("trace", ALL_TRACES, ids=lambda trace: trace.title)
def test_frames_are_small_plain_data(trace):
    text = json.dumps([frame_data(frame) for frame in frames_of(trace)])
    assert json.loads(text)
    if trace.world_size <= 8:
        assert len(text) < 100_000


def test_traces_that_cannot_be_drawn_are_refused():
    with pytest.raises(UsageError, match="no steps"):
        show(RingTrace(2, ()))
    with pytest.raises(UsageError, match="readable for 1 to 16"):
        show(simulate(17))
    good = simulate(3)
    with pytest.raises(UsageError, match="expected 4 ranks"):
        show(RingTrace(4, good.steps))


# The static picture


@pytest.mark.parametrize("trace", ALL_TRACES, ids=lambda trace: trace.title)
def test_static_picture_survives_sanitizers_and_is_small(trace):
    picture = ring_svg(trace)
    assert len(picture.encode()) < 40_000
    root = ElementTree.fromstring(picture)
    tags = {node.tag.partition("}")[2] for node in root.iter()}
    assert tags <= {"svg", "rect", "path", "text", "tspan"}
    attributes = {name for node in root.iter() for name in node.attrib}
    assert not attributes & {"style", "class", "id", "href"}


def test_static_picture_shows_what_is_wrong():
    assert "×2" in ring_svg(simulate(4, wrong="gather_adds"))
    assert ">?</tspan>" in ring_svg(simulate(4, wrong="garbage"))
    assert "×2" not in ring_svg(simulate(4))


# The live widget


def test_stepper_step_stays_within_the_run():
    stepper = show(simulate(4))
    assert isinstance(stepper, RingStepper)
    stepper.step = 3
    assert stepper.caption.startswith("Step 3 of 6")
    stepper.step = 99
    assert stepper.step == 6
    stepper.step = -1
    assert stepper.step == 0


def test_stepper_carries_a_live_view_a_page_and_a_picture():
    first, second = (show(simulate(4)).__class__(simulate(4)) for _ in range(2))
    data, _ = first._repr_mimebundle_()
    assert list(data)[0] in (VIEW, "text/plain")
    assert {VIEW, "text/html", "image/svg+xml", "text/plain"} <= set(data)
    assert data["text/plain"] == ("ring all-reduce on 4 ranks: 4 ranks, 6 steps; at the end 16 of 16 chunks complete")
    assert "http://www.w3.org" in data["text/html"]  # the SVG namespace, and no other address
    assert data["text/html"].replace("http://www.w3.org/2000/svg", "").count("http") == 0
    assert len(data["text/html"]) < 100_000
    assert second._repr_mimebundle_()[0]["text/html"] == data["text/html"]


def test_text_of_a_widget_cannot_end_its_script():
    trace = simulate(2)
    evil = RingTrace(2, trace.steps, "</script><b>")
    html = RingStepper(evil)._repr_mimebundle_()[0]["text/html"]
    assert html.count("</script>") == 1


@pytest.mark.parametrize("scripts", [False, True])
def test_saved_notebook_keeps_what_can_be_shown_without_a_kernel(scripts):
    data, _ = show(simulate(2))._repr_mimebundle_()
    slider = {VIEW: {"model_id": "x"}, "text/plain": "IntSlider()"}
    form = Prediction("saved?")._repr_mimebundle_()[0]
    cells = [
        {"cell_type": "markdown", "source": ""},
        {"cell_type": "code", "outputs": [{"data": data}, {"data": slider}, {"name": "stdout"}, {"data": form}]},
    ]
    notebook = without_views({"cells": cells, "metadata": {"widgets": {}}}, scripts=scripts)
    assert set(data) == {"text/plain", "image/svg+xml"} | ({"text/html"} if scripts else set())
    assert VIEW in slider
    assert set(form) == {"text/plain", "text/html"}
    assert "widgets" not in notebook["metadata"]


# show


def _send(rank: int, index: int, peer: int, size: int) -> Call:
    return Call(rank, index, "send", peer, size // 4, "float32", size, 0, 0.0)


def _receive(rank: int, index: int, peer: int, size: int) -> Call:
    return Call(rank, index, "recv", peer, size // 4, "float32", 0, size, 0.0)


def ring_run(world_size: int) -> Run:
    calls = [
        [_send(r, 0, (r + 1) % world_size, 3000), _receive(r, 1, (r - 1) % world_size, 3000)] for r in range(world_size)
    ]
    return Run(world_size, "cpu", "gloo", 0.1, [None] * world_size, calls)


def test_show_draws_a_run():
    from matplotlib import pyplot

    figure = show(ring_run(4))
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts.count("3.0 kB") == 4 and len(texts) == 16
    assert pyplot.get_fignums() == []  # or a notebook shows the figure twice
    figure.canvas.draw()


def test_show_tells_of_bytes_that_are_not_on_the_map():
    run = ring_run(2)
    run.calls[0].append(Call(0, 2, "all_reduce", None, 1000, "float32", 4000.0, 4000.0, 0.0))
    assert "4.0 kB of library collectives" in show(run).axes[0].get_title()


@pytest.mark.parametrize("record", [None, 3, "run", RingTrace, [1]])
def test_show_says_what_it_can_draw(record):
    with pytest.raises(UsageError, match="It draws: RingTrace, Run"):
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


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (512, "512 B"), (0.5, "0.5 B"), (1000, "1.0 kB"), (3_145_728, "3.1 MB"), (999_960, "1.0 MB"),
     (120e9, "120.0 GB"), (2e12, "2.0 TB"), (999.96, "1000.0 B")],
)  # fmt: skip
def test_bytes_for_people(size, text):
    assert bytes_text(size) == text


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
    assert reading.value == "= 3,145,728 bytes (3.1 MB)"
    prediction.field.value = "M"
    assert "names you can use: N" in reading.value and prediction.value is None
    assert prediction.form.children[0].value == "<b>Predict:</b> understood? [bytes]; you can use N = 4"


def test_comparison_without_a_prediction_is_no_error():
    comparison = Prediction("nobody typed", "bytes").compare(6_291_456)
    assert repr(comparison).splitlines() == [
        "nobody typed",
        "prediction     measured                  ratio",
        "-------------  ------------------------  -----",
        "no prediction  6,291,456 bytes (6.3 MB)  -",
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
