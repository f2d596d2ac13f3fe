"""The shard map in a real browser: by slider, keys and mouse, in both themes, and exported."""

from __future__ import annotations

import re

import nbformat
import pytest

from browser import SCREENSHOTS, browser_page, chromium
from shardlab.widgets import show
from shardlab.widgets.saved import without_views
from state_maps import zero2
from test_browser import notebook_of
from test_browser_timeline import DARK

pytest.importorskip("playwright", reason="playwright is not installed (it is in requirements-dev.txt)")
pytestmark = [
    pytest.mark.skipif(chromium() is None, reason="no Chromium found; set SHARDLAB_CHROMIUM to its path"),
    pytest.mark.timeout(120),
]


def exported(shards):
    """The page that nbconvert makes of a notebook with this map."""
    from nbconvert import HTMLExporter

    data, metadata = show(shards)._repr_mimebundle_()
    notebook = notebook_of(["show(map)"])
    notebook.cells[0].outputs = [nbformat.v4.new_output("display_data", data, metadata=metadata)]
    return HTMLExporter().from_notebook_node(without_views(nbformat.from_dict(notebook), scripts=True))[0]


def step_of(widget):
    return int(widget.get_attribute("data-step"))


def said_by(widget):
    return widget.locator("[aria-live]").inner_text()


def test_an_exported_map_is_replayed_by_slider_keys_and_mouse(tmp_path):
    shards = zero2()
    (tmp_path / "live.html").write_text(exported(shards), encoding="utf-8")
    with browser_page(tmp_path / "profile", offline=True) as (page, _):
        page.goto((tmp_path / "live.html").as_uri())
        widget, last = page.locator(".sl-map"), len(shards.frames) - 1
        assert step_of(widget) == 0 and said_by(widget) == "before the step."

        slider = widget.get_by_role("slider", name="event")
        slider.fill("6")
        assert step_of(widget) == 6
        assert said_by(widget) == "the gradient of blocks.3.weight is ready. gradients 25 % → 44 % on every rank."
        assert slider.get_attribute("aria-valuetext") == "the gradient of blocks.3.weight is ready"
        picture = widget.locator(".sl-stage svg")
        assert picture.get_attribute("aria-label") == (
            "every rank holds 940 B: weights 100 %, gradients 44 %, master weights 25 %, first moment 25 %, "
            "second moment 25 %. The formula says 880 B."
        )
        assert picture.locator(".sl-changed").count() == 1 and picture.locator(".sl-flying").count() == 0
        widget.get_by_role("button", name="next event").click()
        assert said_by(widget).endswith("is issued. in flight: gradients on every rank.")
        assert picture.locator(".sl-flying").count() == 1

        widget.focus()
        for key, wanted in [
            *(("ArrowRight", 8), ("ArrowLeft", 7), ("Home", 0), ("ArrowLeft", 0)),
            *(("PageDown", 10), ("End", last), ("ArrowRight", last), ("PageUp", last - 10)),
        ]:
            page.keyboard.press(key)
            assert step_of(widget) == wanted, key
        # The same event looks the same, whichever way one came.
        there = [picture.inner_html()]
        for key in ("Home", *["ArrowRight"] * (last - 10)):
            page.keyboard.press(key)
        assert [re.sub(' class="sl-changed".*?/>', "", text) for text in there] == [
            re.sub(' class="sl-changed".*?/>', "", picture.inner_html())
        ]
        page.keyboard.press("Home")
        page.keyboard.press(" ")
        widget.get_by_role("button", name="pause").wait_for()
        page.wait_for_function("Number(document.querySelector('.sl-map').dataset.step) >= 2", timeout=10_000)
        page.keyboard.press(" ")
        widget.get_by_role("button", name="play").wait_for()

        page.keyboard.press("End")
        box = picture.bounding_box()
        page.mouse.move(box["x"] + 70 + 0.3 * (box["width"] - 138), box["y"] + 20 + 6)
        assert widget.locator(".sl-pointed").inner_text() == (
            "weights of blocks.1.weight, element 8: held by ranks 0, 1, 2, 3; rank 0 owns it."
        )
        assert widget.locator(".sl-stage .sl-left-over").count() == 0 and widget.locator(".sl-alarm").count() == 0


def test_wrong_maps_look_wrong_and_all_text_is_inside(tmp_path):
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    maps = [zero2(), zero2(frees=False), zero2(owned=False), zero2(8, 12, 80)]
    views = [show(shards) for shards in maps]
    for view, step in zip(views, (8, 99, 99, 30), strict=True):
        view.step = step
    parts = "".join(view._repr_mimebundle_()[0]["text/html"] for view in views)
    with browser_page(tmp_path / "profile", offline=True) as (page, watch):
        for theme, style in (("dark", DARK), ("light", "")):
            file = tmp_path / f"{theme}.html"
            file.write_text(f"<!doctype html><meta charset='utf-8'><style>{style}</style>{parts}", encoding="utf-8")
            page.goto(file.as_uri())
            page.locator(".sl-map").nth(len(maps) - 1).wait_for()
            page.screenshot(path=SCREENSHOTS / f"shard-maps-{theme}.png", full_page=True)
        widgets = page.locator(".sl-map")
        assert widgets.nth(0).locator(".sl-stage .sl-left-over").count() == 0
        kept, replicated = widgets.nth(1), widgets.nth(2)
        assert kept.locator(".sl-alarm").inner_text() == "! every rank holds all of the gradients, expected 1/4"
        assert kept.locator(".sl-stage .sl-wrong").all_text_contents() == ["100 % !", "1.12 kB !"] * 4
        wrong = ["100 % !", "100 % !", "100 % !", "2.32 kB !"]  # master, both moments, bytes
        assert replicated.locator(".sl-stage .sl-wrong").all_text_contents() == wrong * 4
        assert replicated.locator(".sl-stage .sl-digit").count() == 0  # nobody's own: neutral
        for widget in widgets.all():
            assert widget.bounding_box()["width"] <= 960
            outside = widget.evaluate(
                """(root) => {
                    const svg = root.querySelector('.sl-stage svg').getBoundingClientRect();
                    return [...root.querySelectorAll('.sl-stage text')]
                      .map((text) => [text.textContent, text.getBoundingClientRect()])
                      .filter(([, box]) => box.left < svg.left - 1 || box.right > svg.right + 1 || box.top < svg.top - 1
                        || box.bottom > svg.bottom + 1).map(([text]) => text);
                }"""
            )
            assert outside == []
        assert watch.errors == [] and watch.left_the_machine == []
