"""Pictures of timelines, without a browser (test_browser_timeline.py has one)."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from shardlab.errors import UsageError
from shardlab.timeline import RankTimeline, Timeline, timeline_of
from shardlab.widgets import show
from shardlab.widgets.colours import SPANS, WRONG, contrast
from shardlab.widgets.saved import VIEW, without_views
from shardlab.widgets.timeline import TimelineView, compare
from shardlab.widgets.timeline_data import timeline_data
from shardlab.widgets.timeline_ink import tick_text, ticks
from shardlab.widgets.timeline_svg import LEFT, RIGHT, WIDTH, comparison_svg, timeline_svg, verdict
from timelines import call, checkpointed, run_of, simulated

MANY = 30  # layers: 60 spans of compute and 30 reductions a rank
ALL = [simulated(n, how=how) for n in (1, 2, 4, 8) for how in ("async", "blocking")]
ALL += [simulated(4, layers=MANY), simulated(4, layers=MANY, how="blocking"), simulated(2, layers=200, how="blocking")]


def named(timeline):
    return timeline.title


def words_of(picture):
    return [node.text for node in ElementTree.fromstring(picture).iter() if node.text]


@pytest.mark.parametrize("timeline", ALL, ids=named)
def test_static_picture_survives_sanitizers_and_is_small(timeline):
    picture = timeline_svg(timeline)
    assert len(picture.encode()) < 60_000
    root = ElementTree.fromstring(picture)
    assert {node.tag.partition("}")[2] for node in root.iter()} <= {"svg", "rect", "path", "text", "tspan"}
    assert not {name for node in root.iter() for name in node.attrib} & {"style", "class", "id", "href"}
    # Nothing lies outside the picture.
    for node in root.iter():
        for x in re.findall(r"M(-?[\d.]+) ", node.get("d", "")):
            assert 0 <= float(x) <= WIDTH


def test_static_picture_says_what_the_widget_says():
    words = words_of(timeline_svg(simulated(2)))
    assert words.count("F blocks.0") == 2  # both ranks
    assert "B blocks.1 →2" in words  # the bucket of its gradient
    assert {"rank 0", "rank 1", "2 exposed", "3 exposed"} & set(words) >= {"rank 0", "rank 1", "3 exposed"}
    assert {"communication, hidden", "communication, exposed", "waits"} <= set(words)
    assert sum(word.startswith("hidden ") for word in words) == 3  # the title, and each rank


def test_spans_within_spans_have_their_labels_beside_each_other():
    words = words_of(timeline_svg(checkpointed()))
    assert words.count("R blocks.0") == words.count("B blocks.0") == words.count("F blocks.0") == 2
    picture = timeline_svg(checkpointed())
    places = {word: float(x) for x, word in re.findall(r'<tspan x="([\d.]+)" y="[\d.]+">([BR] [^<]+)<', picture)}
    assert places["B blocks.0"] - places["R blocks.0"] > 80
    # What lies within is painted after what lies around it.
    fills = re.findall(r'fill="(#\w+)" stroke="#111111" stroke-width', picture)
    outer, inner = SPANS["other"].fill, SPANS["forward"].fill
    assert fills.index(outer) < len(fills) - 1 - fills[::-1].index(inner)


def test_a_wrong_ddp_looks_wrong():
    wrong, right = timeline_svg(simulated(2, how="blocking")), timeline_svg(simulated(2))
    assert words_of(wrong).count("hidden 0 %") == 2 and "hidden 0 %" not in right
    alarmed = f'fill="{WRONG}" text-anchor="start" font-weight="bold">hidden 0 %'
    assert wrong.count(alarmed) == 2
    assert wrong.count("exposed") > right.count("exposed")


def test_a_share_of_nearly_all_is_not_called_all():
    assert [verdict(share, 1.0) for share in (0, 0.001, 0.5, 0.999, 1)] == [
        "hidden 0 %",
        "hidden 1 %",
        "hidden 50 %",
        "hidden 99 %",
        "hidden 100 %",
    ]
    assert verdict(1.0, 0.0) == "nothing sent"


def test_without_a_link_the_picture_says_so():
    calls = [call(0, 0, 1.0, completed=3.0)]
    picture = timeline_svg(timeline_of(run_of([[("backward", "a", 0.0, 4.0)]], [calls])))
    assert "no link" in picture and "no link" not in timeline_svg(simulated(2))


def test_signs_are_readable_on_their_boxes():
    for look in SPANS.values():
        assert contrast("#000000", look.fill) >= 7
    assert len({look.sign for look in SPANS.values()}) == len(SPANS)
    assert contrast(WRONG, SPANS["exposed"].fill) >= 4.5


@pytest.mark.parametrize("end", [1e-6, 0.00123, 0.05, 0.0999, 1.0, 7.3, 900.0])
def test_ticks_are_round_and_few(end):
    times = ticks(end)
    assert 4 <= len(times) <= 11 and times[0] == 0 and times[-1] <= end * (1 + 1e-9)
    assert len({tick_text(time) for time in times}) == len(times)


def test_names_are_escaped():
    timeline = timeline_of(run_of([[("other", "a<b>&c", 0.0, 1.0)]], [[]]), title="</script><b>")
    assert "a<b>" not in timeline_svg(timeline) and "<b>" not in timeline_svg(timeline)
    html = TimelineView(timeline)._repr_mimebundle_()[0]["text/html"]
    assert html.count("</script>") == 1


# Several


def test_several_timelines_share_one_scale():
    timelines = {"blocking": simulated(2, how="blocking"), "in buckets": simulated(2, bucket=2), "async": simulated(2)}
    picture = comparison_svg(timelines)
    words = words_of(picture)
    assert set(timelines) <= set(words)
    # One millisecond is as long in each: the first layer of all rows is as wide.
    scale = (WIDTH - LEFT - RIGHT) / max(timeline.slowest.ended for timeline in timelines.values())
    widths = re.findall(r"M[\d.]+ [\d.]+h([\d.]+)v24", picture)
    assert widths.count(f"{scale * 1e-3:.1f}") == 3 * 4
    assert len(picture.encode()) < 60_000
    said = repr(compare(timelines)).splitlines()
    assert said[0].startswith("blocking: hidden 0 %, exposed 6.00 ms")
    assert len(said) == 3


def test_the_slowest_rank_is_compared_unless_another_is_asked_for():
    timelines = {"a": simulated(3, slow=1.0)}
    assert "the slowest rank" in comparison_svg(timelines)
    assert "step 15.5 ms" in repr(compare(timelines)) and "step 13.5 ms" in repr(compare(timelines, rank=0))


@pytest.mark.parametrize(
    ("timelines", "rank", "problem"),
    [
        ({}, None, "there is no timeline"),
        ({"a": 3}, None, "'a' is no Timeline"),
        ({"a": simulated(2)}, 2, "no rank 2 in a timeline of 2 ranks"),
        ({"a": Timeline(())}, None, "timeline of 0 ranks"),
    ],
)
def test_what_cannot_be_compared(timelines, rank, problem):
    with pytest.raises(UsageError, match=problem):
        compare(timelines, rank=rank)


# The widget


def test_a_timeline_carries_a_live_view_a_page_and_a_picture():
    view = show(simulated(4, layers=MANY))
    assert isinstance(view, TimelineView)
    data, _ = view._repr_mimebundle_()
    assert {VIEW, "text/html", "image/svg+xml", "text/plain"} <= set(data)
    assert data["text/plain"].startswith(f"async, 4 ranks, {MANY} layers: 4 ranks, hidden ")
    assert data["text/html"].replace("http://www.w3.org/2000/svg", "").count("http") == 0
    assert len(data["text/html"]) < 120_000
    again, _ = TimelineView(simulated(4, layers=MANY))._repr_mimebundle_()
    assert again["text/html"] == data["text/html"]
    cell = {"cell_type": "code", "outputs": [{"data": dict(data)}]}
    kept = without_views({"cells": [cell], "metadata": {}})["cells"][0]["outputs"][0]["data"]
    assert set(kept) == {"text/plain", "image/svg+xml"}


@pytest.mark.parametrize("timeline", ALL, ids=named)
def test_the_widgets_data_are_small_and_plain(timeline):
    data = timeline_data(timeline)
    assert json.loads(json.dumps(data)) == data
    spans = sum(len(rank["compute"]) + len(rank["link"]) for rank in data["ranks"])
    assert len(json.dumps(data, separators=(",", ":"))) < 1000 + 90 * spans
    for rank in data["ranks"]:
        for _, _, began, ended, _, _ in rank["compute"]:
            assert 0 <= began <= ended <= data["end"]


def test_a_timeline_without_ranks_is_refused():
    with pytest.raises(UsageError, match="no ranks"):
        show(Timeline(()))
    assert show(Timeline((RankTimeline(0),)))._repr_mimebundle_()[0]["image/svg+xml"]  # nothing happened on it
