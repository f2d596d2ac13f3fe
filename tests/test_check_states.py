"""Checks of lab 01 beside the zoo."""

from __future__ import annotations

import pytest

from shardlab.checks import check
from shardlab.errors import CheckFailed
from zoo.states_engine import Engine


def test_an_engine_instead_of_its_class() -> None:
    with pytest.raises(CheckFailed, match=r"(?s)signature.*object of type Engine.*the class itself"):
        check("01.MixedPrecisionAdam", Engine([]))  # type: ignore[arg-type]
