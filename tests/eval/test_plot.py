"""The picture: where points and labels stand."""

from xml.etree import ElementTree

import pytest

from npmoe.eval.plot import LABEL_HEIGHT, Axis, label_heights, scatter_svg, ticks

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 4, [0, 1, 2, 3, 4]),
        (0, 1000, [0, 200, 400, 600, 800, 1000]),
        (1150, 8190, [2000, 3000, 4000, 5000, 6000, 7000, 8000]),
        (3.0, 3.04, [3.0, 3.01, 3.02, 3.03, 3.04]),
    ],
)
def test_ticks(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_an_axis() -> None:
    axis = Axis([0, 100], 0, 1160)  # a margin of 8 on both sides: ten pixels a unit
    assert (axis.at(0), axis.at(100)) == (80, 1080)
    assert Axis([5, 5], 0, 100).at(5) == 50


def test_labels_do_not_overlap() -> None:
    spots = [("a", 10.0, 50.0), ("b", 12.0, 52.0), ("c", 500.0, 51.0)]
    assert label_heights(spots) == [50, 50 + LABEL_HEIGHT, 51]


def test_every_point_is_drawn_and_named() -> None:
    points = [("bf16", 4096.0, 3.0), ("fp4", 1152.0, 3.2), ("<k,v>", 1152.0, 3.2)]
    root = ElementTree.fromstring(scatter_svg(points, "title", "bytes", "loss"))
    circles = root.findall(f"{SVG}circle")
    places = [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in circles]
    bf16, fp4, other = places
    assert bf16[0] > fp4[0]
    assert bf16[1] > fp4[1]  # less loss stands lower, and y grows downwards
    assert fp4 == other
    texts = {t.text for t in root.findall(f"{SVG}text")}
    assert {"bf16", "fp4", "<k,v>", "title", "bytes", "loss"} <= texts


def test_a_single_point() -> None:
    root = ElementTree.fromstring(scatter_svg([("bf16", 4096.0, 3.0)], "t", "x", "y"))
    assert len(root.findall(f"{SVG}circle")) == 1
