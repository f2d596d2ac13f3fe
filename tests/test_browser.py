"""Notebooks in a real JupyterLab in a real browser: they run, the stepper steps, nothing leaves the machine."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import nbformat
import pytest

from browser import ROOT, SCREENSHOTS, Lab, browser_page, chromium, jupyterlab, trust
from ring_simulator import WRONG, gather_only, scatter_only, simulate, strange_messages
from shardlab.widgets import show
from shardlab.widgets.saved import without_views

pytest.importorskip("playwright", reason="playwright is not installed (it is in requirements-dev.txt)")
pytestmark = [
    pytest.mark.skipif(chromium() is None, reason="no Chromium found; set SHARDLAB_CHROMIUM to its path"),
    pytest.mark.timeout(300),
]

SOLUTIONS = sorted((ROOT / "solutions").glob("*.ipynb"))
REAL = ROOT / "solutions" / "04_ring_all_reduce.ipynb"
OTHERS = [path.name for path in SOLUTIONS if path != REAL]
STEPPER = ".jp-OutputArea-output .sl-ring"
FIXTURE = [
    "from ring_simulator import simulate, strange_messages\nfrom shardlab.widgets import predict, show, table",
    "p = predict('bytes sent by rank 0', unit='bytes', N=4, n=1_048_576 * 4)",
    "show(simulate(4))",
    "p.compare(6_291_456)",
    "table([(2, 4, 4), (4, 6, 7)], ('N', 'predicted', 'measured'), equal=('predicted', 'measured'))",
    "show(simulate(2))",
    "show(simulate(8, wrong='gather_adds'))",
    "show(simulate(4, wrong='garbage'))",
    "show(strange_messages())",
    "show(simulate(1))",
    "from ring_simulator import ring_run\nshow(ring_run(4))",
    "stepper = show(simulate(3))\nstepper",
    "stepper",
]


def notebook_of(sources: list[str]) -> nbformat.NotebookNode:
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return nbformat.v4.new_notebook(cells=cells, metadata=metadata)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory):
    folder, home = tmp_path_factory.mktemp("notebooks"), tmp_path_factory.mktemp("home")
    nbformat.write(notebook_of(FIXTURE), folder / "fixture.ipynb")
    for path in SOLUTIONS:
        shutil.copy(path, folder)
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    with jupyterlab(folder, home) as running:
        trust(folder, home)
        yield running


@pytest.fixture
def opened(lab: Lab, tmp_path: Path):
    with browser_page(tmp_path / "profile") as (page, watch):
        yield lab, page, watch


def run_all(page, lab: Lab, name: str) -> None:
    """Opens a notebook and runs it from top to bottom; fails when a cell is left out or fails that should not."""
    cells = nbformat.read(lab.folder / name, as_version=4).cells
    may_fail = [i for i, cell in enumerate(cells) if "raises-exception" in cell.metadata.get("tags", [])]
    page.goto(lab.page(name))
    page.locator(".jp-Notebook .jp-CodeCell").first.wait_for(timeout=60_000)
    page.locator("#jp-main-statusbar").get_by_text("| Idle").wait_for(timeout=60_000)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    state = page.wait_for_function(
        """(mayFail) => {
            const cells = [...document.querySelectorAll('.jp-Notebook .jp-Cell')];
            const failed = cells
              .filter((cell, i) => !mayFail.includes(i))
              .flatMap((cell) => [...cell.querySelectorAll('.jp-OutputArea-output[data-mime-type$="stderr"]')])
              .map((output) => output.innerText);
            const waiting = cells
              .filter((cell) => cell.matches('.jp-CodeCell') && cell.querySelector('.cm-content')?.innerText.trim())
              .filter((cell) => !/\\[\\d+\\]/.test(cell.querySelector('.jp-InputPrompt').innerText));
            return failed.length || waiting.length === 0 ? {failed} : null;
        }""",
        arg=may_fail,
        timeout=180_000,
    )
    failed = state.json_value()["failed"]
    assert not failed, "\n".join(failed)


def step_of(stepper) -> int:
    return int(stepper.get_attribute("data-step"))


def last_of(stepper) -> int:
    return int(stepper.locator("input[type=range]").get_attribute("max"))


def expect_step(page, stepper, wanted: int) -> None:
    page.wait_for_function(
        "([node, wanted]) => node.dataset.step === String(wanted)", arg=[stepper.element_handle(), wanted], timeout=5000
    )


def expect_quiet(watch) -> None:
    assert watch.own_errors == []
    assert watch.left_the_machine == []


@pytest.mark.parametrize("name", ["fixture.ipynb", REAL.name])
def test_notebook_runs_and_stepper_steps(opened, name):
    lab, page, watch = opened
    if not (lab.folder / name).exists():
        pytest.skip(f"solutions/{name} does not exist (yet)")
    run_all(page, lab, name)
    stepper = page.locator(STEPPER).first
    stepper.wait_for(timeout=30_000)
    stepper.scroll_into_view_if_needed()
    last = last_of(stepper)
    assert last >= 2 and step_of(stepper) == 0

    # By mouse.
    stepper.get_by_role("button", name="next step").click()
    expect_step(page, stepper, 1)
    assert re.match(rf"Step 1 of {last}", stepper.locator("[aria-live]").inner_text())
    assert stepper.locator(".sl-arrow").count() > 0
    stepper.get_by_role("button", name="last step").click()
    expect_step(page, stepper, last)
    stepper.get_by_role("button", name="previous step").click()
    expect_step(page, stepper, last - 1)
    stepper.get_by_role("button", name="first step").click()
    expect_step(page, stepper, 0)

    # By keyboard, on the widget itself and on its slider.
    for focused in (stepper, stepper.get_by_role("slider")):
        focused.focus()
        for key, wanted in (("End", last), ("ArrowLeft", last - 1), ("Home", 0), ("ArrowRight", 1), ("ArrowRight", 2)):
            page.keyboard.press(key)
            expect_step(page, stepper, wanted)
    stepper.focus()
    page.keyboard.press("Home")
    page.keyboard.press("Space")
    expect_step(page, stepper, 1)  # it plays
    page.keyboard.press("Space")
    assert stepper.get_by_role("button", name="play").count() == 1
    assert page.evaluate("document.activeElement.classList.contains('sl-ring')")

    page.screenshot(path=SCREENSHOTS / f"{Path(name).stem}.png")
    expect_quiet(watch)


@pytest.mark.parametrize("name", OTHERS)
def test_saved_solutions_show_their_pictures(opened, name):
    """As `make lab` opens them, trusted. nbval and papermill run every cell of them."""
    lab, page, watch = opened
    page.goto(lab.page(name))
    page.locator(".jp-Notebook .jp-CodeCell").first.wait_for(timeout=60_000)
    page.locator("#jp-main-statusbar").get_by_text("| Idle").wait_for(timeout=60_000)
    pictures = page.locator(".jp-OutputArea-output svg, .jp-OutputArea-output img")
    pictures.nth(1).wait_for(state="attached", timeout=30_000)
    room = page.locator(".jp-OutputArea-output").first.bounding_box()["width"]
    visible = [picture for picture in pictures.all() if picture.is_visible()]
    wide = [picture.get_attribute("aria-label") for picture in visible if picture.bounding_box()["width"] > room + 1]
    assert visible and not wide, f"wider than the {room} pixels of an output"
    page.screenshot(path=SCREENSHOTS / f"{Path(name).stem}.png")
    expect_quiet(watch)


def test_views_of_one_widget_stay_together_and_forms_work(opened):
    lab, page, watch = opened
    run_all(page, lab, "fixture.ipynb")
    steppers = page.locator(STEPPER)
    steppers.nth(7).wait_for(timeout=30_000)
    first, second = steppers.nth(6), steppers.nth(7)
    first.get_by_role("button", name="next step").click()
    expect_step(page, second, 1)
    second.get_by_role("button", name="last step").click()
    expect_step(page, first, 4)

    # A prediction typed before running again is kept and compared.
    field = page.locator(".jp-OutputArea-output input[type=text]")
    assert field.count() == 1  # shown once
    field.fill("2*(N-1)/N*n")
    page.get_by_text("= 6,291,456 bytes (6.29 MB)").wait_for(timeout=10_000)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    page.get_by_text("Exactly as predicted.").wait_for(timeout=60_000)
    assert field.input_value() == "2*(N-1)/N*n"
    expect_quiet(watch)


# Pages without JupyterLab, kernel or network


LIVE = {
    "2 ranks": simulate(2),
    "8 ranks": simulate(8),
    "16 ranks": simulate(16),
    "1 rank": simulate(1),
    "strange messages": strange_messages(),
    "all-gather": gather_only(4),
    "off by one": scatter_only(4, off_by_one=True),
    **{wrong: simulate(4, wrong=wrong) for wrong in WRONG},
}


def page_of(traces, dark: bool) -> str:
    """Our own HTML alone, with the colours of JupyterLab's theme."""
    colours = (
        "--jp-ui-font-color0: #fff; --jp-ui-font-color2: #bbb; --jp-layout-color0: #111; --jp-layout-color2: #424242;"
    )
    parts = [show(trace)._repr_mimebundle_()[0]["text/html"] for trace in traces]
    style = f":root {{ {colours} }} body {{ background: #111 }}" if dark else ""
    return f"<!doctype html><meta charset='utf-8'><style>{style}</style>{''.join(parts)}"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_kind_of_trace_steps_without_a_kernel(tmp_path, dark):
    path = tmp_path / "page.html"
    path.write_text(page_of(LIVE.values(), dark), encoding="utf-8")
    with browser_page(tmp_path / "profile", offline=True, reduced_motion="reduce") as (page, watch):
        page.goto(path.as_uri())
        steppers = page.locator(".sl-ring")
        assert steppers.count() == len(LIVE)
        for stepper in steppers.all():
            last = last_of(stepper)
            stepper.focus()
            for wanted in range(1, last + 1):
                page.keyboard.press("ArrowRight")
                assert step_of(stepper) == wanted
            page.keyboard.press("ArrowRight")  # beyond the last
            assert step_of(stepper) == last
            assert stepper.evaluate("node => node.getAnimations({subtree: true}).length") == 0
        alarms = {
            name for name, stepper in zip(LIVE, steppers.all(), strict=True) if stepper.locator(".sl-alarm").count()
        }
        assert alarms == {*WRONG, "off by one"}
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SCREENSHOTS / f"traces-{'dark' if dark else 'light'}.png", full_page=True)
    assert watch.errors == []
    assert watch.left_the_machine == []


