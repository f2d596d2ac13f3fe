"""The timeline in a real browser: by mouse, wheel and keyboard, in both themes, exported, and quick with many spans."""

from __future__ import annotations

import re

import nbformat
import pytest

from browser import SCREENSHOTS, browser_page, chromium, jupyterlab
from shardlab.widgets import show
from shardlab.widgets.saved import without_views
from test_browser import notebook_of, run_all
from timelines import checkpointed, simulated

pytest.importorskip("playwright", reason="playwright is not installed (it is in requirements-dev.txt)")
pytestmark = [
    pytest.mark.skipif(chromium() is None, reason="no Chromium found; set SHARDLAB_CHROMIUM to its path"),
    pytest.mark.timeout(300),
]

# What JupyterLab's dark theme sets, for pages without JupyterLab.
DARK = """:root { --jp-ui-font-color0: #fff; --jp-ui-font-color2: rgba(255,255,255,.54); --jp-layout-color0: #111;
--jp-layout-color2: #424242; --jp-border-color0: #616161; --jp-brand-color1: #42a5f5 } body { background: #111 }"""


def page_of(*timelines, style=""):
    parts = [show(timeline)._repr_mimebundle_()[0]["text/html"] for timeline in timelines]
    return f"<!doctype html><meta charset='utf-8'><style>{style}</style>{''.join(parts)}"


