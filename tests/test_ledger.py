"""The ledger: rows that labs record, kept in a file from lab to lab."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardlab.errors import UsageError
from shardlab.ledger import VARIABLE, LedgerRow, record


def row(lab: str, world_size: int = 4, strategy: str = "DDP", held: int = 16) -> LedgerRow:
    return LedgerRow(lab, strategy, world_size, held, 16.0, 6.0, 6.0, 3, "the slowest link")


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "kept" / "ledger.json"
    monkeypatch.setenv(VARIABLE, str(path))
    return path


def test_rows_are_kept_from_lab_to_lab() -> None:
    record(row("01"))
    record(row("03", strategy="per parameter"), row("03", strategy="flat"))
    ledger = record(row("02"))
    assert [one.lab for one in ledger.rows] == ["01", "02"], "later labs are not shown in an earlier one"
    ledger = record(row("04"))
    assert [(one.lab, one.strategy) for one in ledger.rows] == [
        ("01", "DDP"),
        ("02", "DDP"),
        ("03", "per parameter"),
        ("03", "flat"),
        ("04", "DDP"),
    ]


def test_recording_again_replaces_what_the_lab_had_recorded() -> None:
    record(row("03", strategy="per parameter"), row("03", strategy="flat"))
    ledger = record(row("03", held=17))
    assert [(one.strategy, one.held) for one in ledger.rows] == [("DDP", 17)]


def test_world_sizes_are_kept_apart() -> None:
    record(row("01", world_size=2))
    assert len(record(row("02", world_size=4)).rows) == 1
    assert len(record(row("02", world_size=2)).rows) == 2


def test_the_table_says_what_was_measured_beside_the_formula() -> None:
    ledger = record(row("01"))
    lines = repr(ledger).splitlines()
    assert lines[0] == "The ledger, N = 4; bytes of one rank, per step"
    assert lines[1].split("  ") and "held, formula" in lines[1] and "limited by" in lines[1]
    assert lines[3].split() == ["01", "DDP", "16", "16", "6", "6", "3", "the", "slowest", "link"]
    assert lines[1].split()[-3:] == ["calls", "limited", "by"], "a send is a call, and so is a library's collective"
    assert "<table" in ledger._repr_html_()


def test_parts_of_bytes_are_shown_as_whole_bytes() -> None:
    shown = repr(record(LedgerRow("03", "DDP", 3, 16, 16.0, 294917.3, 294912.0, 2)))
    assert "294,917" in shown and "294,912" in shown and "e+05" not in shown


def test_rows_of_two_labs_or_none_are_refused() -> None:
    for rows in ((), (row("01"), row("02")), (row("01"), row("01", world_size=2))):
        with pytest.raises(UsageError, match="one lab at one world size"):
            record(*rows)


@pytest.mark.parametrize("content", ["not json", "[1]", '[{"lab": "01"}]', "{}x"])
def test_a_file_that_is_no_ledger_is_left_alone(file: Path, content: str) -> None:
    file.parent.mkdir()
    file.write_text(content)
    with pytest.raises(UsageError, match="is not a ledger"):
        record(row("01"))
    assert file.read_text() == content


def test_the_file_is_plain_json_and_nothing_else_is_left(file: Path) -> None:
    record(row("01"))
    assert [one["lab"] for one in json.loads(file.read_text())] == ["01"]
    assert list(file.parent.iterdir()) == [file]


def test_without_the_variable_it_lies_beside_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    monkeypatch.chdir(tmp_path)
    record(row("01"))
    assert (tmp_path / "ledger.json").exists()
