"""The picture: well-formed, complete, and readable without colours."""

from __future__ import annotations

import sys
from xml.etree import ElementTree

import pytest

from bpipe.cli import main
from bpipe.draw import png
from bpipe.draw.picture import STYLES, lay_out
from bpipe.draw.svg import write_svg
from bpipe.program import ProgramConfig, build
from bpipe.simulate.memory import live_counts

BALANCED = build(ProgramConfig("1f1b", 4, 8, balance="bpipe"))
SVG = "{http://www.w3.org/2000/svg}"


def test_every_action_and_bubble_is_drawn() -> None:
    picture = lay_out(BALANCED)
    words = [word.text for word in picture.words]
    for kind, count in (("F", 32), ("B", 32), ("E", 3), ("H", 3), ("L", 3), ("R", 3)):
        assert sum(word[0] == kind and word[1:].isdigit() for word in words) == count
    assert sum(shape.style == "bubble" for shape in picture.shapes) == 4 * 22 - 64 + 1, "the legend has one more"
    assert {"peak 3 of 3", "peak 2 of 3"} <= set(words)


def test_the_curve_is_what_the_counting_rule_says() -> None:
    curves = [shape for shape in lay_out(BALANCED).shapes if shape.style == "curve"][1:]
    for rank, curve in enumerate(curves):
        bottom = curve.points[0][1]
        heights = [bottom - y for _, y in curve.points[1:-1:2]]
        counts = live_counts(BALANCED, rank)
        unit = max(heights) / max(counts)
        assert [round(height / unit) for height in heights] == list(counts)


def test_nothing_is_told_by_colour_alone() -> None:
    """Forwards and backwards differ by hatching, bubbles by their outline, transfers by their form and letter."""
    assert STYLES["backward"].hatch
    assert not STYLES["forward"].hatch
    assert STYLES["bubble"].dash
    shapes = lay_out(BALANCED).shapes
    assert {len(shape.points) for shape in shapes if shape.style in ("away", "towards")} == {5}
    away, towards = (next(shape for shape in shapes if shape.style == style) for style in ("away", "towards"))
    assert max(away.points)[1] != away.points[0][1], "the point of what leaves is to the right"
    assert min(towards.points)[1] != towards.points[1][1], "the point of what arrives is to the left"


@pytest.mark.parametrize("chunks", [1, 2])
def test_svg_is_well_formed(chunks: int) -> None:
    schedule = BALANCED if chunks == 1 else build(ProgramConfig("interleaved-1f1b", 4, 8, 2, "bpipe"))
    root = ElementTree.fromstring(write_svg(schedule))
    assert root.tag == f"{SVG}svg"
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for shape in [*root.iter(f"{SVG}polygon"), *root.iter(f"{SVG}polyline")]:
        assert shape.attrib["class"] in STYLES
        for point in shape.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= width
            assert 0 <= y <= height
    assert len(list(root.iter(f"{SVG}text"))) > 64


def test_png() -> None:
    pytest.importorskip("matplotlib")
    image = png.write_png(build(ProgramConfig("1f1b", 2, 2)))
    assert image.startswith(b"\x89PNG\r\n")
    picture = lay_out(build(ProgramConfig("1f1b", 2, 2)))
    assert (int.from_bytes(image[16:20], "big"), int.from_bytes(image[20:24], "big")) == (picture.width, picture.height)


def test_png_refuses_what_no_renderer_can_draw(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "--schedule", "1f1b", "--stages", "4", "--microbatches", "600", "--format", "png"]) == 2
    assert "a png takes at most 32000: write svg, or draw fewer" in capfd.readouterr().err


def test_png_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["schedule", "--schedule", "1f1b", "--stages", "2", "--microbatches", "2", "--format", "png"]) == 2
    assert "pip install matplotlib, or write svg" in capfd.readouterr().err
