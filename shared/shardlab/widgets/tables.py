"""Small tables, the same to the letter every time, in text and in HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from shardlab.errors import UsageError
from shardlab.widgets.units import number_text

Row = Mapping[str, Any] | Sequence[Any]


@dataclass(frozen=True)
class Table:
    """Rows of ready text under column heads. `numeric` says which columns are numbers and align right."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[bool, ...]
    title: str = ""

    def __str__(self) -> str:
        table = (self.columns, *self.rows)
        widths = [max(len(row[i]) for row in table) for i in range(len(self.columns))]

        def line(row: tuple[str, ...]) -> str:
            cells = (
                cell.rjust(width) if number else cell.ljust(width)
                for cell, width, number in zip(row, widths, self.numeric, strict=True)
            )
            return "  ".join(cells).rstrip()

        rule = "  ".join("-" * width for width in widths)
        head = [self.title] if self.title else []
        return "\n".join([*head, line(self.columns), rule, *map(line, self.rows)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def cells(row: tuple[str, ...], tag: str) -> str:
            return "".join(
                f'<{tag} style="text-align: {"right" if number else "left"}">{escape(cell)}</{tag}>'
                for cell, number in zip(row, self.numeric, strict=True)
            )

        caption = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in self.rows)
        return f"<table>{caption}<thead><tr>{cells(self.columns, 'th')}</tr></thead><tbody>{body}</tbody></table>"


def table(
    rows: Sequence[Row],
    columns: Sequence[str] | None = None,
    *,
    title: str = "",
    equal: tuple[str, str] | None = None,
) -> Table:
    """A table of rows (mappings by column name, or sequences in column order).

    Whole numbers are written in full, other numbers with four significant digits, None as "-". With
    equal=("predicted", "measured") a last column says whether these two are equal, for every row that has both.
    """
    rows = list(rows)
    if columns is None:
        if not rows or not isinstance(rows[0], Mapping):
            raise UsageError("table(rows): rows are not mappings, so say what the columns are: table(rows, columns)")
        columns = list(rows[0])
    columns = tuple(columns)
    values = [_values(row, columns) for row in rows]
    if equal:
        unknown = [name for name in equal if name not in columns]
        if unknown:
            raise UsageError(f"table(equal={equal}): no column {unknown[0]!r}; columns are {', '.join(columns)}")
        first, second = (columns.index(name) for name in equal)
        values = [(*row, _verdict(row[first], row[second])) for row in values]
        columns = (*columns, "equal")
    numeric = tuple(all(_is_number(row[i]) or row[i] is None for row in values) for i in range(len(columns)))
    return Table(columns, tuple(tuple(map(cell_text, row)) for row in values), numeric, title)


def cell_text(value: Any) -> str:
    if value is None:
        return "-"
    return number_text(value) if _is_number(value) else str(value)


def _values(row: Row, columns: tuple[str, ...]) -> tuple[Any, ...]:
    if isinstance(row, Mapping):
        return tuple(row.get(column) for column in columns)
    if len(row) != len(columns):
        raise UsageError(f"table: a row has {len(row)} values, expected {len(columns)}: {', '.join(columns)}")
    return tuple(row)


def _verdict(first: Any, second: Any) -> str | None:
    if first is None or second is None:
        return None
    return "yes" if first == second else "NO"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
