"""The meter against the wire: what the kernel counts on the network interface while a ring, or a ZeRO step, runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CANNOT = 77
N_BYTES = 4 << 20


@pytest.fixture(scope="module")
def counted() -> dict:
    """Bytes by the kernel ("wire") and by the meter, of all ranks, by operation and world size."""
    if not sys.platform.startswith("linux"):
        pytest.skip("network namespaces are a matter of Linux")
    package = str(HERE.parent / "shared")
    probe = subprocess.run(
        [sys.executable, str(HERE / "wire_probe.py")],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "PYTHONPATH": package},
    )
    if probe.returncode == CANNOT:
        pytest.skip(f"no network namespace can be made here ({probe.stdout.strip()})")
    assert probe.returncode == 0, probe.stdout + probe.stderr
    return json.loads(probe.stdout.splitlines()[-1])


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_ring_sends_what_the_meter_says(counted, n):
    seen = counted[f"ring_all_reduce {n}"]
    assert seen["meter"] == pytest.approx(2 * (n - 1) * N_BYTES, rel=1e-5)  # of all ranks: N times 2(N-1)/N n
    assert seen["wire"] == pytest.approx(seen["meter"], rel=0.02)
    assert seen["wire"] > seen["meter"]  # every packet has a header


@pytest.mark.parametrize(("stage", "times"), [("Zero1", 2), ("Zero2", 2), ("Zero3", 3)])
def test_a_step_of_zero_sends_what_the_meter_says(counted, stage, times):
    """On own rings, of all three ranks: 2 or 3 times (N-1) psi."""
    seen = counted[stage]
    assert seen["meter"] == pytest.approx(times * 2 * N_BYTES, rel=1e-3)
    assert seen["meter"] < seen["wire"] < 1.02 * seen["meter"]


def test_the_library_sends_more_than_the_published_cost(counted):
    """Gloo makes a reduce-scatter out of all-reduces; the meter states the published cost. So the test can fail."""
    seen = counted["reduce_scatter 4"]
    assert seen["meter"] == 4 * 0.75 * N_BYTES
    assert seen["wire"] / seen["meter"] > 1.2
