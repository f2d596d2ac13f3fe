"""The picture of what devices send to each other."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
import torch

from shardlab import launch_devices, move
from shardlab.errors import UsageError
from shardlab.records import Run
from shardlab.widgets.device_traffic import device_traffic

SVG = "{http://www.w3.org/2000/svg}"


def star(devices):
    """Device 1 is the busy one: it sends 400 bytes to each other device, and gets 80 back."""
    weights = torch.ones(100).to(devices[1])
    for device in devices:
        if device is not devices[1]:
            there = move(weights, device, "parameters")
            move(there[:20], devices[1], "gradients")
            move(there[:5], devices[1], "losses")


@pytest.fixture(scope="module")
def run() -> Run:
    return launch_devices(star, 3, device="cpu", timeout=20)


def test_it_tells_what_was_moved(run):
    picture = device_traffic(run, "a star")
    assert picture.root == 1
    assert picture.exchanged == ((400, 100), (0, 0), (400, 100))
    assert picture.carried[1].sent == {"parameters": 800, "gradients": 0, "other": 0}
    assert picture.carried[1].received == {"parameters": 0, "gradients": 160, "other": 40}
    assert repr(picture).splitlines() == [
        "a star",
        "device 0: received 400 bytes, sent 100 bytes",
        "device 1: received 200 bytes, sent 800 bytes",
        "device 2: received 400 bytes, sent 100 bytes",
    ]


def test_the_drawing_is_plain_and_the_same_each_time(run):
    first, again = (device_traffic(run)._repr_mimebundle_()["image/svg+xml"] for _ in range(2))
    root = ElementTree.fromstring(first)
    assert first == again and {each.tag for each in root.iter()} <= {
        f"{SVG}{tag}" for tag in ("svg", "rect", "path", "text")
    }
    assert "id=" not in first and "style" not in first and len(first) < 20_000
    texts = [each.text for each in root.iter(f"{SVG}text")]
    assert texts.count("400 B: parameters, batch") == 2 and texts.count("100 B: gradients, loss") == 2
    bars = [float(each.get("width")) for each in root.iter(f"{SVG}rect") if each.get("height") == "16"]
    assert max(bars) == 320 and sum(width == 160 for width in bars) == 2  # 800 bytes, and twice 400


def test_the_longest_bar_is_the_devices_own(run):
    drawing = device_traffic(run)._repr_mimebundle_()["image/svg+xml"]
    assert 'aria-label="one training step: device 0: received 400 bytes' in drawing


def test_what_cannot_be_drawn_is_refused():
    for wrong in (
        Run(2, "cpu", "gloo", 0.0, [None, None]),
        launch_devices(lambda devices: None, 2, device="cpu"),
        launch_devices(star, 9, device="cpu"),
    ):
        with pytest.raises(UsageError, match="device_traffic draws"):
            device_traffic(wrong)
