"""A lab's picture for the README: the SVG that its cell tagged `picture` showed when the solution was executed."""

from __future__ import annotations

from typing import Any

from shardlab.course.source import tags

SVG = "image/svg+xml"


def picture_of(notebook: Any) -> str | None:
    """The picture of an executed solution, or None when no cell tagged `picture` showed an SVG."""
    for cell in notebook.cells:
        if "picture" in tags(cell):
            for output in cell.get("outputs", []):
                if SVG in output.get("data", {}):
                    return "".join(output["data"][SVG])
    return None
