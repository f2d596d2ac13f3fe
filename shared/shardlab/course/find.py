"""Where the course and its labs are.

A course is a folder with `solutions/` (sources) and `labs/` (what a learner opens). A lab is one name, `NN_words`.
"""

from __future__ import annotations

import difflib
import importlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from shardlab.errors import UsageError

LAB_NAME = re.compile(r"\d\d_\w+")


@dataclass(frozen=True)
class Lab:
    """One lab of the course at `home`; the files need not exist."""

    name: str
    home: Path

    @property
    def source(self) -> Path:
        """The one source, jupytext py:percent."""
        return self.home / "solutions" / f"{self.name}.py"

    @property
    def solution(self) -> Path:
        """The executed solution notebook, generated."""
        return self.home / "solutions" / f"{self.name}.ipynb"

    @property
    def notebook(self) -> Path:
        """What a learner opens, generated."""
        return self.home / "labs" / f"{self.name}.ipynb"

    @property
    def picture(self) -> Path:
        """The picture that README.md shows, from the executed solution."""
        return self.home / "shared" / "pictures" / f"{self.name}.svg"

    @property
    def title(self) -> str:
        """The first heading of the lab, or "" when there is none."""
        if self.source.exists():
            lines = self.source.read_text(encoding="utf-8").splitlines()
            found = (re.match(r"# # (.+)", line) for line in lines)
        elif self.notebook.exists():
            cells = json.loads(self.notebook.read_text(encoding="utf-8"))["cells"]
            found = (re.match(r"# (.+)", "".join(cell["source"])) for cell in cells)
        else:
            return ""
        return next((match.group(1).strip() for match in found if match), "")


def find_course() -> Path:
    """The course's folder: $SHARDLAB_HOME, else the working folder or one above it, else where the package lies."""
    named = os.environ.get("SHARDLAB_HOME")
    if named:
        home = Path(named).expanduser().resolve()
        if not _holds_labs(home):
            raise UsageError(f"SHARDLAB_HOME is {named}, which has no solutions/ or labs/ folder")
        return home
    here, package = Path.cwd(), Path(__file__).resolve()
    for folder in [here, *here.parents, *package.parents]:
        if _holds_labs(folder) and (folder / "shared" / "shardlab").is_dir():
            return folder
    raise UsageError(f"no course found at or above {here}; go to its folder, or set SHARDLAB_HOME to it")


def find_labs(home: Path | None = None) -> list[Lab]:
    """Every lab of the course, in order."""
    home = home or find_course()
    files = [*home.glob("solutions/*.py"), *home.glob("labs/*.ipynb")]
    names = {file.stem for file in files if LAB_NAME.fullmatch(file.stem)}
    return [Lab(name, home) for name in sorted(names)]


def find_lab(name: str | os.PathLike[str], home: Path | None = None) -> Lab:
    """The lab called `name`: in full ("04_ring_all_reduce"), by number ("04"), or as a path to one of its files."""
    labs = {lab.name: lab for lab in find_labs(home)}
    stem = Path(name).stem
    if stem in labs:
        return labs[stem]
    by_number = [lab for lab in labs.values() if lab.name.split("_")[0] == stem]
    if len(by_number) == 1:
        return by_number[0]
    raise UsageError(f"no lab called {str(name)!r}; {_closest(stem, list(labs))}")


def choose_labs(names: list[str], home: Path | None = None) -> list[Lab]:
    """The labs called `names`, or all of them when there are no names."""
    home = home or find_course()
    labs = [find_lab(name, home) for name in names] if names else find_labs(home)
    if not labs:
        raise UsageError(f"{home} has no labs: nothing matches solutions/NN_name.py")
    return labs


def need(module: str, what_for: str) -> ModuleType:
    """Imports a tool that may not be installed; says in one line what to install when it is not."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or module).split(".")[0]
        raise UsageError(
            f"{what_for} needs {missing}, which is not installed; try: pip install -r requirements-dev.txt"
        ) from error


def _holds_labs(folder: Path) -> bool:
    return (folder / "solutions").is_dir() or (folder / "labs").is_dir()


def _closest(name: str, names: list[str]) -> str:
    if not names:
        return "the course has no labs"
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    return f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(names)}"