@pytest.fixture
def opened(tmp_path):
    """opened(timeline, ...) gives the page and its timelines' widgets."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    with browser_page(tmp_path / "profile", offline=True) as (page, watch):

        def open_page(*timelines, style=""):
            (tmp_path / "page.html").write_text(page_of(*timelines, style=style), encoding="utf-8")
            page.goto((tmp_path / "page.html").as_uri())
            return page, page.locator(".sl-timeline")

        yield open_page
        assert watch.errors == []
        assert watch.left_the_machine == []


def view_of(widget):
    return tuple(int(widget.get_attribute(f"data-{end}")) for end in ("from", "to"))


def width_of(widget):
    start, end = view_of(widget)
    return end - start


def said_by(widget):
    return widget.locator("[aria-live]").inner_text()


def settled(page):
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def at(widget, time, row=0, lane=0, low=False):
    """Where a moment (in microseconds) of a lane is on the page."""
    box = widget.locator(".sl-stage > svg").bounding_box()
    start, end = view_of(widget)
    x = box["x"] + 132 + (time - start) / (end - start) * (box["width"] - 132 - 12)
    return x, box["y"] + 22 + row * 71 + lane * 29 + (21 if low else 8)


def test_hovering_and_clicking_say_what_a_span_is(opened):
    page, widget = opened(simulated(2, how="blocking"))
    assert said_by(widget) == "Point at a span, or use the arrow keys."
    page.mouse.move(*at(widget, 500))
    assert said_by(widget) == "rank 0 computes: forward of blocks.0, from 0.00 ms to 1.00 ms (1.00 ms)."
    page.mouse.move(*at(widget, 5000, row=1))
    assert said_by(widget).startswith("rank 1 computes: backward of blocks.3, from 4.10 ms")
    assert said_by(widget).endswith("its gradients travel in bucket 0.")
    page.mouse.move(*at(widget, 7000, low=True))
    assert said_by(widget).startswith("rank 0 stands still from 6.00 ms")
    page.mouse.move(*at(widget, 7000, lane=1))
    reduction = (
        "rank 0, all-reduce of bucket 0, 400 B: issued at 6.00 ms, on the link from 6.01 ms to 7.51 ms (1.50 ms): "
        "exposed; a thread stood still for it for 1.50 ms."
    )
    assert said_by(widget) == reduction
    page.mouse.down()
    page.mouse.up()
    page.mouse.move(5, 5)
    assert said_by(widget) == reduction, "a click keeps it"
    page.keyboard.press("Escape")
    assert said_by(widget) == "Point at a span, or use the arrow keys."
    page.mouse.move(*at(widget, 8000, lane=1))
    assert said_by(widget) == "Point at a span, or use the arrow keys.", "nothing is there"


def test_hidden_and_exposed_are_told_apart_in_words(opened):
    page, widget = opened(simulated(2))
    page.mouse.move(*at(widget, 7000, lane=1))
    assert ": hidden" in said_by(widget) and "exposed" not in said_by(widget)
    page.mouse.move(*at(widget, 13000, lane=1))
    assert re.search(r": \d+ us hidden, 1\.\d+ ms exposed", said_by(widget)) or ": exposed" in said_by(widget)
    text = widget.locator("svg").first.text_content()
    assert "hidden 75 %" in text and "exposed 1.50 ms" in text
    assert widget.locator(".sl-hatch").count() > 0
    page, widget = opened(simulated(2, how="blocking"))
    assert widget.locator(".sl-alarmed").all_text_contents() == ["hidden 0 %"] * 2


def test_keys_go_from_span_to_span_and_lane_to_lane(opened):
    page, widget = opened(simulated(3))
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.classList.contains('sl-timeline')")
    for key, wanted in [
        ("ArrowRight", "0/0/0"),
        ("ArrowRight", "0/0/1"),
        ("ArrowLeft", "0/0/0"),
        ("ArrowLeft", "0/0/0"),  # there is no earlier one
        ("ArrowDown", "0/1/0"),
        ("ArrowRight", "0/1/1"),
        ("ArrowDown", "1/0/6"),  # the span at about the same time
        ("ArrowDown", "1/1/1"),
        ("ArrowUp", "1/0/6"),
        ("ArrowDown", "1/1/1"),
        ("ArrowDown", "2/0/6"),
        ("ArrowDown", "2/1/1"),
        ("ArrowDown", "2/1/1"),  # there is no lower lane
    ]:
        page.keyboard.press(key)
        assert widget.get_attribute("data-chosen") == wanted, key
    assert said_by(widget).startswith("rank 2, all-reduce of bucket 1")
    frame = widget.locator(".sl-chosen")
    settled(page)
    assert frame.get_attribute("visibility") == "visible" and float(frame.get_attribute("width")) > 40


def test_keys_zoom_move_and_show_all(opened):
    page, widget = opened(simulated(2))
    whole = view_of(widget)
    widget.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("+")
    page.keyboard.press("=")
    assert width_of(widget) == pytest.approx((whole[1] - whole[0]) / 1.5**2, abs=2)
    start, _ = view_of(widget)
    page.keyboard.press("Shift+ArrowRight")
    assert view_of(widget)[0] > start
    page.keyboard.press("-")
    assert width_of(widget) == pytest.approx((whole[1] - whole[0]) / 1.5, abs=2)
    for key in ("0", "Home"):
        page.keyboard.press("+")
        page.keyboard.press(key)
        assert view_of(widget) == whole
    page.keyboard.press("Enter")  # zooms to the chosen span, which lasts 1 ms
    assert width_of(widget) == 2000 and view_of(widget)[0] <= 0
    for _ in range(12):  # what is chosen stays in view
        page.keyboard.press("ArrowRight")
    start, end = view_of(widget)
    chosen = re.search(r"from ([\d.]+) ms to ([\d.]+) ms", said_by(widget))
    assert start <= 1000 * float(chosen[1]) <= end
    for _ in range(60):
        page.keyboard.press("+")
    assert width_of(widget) == 20
    page.keyboard.press("Control+0")  # is the browser's
    assert width_of(widget) == 20
    for key in ("Home", "+", "+", *["Shift+ArrowRight"] * 12):
        page.keyboard.press(key)
    assert view_of(widget)[1] == whole[1], "it ends where the timeline ends"
    for _ in range(12):
        page.keyboard.press("Shift+ArrowLeft")
    assert view_of(widget)[0] == whole[0]


def test_buttons_zoom_and_move_and_tell_when_they_cannot(opened):
    page, widget = opened(simulated(2))
    whole = view_of(widget)

    def button(name):
        return widget.get_by_role("button", name=name, exact=True)

    assert [button(name).get_attribute("aria-disabled") for name in ("zoom in", "zoom out", "show all")] == [
        "false",
        "true",
        "true",
    ]
    button("zoom in").click()
    button("later").click()
    assert width_of(widget) < whole[1] - whole[0] and view_of(widget)[0] > whole[0]
    button("earlier").click()
    button("earlier").click()
    assert view_of(widget)[0] == whole[0] and button("earlier").get_attribute("aria-disabled") == "true"
    button("zoom in").press("Enter")  # on a button, Enter presses it
    button("show all").click()
    assert view_of(widget) == whole


def test_the_wheel_zooms_where_the_pointer_is_once_the_timeline_was_clicked(opened):
    page, widget = opened(simulated(2))
    whole = view_of(widget)
    page.mouse.move(*at(widget, 6000))
    page.mouse.wheel(0, -300)
    page.wait_for_timeout(100)
    assert view_of(widget) == whole, "until then it is the page's"
    page.mouse.click(*at(widget, 6000))
    page.mouse.wheel(0, -300)
    page.wait_for_function("(whole) => document.querySelector('.sl-timeline').dataset.to < whole", arg=whole[1])
    start, end = view_of(widget)
    assert (6000 - start) / (end - start) == pytest.approx((6000 - whole[0]) / (whole[1] - whole[0]), abs=0.01)
    page.mouse.wheel(0, 3000)
    page.wait_for_function(
        "(whole) => Number(document.querySelector('.sl-timeline').dataset.to) === whole", arg=whole[1]
    )
    page.mouse.wheel(0, -300)
    before = view_of(widget)
    page.mouse.wheel(200, 0)
    page.wait_for_function("(from) => document.querySelector('.sl-timeline').dataset.from > from", arg=before[0])


def test_dragging_moves_and_chooses_nothing(opened):
    page, widget = opened(simulated(2))
    widget.focus()
    for _ in range(3):
        page.keyboard.press("+")
    before, (x, y) = view_of(widget), at(widget, 6500)
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - 60, y, steps=3)
    page.mouse.move(x - 120, y, steps=3)
    page.mouse.up()
    after = view_of(widget)
    assert after[0] > before[0] and after[1] - after[0] == pytest.approx(before[1] - before[0], abs=2)
    assert not widget.get_attribute("data-chosen")
    # What was under the pointer still is.
    assert at(widget, 6500)[0] == pytest.approx(x - 120, abs=2)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pictures_for_a_look_and_readable_text(opened, theme):
    timelines = [simulated(2), simulated(4, layers=12, bucket=3), simulated(8, how="blocking"), checkpointed()]
    page, widgets = opened(*timelines, style=DARK if theme == "dark" else "")
    widgets.nth(1).focus()
    for key in ("ArrowDown", "ArrowRight", "Enter", "-", "-"):
        page.keyboard.press(key)
    settled(page)
    page.screenshot(path=SCREENSHOTS / f"timelines-{theme}.png", full_page=True)
    for widget in widgets.all():
        # Every label lies within its lane and inside the picture.
        outside = widget.evaluate(
            """(root) => {
                const svg = root.querySelector('.sl-stage > svg').getBoundingClientRect();
                return [...root.querySelectorAll('.sl-stage text')]
                  .filter((text) => !text.matches('.sl-plot text'))
                  .map((text) => text.getBoundingClientRect())
                  .filter((box) => box.left < svg.left - 1 || box.right > svg.right + 1 || box.bottom > svg.bottom + 1)
                  .length;
            }"""
        )
        assert outside == 0
        overlapping = widget.evaluate(
            """(root) => {
                const boxes = [...root.querySelectorAll('.sl-label, .sl-name, .sl-lostname, .sl-waits, .sl-tick')]
                  .map((text) => text.getBoundingClientRect());
                return boxes.filter((a, i) => boxes.some((b, j) => i < j &&
                  a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 4 && b.top < a.bottom - 4)).length;
            }"""
        )
        assert overlapping == 0, "labels overlap"


def test_thousands_of_spans_are_drawn_within_a_blink(opened):
    """Counts what is drawn rather than time: paths, not elements per span."""
    page, widget = opened(simulated(8, layers=150, how="blocking"))
    settled(page)
    assert widget.locator(".sl-stage *").count() < 1500  # 3600 spans and 1200 waits are there
    widget.focus()
    for _ in range(12):
        page.keyboard.press("+")
    page.keyboard.press("ArrowRight")
    settled(page)
    assert widget.locator(".sl-stage *").count() < 1500
    assert widget.locator(".sl-label").count() > 0


def test_several_redraws_in_a_frame_are_one(opened):
    page, widget = opened(simulated(4))
    settled(page)
    draws = widget.evaluate(
        """async (root) => {
            let draws = 0;
            const observer = new MutationObserver((records) => {
                draws += records.some((record) => record.addedNodes.length) ? 1 : 0;
            });
            observer.observe(root.querySelector('.sl-stage > svg'), { childList: true });
            const zoom = root.querySelector('[aria-label="zoom in"]');
            for (let i = 0; i < 20; i++) zoom.click();
            await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
            return draws;
        }"""
    )
    assert 1 <= draws <= 2


def test_exported_page_is_live_without_network(tmp_path):
    """nbconvert's own page asks for MathJax and RequireJS from the network; the timeline must not need them."""
    from nbconvert import HTMLExporter

    data, metadata = show(simulated(2))._repr_mimebundle_()
    notebook = notebook_of(["show(timeline)"])
    notebook.cells[0].outputs = [nbformat.v4.new_output("display_data", data, metadata=metadata)]
    html, _ = HTMLExporter().from_notebook_node(without_views(nbformat.from_dict(notebook), scripts=True))
    (tmp_path / "live.html").write_text(html, encoding="utf-8")
    with browser_page(tmp_path / "profile", offline=True) as (page, _):
        page.goto((tmp_path / "live.html").as_uri())
        widget = page.locator(".sl-timeline")
        whole = width_of(widget)
        widget.get_by_role("button", name="zoom in").click()
        assert width_of(widget) < whole
        page.screenshot(path=SCREENSHOTS / "timeline-exported.png")


