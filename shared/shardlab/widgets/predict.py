"""Predict, then measure: a small form for a number, and the number beside the measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from shardlab.theory import format_bytes
from shardlab.widgets.tables import table
from shardlab.widgets.units import number_text, parse_number

# What was typed, by question, for as long as the kernel lives: running a notebook again loses no prediction.
_typed: dict[str, str] = {}


def predict(question: str, unit: str = "", **names: float) -> Prediction:
    """Shows a field for a prediction and returns it. `names` may be used in the answer: predict("...", N=4, n=10**6).

    A number, a size ("3 MB", "3 MiB") or arithmetic ("2*(N-1)/N*n") can be typed; nothing typed is ever run as code.
    """
    prediction = Prediction(question, unit, names)
    prediction.show_once()
    return prediction


@dataclass(frozen=True)
class Comparison:
    """A prediction beside its measurement. Without a prediction (nobody typed one) it says so and judges nothing.

    unread: what was typed, where it could not be read as a number, and why.
    """

    question: str
    unit: str
    predicted: float | None
    measured: float
    unread: str = ""

    @property
    def ratio(self) -> float | None:
        """Prediction over measurement; None without a prediction, or when nothing was measured."""
        return None if self.predicted is None or not self.measured else self.predicted / self.measured

    @property
    def sentence(self) -> str:
        if self.unread:
            return f"Your prediction could not be read: {self.unread}."
        if self.predicted is None:
            return "No prediction was made."
        if self.predicted == self.measured:
            return "Exactly as predicted."
        if self.ratio is None or self.ratio <= 0:
            return "The prediction is far from the measurement."
        if abs(self.ratio - 1) < 0.01:
            return "Within 1 % of the measurement, but not equal: what makes the difference?"
        if self.ratio > 1:
            return f"The prediction is {self.ratio:.3g} times the measurement: less happened than you thought."
        return f"The measurement is {1 / self.ratio:.3g} times the prediction: more happened than you thought."

    def _table(self) -> Any:
        nothing = "not a number" if self.unread else "no prediction"
        predicted = nothing if self.predicted is None else with_unit(self.predicted, self.unit)
        ratio = "-" if self.ratio is None else f"{self.ratio:.3g}"
        row = (predicted, with_unit(self.measured, self.unit), ratio)
        return table([row], ("prediction", "measured", "ratio"), title=self.question)

    def __repr__(self) -> str:
        return f"{self._table()}\n{self.sentence}"

    def _repr_html_(self) -> str:
        return f"{self._table()._repr_html_()}<p>{escape(self.sentence)}</p>"


class Prediction:
    """A question with a field for the answer. `value` is the number, or None as long as there is none."""

    def __init__(self, question: str, unit: str = "", names: Mapping[str, float] | None = None) -> None:
        self.question, self.unit, self.names = question, unit, dict(names or {})
        self._form: Any = None
        self._shown_at: int | None = None

    @property
    def text(self) -> str:
        """What was typed. Setting it is the same as typing."""
        return _typed.get(self.question, "")

    @text.setter
    def text(self, text: str) -> None:
        _typed[self.question] = text
        if self._form is not None and self.field.value != text:
            self.field.value = text

    @property
    def value(self) -> float | None:
        try:
            return parse_number(self.text, self.names)
        except ValueError:
            return None

    def compare(self, measured: float) -> Comparison:
        """The prediction beside `measured` (same unit), as a table for the last line of a cell."""
        return Comparison(self.question, self.unit, self.value, measured, self._unread())

    def _unread(self) -> str:
        """What was typed and why it is no number; "" when it is one, or nothing was typed."""
        try:
            parse_number(self.text, self.names)
        except ValueError as problem:
            typed = repr(self.text.strip())
            why = str(problem)
            return "" if typed == "''" else why if typed in why else f"{typed}: {why}"
        return ""

    @property
    def field(self) -> Any:
        """The ipywidgets.Text to type in."""
        return self.form.children[1].children[0]

    @property
    def form(self) -> Any:
        if self._form is None:
            self._form = self._build()
        return self._form

    def _build(self) -> Any:
        import ipywidgets

        wide = ipywidgets.Layout(width="auto")
        head = ipywidgets.HTML(f"<b>Predict:</b> {escape(self._asked())}", layout=wide)
        field = ipywidgets.Text(
            value=self.text,
            placeholder="a number, or arithmetic",
            layout=ipywidgets.Layout(width="16em"),
            tooltip=f"Your prediction: {self._asked()}",
        )
        reading = ipywidgets.HTML(self._reading(), layout=wide)

        def typed(change: dict[str, Any]) -> None:
            self.text = change["new"]
            reading.value = self._reading()

        field.observe(typed, names="value")
        return ipywidgets.VBox([head, ipywidgets.HBox([field, reading])])

    def _asked(self) -> str:
        given = ", ".join(f"{name} = {number_text(value)}" for name, value in self.names.items())
        unit = f" [{self.unit}]" if self.unit else ""
        return f"{self.question}{unit}" + (f"; you can use {given}" if given else "")

    def _reading(self) -> str:
        """How the form understood what was typed."""
        try:
            return escape(f"= {with_unit(parse_number(self.text, self.names), self.unit)}")
        except ValueError as problem:
            return escape(str(problem))

    def __repr__(self) -> str:
        answer = "no prediction" if self.value is None else with_unit(self.value, self.unit)
        return f"Predict: {self._asked()}: {answer}"

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        # The HTML is for saved notebooks and exported pages, where there is no kernel to type to.
        data, metadata = self.form._repr_mimebundle_(**kwargs), {}
        if isinstance(data, tuple):
            data, metadata = data
        head, _, answer = repr(self).rpartition(": ")
        html = f"<p>{escape(head)}: <b>{escape(answer)}</b></p>"
        return {**data, "text/plain": repr(self), "text/html": html}, metadata

    def show_once(self) -> None:
        """Displays the form, in a notebook only. As the last line of the same cell it isn't displayed again."""
        self._ipython_display_()

    def _ipython_display_(self) -> None:
        shell = _shell()
        if shell is None or self._shown_at == shell.execution_count:
            return
        self._shown_at = shell.execution_count
        from IPython.display import display

        display(*self._repr_mimebundle_()[:1], raw=True)


def _shell() -> Any:
    try:
        from IPython import get_ipython
    except ImportError:
        return None
    return get_ipython()


def with_unit(value: float, unit: str) -> str:
    """A number and its unit; bytes also in a size that can be read at a glance."""
    exact = f"{number_text(value)} {unit}".strip()
    return f"{exact} ({format_bytes(value)})" if unit == "bytes" and value >= 1000 else exact
