"""A rank can ask how much it holds while it runs."""

from __future__ import annotations

import pytest
import torch

from shardlab.meters import memory_so_far
from shardlab.runtime import launch


def test_now_and_a_moment_ago() -> None:
    def hold():
        before = memory_so_far().at_end.live
        kept = torch.zeros(1000)
        during = memory_so_far()
        del kept
        after = memory_so_far()
        return during.at_end.live - before, after.at_end.live - before, after.peak - during.at_end.live

    grown, left, higher = launch(hold, 1, device="cpu").results[0]
    assert (grown, left) == (4000, 0)
    assert higher >= 0


def test_elsewhere_it_says_so() -> None:
    with pytest.raises(RuntimeError, match="inside a rank"):
        memory_so_far()
