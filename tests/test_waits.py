"""The picture of who waited for whom."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from shardlab.errors import LaunchError
from shardlab.records import Standing

SVG = "{http://www.w3.org/2000/svg}"


def standing(rank: int, *waits_for: int, doing: str = "waiting", blamed: bool = False) -> Standing:
    call = f"send to rank {waits_for[0]} (8 float32)" if waits_for else ""
    return Standing(rank, doing, call, "cell In[3], line 4", "dist.send(a < b, 'x')", waits_for, blamed)


def picture(*ranks: Standing):
    return LaunchError("Deadlock: 0 -> 1 & <more>.\n  details", "deadlock", 0, ranks=ranks).why()


def test_ranks_are_nodes_and_waits_are_arrows() -> None:
    shown = picture(standing(0, 1, blamed=True), standing(1, 2), standing(2, 0), standing(3, doing="finished"))
    root = ElementTree.fromstring(shown._repr_svg_())
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert {"0", "1", "2", "3"} <= set(texts)
    assert len(list(root.iter(f"{SVG}path"))) == len(list(root.iter(f"{SVG}polygon"))) == 3
    assert len(list(root.iter(f"{SVG}circle"))) == 4 + 1  # one is ringed
    assert root.get("aria-label") == texts[0] == "Deadlock: 0 -> 1 & <more>."
    assert "rank 0 waits for rank 1: send to rank 1 (8 float32)" in texts
    assert "rank 3 finished" in texts
    assert "rank 1 waits for rank 2" in repr(shown)


def rings(shown) -> int:
    circles = ElementTree.fromstring(shown._repr_svg_()).iter(f"{SVG}circle")
    return sum(circle.get("fill") == "none" for circle in circles)


def test_in_a_circle_nobody_is_blamed() -> None:
    circle = picture(standing(0, 1, blamed=True), standing(1, 2), standing(2, 0))
    assert rings(circle) == 0 and all(not rank.blamed for rank in circle.ranks)
    # Ranks 1 and 2 wait for rank 0, which waits for nobody; then a circle that rank 2 does not belong to.
    assert rings(picture(standing(0, doing="computing", blamed=True), standing(1, 0), standing(2, 0))) == 1
    assert rings(picture(standing(0, 1, blamed=True), standing(1, 0), standing(2, 0))) == 1


def test_it_survives_strict_sanitizers() -> None:
    text = picture(standing(0, 1), standing(1, 0))._repr_svg_()
    assert all(word not in text for word in ("<style", "<script", " id=", "url(", "marker"))


@pytest.mark.parametrize("world_size", [1, 2, 64, 512])
def test_any_number_of_ranks(world_size: int) -> None:
    everyone = tuple(range(1, world_size))
    ranks = [standing(0, *everyone[:3]), *(standing(rank, doing="finished") for rank in everyone)]
    text = picture(*ranks)._repr_svg_()
    root = ElementTree.fromstring(text)
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for circle in root.iter(f"{SVG}circle"):
        assert 0 < float(circle.get("cx", 0)) < width and 0 < float(circle.get("cy", 0)) < height


def test_no_ranks_are_drawn_when_none_had_started() -> None:
    ElementTree.fromstring(picture()._repr_svg_())
