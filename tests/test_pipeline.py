"""From source to notebooks: what is built, what `--check` catches, and that no edit is lost."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import LAB, SOURCE, rewrite
from shardlab.course import build, cli
from shardlab.course.find import Lab, find_lab
from shardlab.course.source import in_normal_form, read_notebook, read_source, write_source

SECRETS = ["math.fsum", "total_of_both", "forty-two", "add(10, -7)", "BEGIN", "END SOLUTION"]


def edit(path: Path, change: Callable[[dict], None]) -> None:
    """Changes a notebook file as an editor would."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    change(notebook)
    path.write_text(json.dumps(notebook, indent=1), encoding="utf-8")


def cell(notebook: dict, cell_id: str) -> dict:
    return next(cell for cell in notebook["cells"] if cell["id"] == cell_id)


def test_solution_keeps_code_outputs_and_order(lab: Lab) -> None:
    notebook = json.loads(lab.solution.read_text())
    assert [c.get("execution_count") for c in notebook["cells"] if c["cell_type"] == "code"] == [1, 2, 3, 4, 5, 6]
    assert cell(notebook, "add")["source"][-2].strip() == "return total_of_both"
    assert notebook["cells"][-1]["outputs"][0]["data"]["text/plain"] == ["30.0"]
    assert notebook["metadata"]["language_info"] == {
        "file_extension": ".py",
        "mimetype": "text/x-python",
        "name": "python",
        "pygments_lexer": "ipython3",
    }


def test_lab_has_no_solution_no_outputs_and_locked_cells(lab: Lab) -> None:
    text = lab.notebook.read_text()
    assert not [secret for secret in SECRETS if secret in text]
    notebook = json.loads(text)
    assert "jupytext" not in notebook["metadata"]
    assert all(c["outputs"] == [] and c["execution_count"] is None for c in notebook["cells"] if "outputs" in c)
    assert cell(notebook, "add")["source"][-1] == '    raise NotImplementedError("not written yet")'
    assert cell(notebook, "add")["metadata"]["deletable"] is False
    assert "editable" not in cell(notebook, "add")["metadata"]
    assert cell(notebook, "add-check")["metadata"]["editable"] is False
    assert cell(notebook, "why")["source"] == ["*Your answer here.*"]


def test_rebuild_gives_the_same_bytes(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    lab_bytes, source_bytes = lab.notebook.read_bytes(), lab.source.read_bytes()
    lab.notebook.unlink()
    assert build.build(lab, force=True) == build.Built(lab, "solution executed, lab written")
    assert (lab.notebook.read_bytes(), lab.source.read_bytes()) == (lab_bytes, source_bytes)
    assert build.build(lab).done == "unchanged"
    assert cli.main(["build", "--check"]) == 0
    assert capsys.readouterr().out == f"{LAB}: in step\n"


def drop_execution(notebook: dict) -> None:
    notebook["cells"][-1].update(execution_count=None, outputs=[])


def swap_order(notebook: dict) -> None:
    notebook["cells"][1]["execution_count"], notebook["cells"][2]["execution_count"] = 2, 1


def add_error(notebook: dict) -> None:
    notebook["cells"][-1]["outputs"] = [
        {"output_type": "error", "ename": "KeyError", "evalue": "1", "traceback": ["no"]},
    ]


def add_stderr(notebook: dict) -> None:
    notebook["cells"][-1]["outputs"] = [{"output_type": "stream", "name": "stderr", "text": ["warned\n"]}]


def change_text(notebook: dict) -> None:
    cell(notebook, "add")["source"].append("\n# more")


def change_id(notebook: dict) -> None:
    notebook["cells"][0]["id"] = "other"


def change_tags(notebook: dict) -> None:
    cell(notebook, "add")["metadata"]["tags"] = []


def drop_cell(notebook: dict) -> None:
    notebook["cells"].pop()


def change_kernel(notebook: dict) -> None:
    notebook["metadata"]["kernelspec"]["name"] = "other"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (drop_execution, "execution count None, expected 6"),
        (swap_order, "execution count 2, expected 1"),
        (add_error, "raised KeyError"),
        (add_stderr, "wrote to stderr: ['warned']"),
        (change_text, "cell add: its source differs"),
        (change_id, "its id differs"),
        (change_tags, "cell add: its metadata differs"),
        (drop_cell, "7 cells, the source has 8"),
        (change_kernel, "metadata 'kernelspec' differs"),
    ],
)
def test_check_catches_a_solution_out_of_step(
    lab: Lab, capsys: pytest.CaptureFixture[str], change: Callable[[dict], None], said: str
) -> None:
    edit(lab.solution, change)
    before = lab.solution.read_bytes()
    assert cli.main(["build", "--check"]) == 1
    assert said in capsys.readouterr().out
    assert lab.solution.read_bytes() == before, "--check writes nothing"