def test_a_page_without_scripts_shows_the_picture(tmp_path):
    (tmp_path / "page.html").write_text(page_of(simulated(2)), encoding="utf-8")
    with browser_page(tmp_path / "profile", java_script_enabled=False) as (page, watch):
        page.goto((tmp_path / "page.html").as_uri())
        assert page.locator("svg").bounding_box()["width"] > 900
    assert watch.errors == []


@pytest.mark.parametrize("dark", [False, True])
def test_in_jupyterlab_two_views_zoom_each_on_their_own(tmp_path, dark):
    folder = tmp_path / "notebooks"
    folder.mkdir()
    cells = [
        "from timelines import simulated\nfrom shardlab.widgets import show",
        "view = show(simulated(4, layers=6))\nview",
        "view",
    ]
    nbformat.write(notebook_of(cells), folder / "timeline.ipynb")
    with jupyterlab(folder, tmp_path / "home", dark) as lab, browser_page(tmp_path / "profile") as (page, watch):
        run_all(page, lab, "timeline.ipynb")
        widgets = page.locator(".jp-OutputArea-output .sl-timeline")
        widgets.nth(1).wait_for(timeout=30_000)
        first, second = widgets.nth(0), widgets.nth(1)
        whole = view_of(second)
        first.scroll_into_view_if_needed()
        first.focus()
        for key in ("ArrowRight", "+", "+", "0", "+"):  # JupyterLab would take 0 and Enter for its own
            page.keyboard.press(key)
        assert width_of(first) < whole[1] - whole[0] and view_of(second) == whole
        assert said_by(first).startswith("rank 0 computes: forward of blocks.0")
        assert page.evaluate("document.activeElement.classList.contains('sl-timeline')")
        page.screenshot(path=SCREENSHOTS / f"timeline-lab-{'dark' if dark else 'light'}.png")
        assert watch.own_errors == []
        assert watch.left_the_machine == []
