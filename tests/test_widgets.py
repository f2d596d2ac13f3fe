"""Pictures, forms and tables, without a browser (test_browser.py has one)."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest

from ring_simulator import WRONG, gather_only, reduce_to_one, scatter_only, simulate, strange_messages
from shardlab.errors import UsageError
from shardlab.records import RingStep, RingTrace
from shardlab.widgets import show
from shardlab.widgets.colours import FILLS, contrast, rank_look, state_of, text_on
from shardlab.widgets.predict import Prediction
from shardlab.widgets.ring_frames import frame_data, frames_of
from shardlab.widgets.ring_stepper import RingStepper
from shardlab.widgets.ring_svg import ring_svg
from shardlab.widgets.saved import VIEW, without_views

ALL_TRACES = [simulate(n) for n in (1, 2, 3, 4, 5, 8, 16)]
ALL_TRACES += [simulate(4, wrong=wrong) for wrong in WRONG] + [simulate(8, wrong="gather_adds")]
ALL_TRACES += [reduce_to_one(4), strange_messages(), gather_only(4), scatter_only(4, off_by_one=True)]


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
        "Step 2 of 6, reduce-scatter: rank 0 sends chunk 2 (1.05 MB) to rank 1; "
        "rank 1 sends chunk 3 (1.05 MB) to rank 2;"
    )
    assert frames[6].caption.endswith("16 of 16 chunks are complete.")


def test_bytes_sent_are_summed_over_the_steps():
    frames = frames_of(simulate(4, chunk_bytes=1000))
    assert frames[0].sent == ("0 B",) * 4
    assert frames[6].sent == ("6.00 kB",) * 4


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


def test_what_is_not_where_it_belongs_in_the_end_is_called_wrong():
    right, wrong = frames_of(scatter_only(4)), frames_of(scatter_only(4, off_by_one=True))
    assert [frame.wrong for frame in right] == [0, 0, 0, 0]
    assert [frame.wrong for frame in wrong] == [0, 0, 0, 4]
    assert wrong[-1].complete == 4
    assert "Wrong: chunk 0 on rank 0 is not complete; chunk 1 on rank 1" in wrong[-1].caption
    few = frames_of(simulate(4, wrong="too_few_steps"))
    assert few[-1].wrong == 16 and few[-2].wrong == 0
    assert ">!</tspan>" in ring_svg(scatter_only(4, off_by_one=True))


def test_chunks_without_elements_are_not_missing():
    start = ((1, 0), (0, 0)), ((0, 1), (0, 0))
    end = ((1, 1), (0, 0)), ((1, 1), (0, 0))
    frames = frames_of(RingTrace(2, (RingStep((), start), RingStep((), end))))
    assert [frame.wrong for frame in frames] == [0, 0]


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
    said = "ring all-reduce on 4 ranks: 4 ranks, 6 steps; at the end 16 of 16 chunks complete"
    assert data["text/plain"] == f"{said}. Run the cell to step through it"
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
