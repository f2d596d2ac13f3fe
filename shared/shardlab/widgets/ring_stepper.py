"""A ring run to step through: a live widget in JupyterLab, a page of its own in exported HTML, a picture elsewhere."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from shardlab.records import RingTrace
from shardlab.widgets.colours import rank_look
from shardlab.widgets.ring_frames import frame_data, frames_of
from shardlab.widgets.ring_svg import ring_svg
from shardlab.widgets.saved import live_html

HERE = Path(__file__).parent
SCRIPT = "\n".join((HERE / name).read_text(encoding="utf-8") for name in ("ring_drawing.js", "ring_stepper.js"))


class RingStepper(anywidget.AnyWidget):
    """Steps through a RingTrace. `step` is shared by all views of one widget and by Python."""

    _esm = SCRIPT
    title = traitlets.Unicode().tag(sync=True)
    world_size = traitlets.Int().tag(sync=True)
    frames: traitlets.List[Any] = traitlets.List().tag(sync=True)
    looks: traitlets.List[Any] = traitlets.List().tag(sync=True)
    step = traitlets.Int(0).tag(sync=True)

    def __init__(self, trace: RingTrace) -> None:
        """UsageError when the trace has no steps, more than 16 ranks, or steps of different shapes."""
        self.trace = trace
        self._frames = frames_of(trace)
        super().__init__(
            title=trace.title,
            world_size=trace.world_size,
            frames=[frame_data(frame) for frame in self._frames],
            looks=[asdict(rank_look(rank)) for rank in range(trace.world_size)],
        )

    @traitlets.validate("step")
    def _step_within(self, proposal: dict[str, Any]) -> int:
        return max(0, min(len(self._frames) - 1, proposal["value"]))

    @property
    def caption(self) -> str:
        """What the current step does, in words."""
        return self._frames[self.step].caption

    def __repr__(self) -> str:
        last = self._frames[-1]
        cells = sum(map(len, last.cells))
        wrong = f", {last.wrong} wrong" if last.wrong else ""
        return (
            f"{self.trace.title}: {self.trace.world_size} ranks, {len(self._frames) - 1} steps; "
            f"at the end {last.complete} of {cells} chunks complete{wrong}. Run the cell to step through it"
        )

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
        # A notebook shows the first of these it can: the live widget; the same drawing without a kernel; a picture.
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None:
            return None
        data, metadata = bundle
        picture = ring_svg(self.trace, self._frames)
        values = {name: getattr(self, name) for name in ("title", "world_size", "frames", "looks", "step")}
        data["text/html"] = live_html(SCRIPT, values, picture)
        data["image/svg+xml"] = picture
        data["text/plain"] = repr(self)
        return data, metadata
