"""Pictures of shard maps, without a browser (test_browser_shard_map.py has one)."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from shardlab.errors import UsageError
from shardlab.widgets import show
from shardlab.widgets.colours import WRONG, rank_look
from shardlab.widgets.saved import VIEW, without_views
from shardlab.widgets.shard_map import ShardMapView
from shardlab.widgets.shard_map_data import shard_map_data
from shardlab.widgets.shard_map_svg import WIDTH, moments, shard_map_svg
from shardlab.widgets.shard_words import complaints, heading, percent, summary
from state_maps import zero2

ALL = [zero2(n, layers) for n in (1, 2, 4, 8) for layers in (1, 4, 12)]
ALL += [zero2(frees=False), zero2(owned=False), zero2(16, 2, 64)]


def words_of(picture):
    return [node.text for node in ElementTree.fromstring(picture).iter() if node.text]


@pytest.mark.parametrize("shards", ALL)
def test_static_picture_survives_sanitizers_and_is_small(shards):
    picture = shard_map_svg(shards)
    assert len(picture.encode()) < 130_000 and (shards.world_size > 4 or len(picture.encode()) < 60_000)
    root = ElementTree.fromstring(picture)
    assert {node.tag.partition("}")[2] for node in root.iter()} <= {"svg", "rect", "path", "text", "tspan"}
    assert not {name for node in root.iter() for name in node.attrib} & {"style", "class", "id", "href"}
    for node in root.iter():  # nothing lies outside the picture
        for x, width in re.findall(r"M(-?[\d.]+) [\d.]+h([\d.]+)", node.get("d", "")):
            assert 0 <= float(x) <= float(x) + float(width) <= WIDTH


def test_static_picture_shows_three_telling_moments():
    shards = zero2()
    chosen = [shards.frames[number] for number in moments(shards)]
    assert [(frame.kind, frame.label) for frame in chosen] == [
        ("forward", "blocks.1"),
        ("call", "reduce-scatter of 80 B"),  # a bucket is in flight, in the middle of backward
        ("end", ""),
    ]
    assert chosen[1].ranks[0].flying == {"gradients": ((80, 120),)}
    words = words_of(shard_map_svg(shards))
    assert {"forward of blocks.1 begins", "after the step"} <= set(words)
    assert words.count("25 %") == 4 * 3 * 3 + 4 * 2  # moments in all panels, gradients but where a bucket is alive
    assert len(moments(zero2(16, 2, 64))) == 2  # there is no room for more


def test_owners_are_told_by_colour_and_number():
    picture = shard_map_svg(zero2(4))
    for rank in range(4):
        assert rank_look(rank).fill in picture
    digits = [word for word in words_of(picture) if re.fullmatch(r"[0-3]{4,}", word)]
    assert any(set(word) == {"0"} for word in digits) and len(digits) > 12


def test_a_right_step_complains_of_nothing():
    shards = zero2()
    assert complaints(shards) == []
    # Nothing but the legend's swatch is drawn as wrong.
    assert shard_map_svg(shards).count(WRONG) == 1
    assert summary(shards) == (
        "after the step each rank holds 880 B of model states, formula 880 B; most during the step 940 B"
    )


def test_a_gradient_that_is_not_freed_looks_wrong():
    shards = zero2(frees=False)
    assert complaints(shards) == ["every rank holds all of the gradients, expected 1/4"]
    picture = shard_map_svg(shards)
    assert picture.count(WRONG) > 4 and "! every rank holds all of the gradients, expected 1/4" in words_of(picture)
    assert words_of(picture).count("100 % !") == 4  # the row of each rank, after the step
    assert words_of(picture).count("1.12 kB !") == 4


def test_optimizer_state_on_every_rank_is_neutral_and_looks_wrong():
    shards = zero2(owned=False)
    said = complaints(shards)
    assert "every rank holds all of the master weights, first moment and second moment, expected 1/4" in said
    picture = shard_map_svg(shards)
    # Colours of ranks stand beside the rows only.
    assert picture.count(rank_look(1).fill) == 1
    assert words_of(picture).count("100 % !") == 4 * 3


def test_bytes_over_the_formula_are_told_when_no_element_explains_them():
    shards = zero2(2)
    last = shards.frames[-1]
    heavy = tuple(
        replace(rank, memory=replace(rank.memory, live=rank.memory.live + 500, parameters=rank.memory.parameters + 500))
        for rank in last.ranks
    )
    wrong = replace(shards, frames=(*shards.frames[:-1], replace(last, ranks=heavy)))
    assert complaints(wrong) == ["every rank holds 500 B more than the formula"]
    one = replace(shards, frames=(*shards.frames[:-1], replace(last, ranks=(last.ranks[0], heavy[1]))))
    assert complaints(one) == ["rank 1 holds 500 B more than the formula"]
    assert f'stroke="{WRONG}"' in shard_map_svg(one)


def test_events_in_words():
    shards = zero2()
    said = [heading(frame) for frame in shards.frames]
    assert said[:2] == ["before the step", "forward of blocks.0 begins"] and said[-1] == "after the step"
    assert said[-2] == "waits for reduce-scatter (on rank 0 only)"
    assert "the gradient of blocks.3.weight is ready" in said and "reduce-scatter of 80 B is issued" in said
    frame = shards.frames[1]
    assert heading(replace(frame, ends=True)) == "forward of blocks.0 has ended"
    assert heading(replace(frame, kind="other", label="optimizer")) == "optimizer begins"
    assert heading(replace(frame, kind="mark", label="norm known", on=(1, 2))) == "norm known (on ranks 1, 2 only)"


def test_only_all_is_100_percent():
    assert [percent(share) for share in (0, 0.0001, 0.25, 0.999, 1)] == [0, 1, 25, 99, 100]


# The widget


def replayed(data):
    """What shard_map_replay.js does: every frame's rows, as sets of ends."""
    rows = [set() for _ in range(2 * data["ranks"] * len(data["kinds"]))]
    for _, changes, _ in data["frames"]:
        place = 0
        while place < len(changes):
            row, count = changes[place : place + 2]
            rows[row] ^= set(changes[place + 2 : place + 2 + count])
            place += 2 + count
        yield [sorted(row) for row in rows]


