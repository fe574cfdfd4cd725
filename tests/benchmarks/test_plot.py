"""The SVG writer: well-formed, inside of its frame, and honest about what it cannot show."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from plot import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, line_plot

SVG = "{http://www.w3.org/2000/svg}"
LINES = {
    "a < b & c": [(1000.0, 12.0), (4000.0, 13.5), (131072.0, 60.0)],
    "eager": [(1000.0, 30.0), (131072.0, 700.0)],
    "close": [(1000.0, 31.0), (131072.0, 690.0)],
}


def drawn(path: Path, **options: bool) -> ElementTree.Element:
    line_plot(path, "Title", "tokens", "ms", LINES, **options)
    return ElementTree.parse(path).getroot()


@pytest.mark.parametrize("log_x", [True, False])
@pytest.mark.parametrize("log_y", [True, False])
def test_every_point_lies_in_the_frame_and_in_order(
    tmp_path: Path, log_x: bool, log_y: bool
) -> None:
    root = drawn(tmp_path / "made" / "plot.svg", log_x=log_x, log_y=log_y)
    lines = root.findall(f"{SVG}polyline")
    assert len(lines) == len(LINES)
    for line, points in zip(lines, LINES.values(), strict=True):
        places = [tuple(map(float, each.split(","))) for each in line.attrib["points"].split()]
        assert len(places) == len(points)
        assert places == sorted(places, key=lambda place: place[0])
        # Larger values lie higher: SVG's y runs down.
        assert places == sorted(places, key=lambda place: -place[1])
        for x, y in places:
            assert LEFT <= x <= WIDTH - RIGHT
            assert TOP <= y <= HEIGHT - BOTTOM


def test_names_are_escaped_and_never_lie_over_another(tmp_path: Path) -> None:
    texts = {text.text: text for text in drawn(tmp_path / "plot.svg").findall(f"{SVG}text")}
    assert set(LINES) < set(texts)
    heights = sorted(float(texts[name].attrib["y"]) for name in LINES)
    assert all(later - earlier >= 12 for earlier, later in pairwise(heights))


def test_ticks_are_where_their_values_are(tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    line_plot(path, "", "x", "y", {"line": [(0.0, 0.0), (10.0, 100.0)]})
    texts = ElementTree.parse(path).getroot().findall(f"{SVG}text")
    heights = {
        text.text: float(text.attrib["y"]) - 4
        for text in texts
        if text.attrib.get("text-anchor") == "end"
    }
    assert heights["0"] == HEIGHT - BOTTOM
    assert heights["100"] == TOP
    assert heights["40"] == pytest.approx(HEIGHT - BOTTOM - 0.4 * (HEIGHT - BOTTOM - TOP), abs=0.1)


@pytest.mark.parametrize("points", [[(1.0, 1.0)], [(5.0, 0.0), (5.0, 0.0)], [(-3.0, -2.0)]])
def test_a_single_value_is_drawn(tmp_path: Path, points: list[tuple[float, float]]) -> None:
    line_plot(tmp_path / "plot.svg", "", "x", "y", {"line": points})
    assert "circle" in (tmp_path / "plot.svg").read_text()


def test_what_an_axis_cannot_show_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leave the point out"):
        line_plot(tmp_path / "plot.svg", "", "x", "y", {"line": [(0.0, 1.0)]}, log_x=True)
    with pytest.raises(ValueError, match="nothing to plot"):
        line_plot(tmp_path / "plot.svg", "", "x", "y", {"line": []})