def test_check_catches_one_changed_byte_in_a_lab(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    lab.notebook.write_bytes(lab.notebook.read_bytes().replace(b'"A formula', b'"a formula'.upper()) + b" ")
    assert cli.main(["build", "--check"]) == 1
    assert f"labs/{LAB}.ipynb: not what the source gives" in capsys.readouterr().out


def test_the_picture_of_a_lab_is_kept_and_checked(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    drawing = "<svg xmlns='http://www.w3.org/2000/svg'/>"
    source = lab.source.read_text() + f'\n# %% tags=["picture"]\nfrom IPython.display import SVG\nSVG("{drawing}")\n'
    lab.source.write_text(source)
    assert cli.main(["build"]) == 0
    assert drawing.split()[0] in lab.picture.read_text()
    assert build.check(lab) == []
    lab.picture.write_text("another")
    assert "not what the solution shows" in " ".join(build.check(lab))


def test_check_catches_missing_notebooks(course: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["build", "--check", "90"]) == 1
    out = capsys.readouterr().out
    assert f"solutions/{LAB}.ipynb is missing" in out and f"labs/{LAB}.ipynb is missing" in out


def test_an_edited_source_is_built_again(lab: Lab) -> None:
    rewrite(lab, "SCALE = 10", "SCALE = 100")
    assert build.check(lab)
    assert build.build(lab).done == "solution executed, lab written"
    assert "300.0" in lab.solution.read_text() and build.check(lab) == []


def test_a_failing_solution_is_told_and_not_written(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    before = lab.solution.read_bytes(), lab.notebook.read_bytes()
    rewrite(lab, "\nadd_scaled(1, 2)", '\nadd_scaled(1, "two")')
    assert cli.main(["build"]) == 1
    assert '(add_scaled(1, "two")): TypeError: must be real number, not str' in capsys.readouterr().out
    assert (lab.solution.read_bytes(), lab.notebook.read_bytes()) == before


def test_a_solution_that_never_ends_is_stopped(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(lab, "\nadd_scaled(1, 2)", "\nwhile True:\n    pass")
    assert cli.main(["build", "--timeout", "8"]) == 1
    assert "(while True:): not done after 8 s" in capsys.readouterr().out


def test_an_edit_in_the_notebook_is_never_overwritten(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    edit(lab.solution, change_text)
    before = lab.solution.read_bytes()
    for arguments in (["build"], ["build", "--force"]):
        assert cli.main(arguments) == 2
        error = capsys.readouterr().err
        assert "was edited in the notebook" in error and f"build --from-notebook {LAB}" in error
    assert lab.solution.read_bytes() == before
    assert cli.main(["build", "--from-notebook", LAB]) == 0
    assert "    ### END SOLUTION\n# more\n" in lab.source.read_text()
    assert build.check(lab) == []


def test_edits_on_both_sides_are_refused(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    edit(lab.solution, change_text)
    rewrite(lab, "SCALE = 10", "SCALE = 100")
    before = lab.solution.read_bytes(), lab.source.read_bytes()
    assert cli.main(["build"]) == 2
    assert "edited both in the .py and in the notebook" in capsys.readouterr().err
    assert (lab.solution.read_bytes(), lab.source.read_bytes()) == before
    assert cli.main(["build", "--from-source", LAB]) == 0
    assert "# more" not in lab.solution.read_text() and "300.0" in lab.solution.read_text()


def test_a_learners_work_in_labs_is_not_overwritten(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    edit(lab.notebook, lambda notebook: cell(notebook, "add").update(source=["add = sum"]))
    rewrite(lab, "SCALE = 10", "SCALE = 100")
    assert cli.main(["build"]) == 2
    assert "was edited by hand and would be overwritten" in capsys.readouterr().err
    assert "add = sum" in lab.notebook.read_text()
    assert cli.main(["build", "--force"]) == 0
    assert "add = sum" not in lab.notebook.read_text()


def test_a_pair_edited_in_jupyterlab_stays_in_step(lab: Lab) -> None:
    """Opens and saves through jupytext's own contents manager, as JupyterLab does, with the .py the older file."""
    from jupyter_server.services.contents.largefilemanager import LargeFileManager
    from jupytext.sync_contentsmanager import build_sync_jupytext_contents_manager_class

    os.utime(lab.source, (1_000_000_000, 1_000_000_000))
    manager = build_sync_jupytext_contents_manager_class(LargeFileManager)(root_dir=str(lab.home))
    path = f"solutions/{LAB}.ipynb"
    model = manager.get(path)
    model["content"]["cells"][-1]["source"] = "add_scaled(1, 3)"
    manager.save(model, path)
    assert lab.source.read_text() == SOURCE.replace("\nadd_scaled(1, 2)\n", "\nadd_scaled(1, 3)\n")
    assert "30.0" in lab.solution.read_text(), "outputs are kept"
    assert not build.build(lab).problem
    assert build.check(lab) == []


ODD = """

# %% [markdown] tags=["a-tag"]
# Two sums: $$\\sum_{r=0}^{N-1} x_r \\quad\\text{and}\\quad a_{ij}^*$$
#
# | a | b |
# |---|---|
# | `x` | **y** |
#
#     indented

# %%
# %timeit -n 1 sum([1])
# !true
x = 1  # %matplotlib is not magic here

# %% nbgrader={"grade": false, "grade_id": "odd", "locked": false, "schema_version": 3, "solution": true, "task": false}
class Odd:
    # a comment

    def first(self):
        ### BEGIN SOLUTION
        text = '''
# %% not a cell
'''
        return text
        ### END SOLUTION
# %%
x
"""


def test_round_trip_is_byte_identical(course: Path) -> None:
    """py -> notebook -> its file -> py, with magics, formulas, tags, grading metadata and odd blank lines."""
    lab = find_lab(LAB)
    for text in (SOURCE, SOURCE.rstrip("\n") + ODD.replace("\n# %% not a cell\n", "\n# not a cell\n")):
        lab.source.write_text(text)
        notebook = read_source(lab.source)
        assert write_source(notebook, lab.source) == text
        build.write(lab.solution, build.notebook_text(notebook))
        assert build.take_from_notebook(lab) is False
        assert lab.source.read_text() == text
        assert in_normal_form(notebook, lab.source)
    assert "%timeit -n 1 sum([1])\n!true" in [c.source for c in read_notebook(lab.solution).cells][9]


def test_build_puts_a_source_in_jupytexts_form(lab: Lab) -> None:
    rewrite(lab, '"grade": false, "grade_id": "add",', '"grade_id": "add", "grade": false,')
    assert build.check(lab) == [f"solutions/{LAB}.py: not in the form that jupytext writes"]
    assert build.build(lab).done == "source put in jupytext's own form"
    assert lab.source.read_text() == SOURCE and build.check(lab) == []


def test_a_source_without_a_header_gets_one(lab: Lab) -> None:
    lab.source.write_text(SOURCE[SOURCE.index("# %% [markdown]") :])
    assert build.build(lab).done == "source put in jupytext's own form"
    header = lab.source.read_text().split("# ---\n")[1]
    assert "formats: ipynb,py:percent" in header and "name: python3" in header
    assert build.check(lab) == []


def test_a_kernel_that_dies_is_told(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(lab, "\nadd_scaled(1, 2)", "\nimport os; os._exit(1)")
    assert cli.main(["build"]) == 1
    assert "(import os; os._exit(1)): the kernel died" in capsys.readouterr().out