@pytest.mark.parametrize("shards", [zero2(), zero2(frees=False), zero2(8, 12)])
def test_changes_lead_to_what_is_held_at_every_event(shards):
    data = shard_map_data(shards)
    assert json.loads(json.dumps(data)) == data
    kinds = shards.kinds
    for frame, rows in zip(shards.frames, replayed(data), strict=True):
        for rank, state in enumerate(frame.ranks):
            for number, kind in enumerate(kinds):
                held = rows[rank * len(kinds) + number]
                assert held == [end for each in state.held.get(kind, ()) for end in each]
                flying = rows[(shards.world_size + rank) * len(kinds) + number]
                assert flying == [end for each in state.flying.get(kind, ()) for end in each]
    assert len(data["frames"]) == len(shards.frames)


def test_an_event_costs_a_few_numbers():
    data = shard_map_data(zero2(4, layers=60))
    assert len(data["frames"]) > 240
    assert len(json.dumps(data, separators=(",", ":"))) < 60_000


def test_a_map_carries_a_live_view_a_page_and_a_picture():
    view = show(zero2(frees=False))
    assert isinstance(view, ShardMapView)
    data, _ = view._repr_mimebundle_()
    assert {VIEW, "text/html", "image/svg+xml", "text/plain"} <= set(data)
    assert data["text/plain"].startswith("a step: 4 ranks, 19 events; after the step each rank holds 1.12 kB")
    assert "; ! every rank holds all of the gradients, expected 1/4. Run the cell" in data["text/plain"]
    assert data["text/html"].replace("http://www.w3.org/2000/svg", "").count("http") == 0
    assert len(data["text/html"]) < 80_000
    again, _ = ShardMapView(zero2(frees=False))._repr_mimebundle_()
    assert again["text/html"] == data["text/html"]
    cell = {"cell_type": "code", "outputs": [{"data": dict(data)}]}
    kept = without_views({"cells": [cell], "metadata": {}})["cells"][0]["outputs"][0]["data"]
    assert set(kept) == {"text/plain", "image/svg+xml"}


def test_the_event_stays_within_the_step():
    view = show(zero2())
    view.step = 999
    assert view.step == len(view.shards.frames) - 1 and view.caption == "after the step"
    view.step = -3
    assert view.step == 0


def test_names_are_escaped():
    shards = zero2(2, title="</script><b>")
    frame = replace(shards.frames[1], kind="mark", label="a<b>&c")
    shards = replace(shards, frames=(*shards.frames[:-1], frame, shards.frames[-1]))
    assert "<b>" not in shard_map_svg(shards)
    html = ShardMapView(shards)._repr_mimebundle_()[0]["text/html"]
    assert html.count("</script>") == 1


def test_too_many_ranks_are_refused():
    with pytest.raises(UsageError, match="17 ranks; the picture is readable for 1 to 16"):
        show(zero2(17, 1, 17))