def test_exported_page_is_live_without_network(tmp_path):
    """nbconvert's own page asks for MathJax and RequireJS from the network; the stepper must not need them."""
    from nbconvert import HTMLExporter

    data, metadata = show(simulate(3))._repr_mimebundle_()
    notebook = notebook_of(["show(trace)"])
    notebook.cells[0].outputs = [nbformat.v4.new_output("display_data", data, metadata=metadata)]
    for name, scripts in (("live", True), ("picture", False)):
        copy = without_views(nbformat.from_dict(notebook), scripts=scripts)
        html, _ = HTMLExporter().from_notebook_node(copy)
        (tmp_path / f"{name}.html").write_text(html, encoding="utf-8")
    with browser_page(tmp_path / "profile", offline=True) as (page, _):
        page.goto((tmp_path / "live.html").as_uri())
        stepper = page.locator(".sl-ring")
        stepper.get_by_role("button", name="last step").click()
        assert step_of(stepper) == 4
        assert "9 of 9 chunks are complete" in stepper.locator("[aria-live]").inner_text()
        page.screenshot(path=SCREENSHOTS / "exported.png")

        page.goto((tmp_path / "picture.html").as_uri())
        assert page.locator(".sl-ring").count() == 0
        assert page.locator("img[src^='data:image/svg+xml']").bounding_box()["width"] > 200


def test_saved_html_shows_its_picture_where_scripts_are_removed(tmp_path):
    html = show(simulate(3))._repr_mimebundle_()[0]["text/html"]
    path = tmp_path / "page.html"
    path.write_text(f"<meta charset='utf-8'>{re.sub(r'<script.*?</script>', '', html, flags=re.S)}", encoding="utf-8")
    with browser_page(tmp_path / "profile", java_script_enabled=False) as (page, watch):
        page.goto(path.as_uri())
        assert page.locator("svg").bounding_box()["width"] > 200
    assert watch.errors == []
