"""The picture: well-formed, complete, and readable without colours."""

from __future__ import annotations

import re
import sys
from xml.etree import ElementTree

import pytest

from bpipe.balance.config import BalanceConfig, named_balance
from bpipe.build import ScheduleConfig, build
from bpipe.cli import main
from bpipe.draw import png
from bpipe.draw.picture import STYLES, lay_out
from bpipe.draw.svg import render_svg, write_svg
from bpipe.draw.timeline import MARGIN, WIDTH, lay_out_simulation
from bpipe.schedule.memory import live_counts
from bpipe.simulate.cost import StageCost, uniform
from bpipe.simulate.engine import simulate
from bpipe.simulate.report import Simulation

BALANCED = build(ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig()))
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
    schedule = (
        BALANCED
        if chunks == 1
        else build(ScheduleConfig("interleaved-1f1b", 4, 8, num_chunks=2, balance=BalanceConfig()))
    )
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
    image = png.write_png(build(ScheduleConfig("1f1b", 2, 2)))
    assert image.startswith(b"\x89PNG\r\n")
    picture = lay_out(build(ScheduleConfig("1f1b", 2, 2)))
    assert (int.from_bytes(image[16:20], "big"), int.from_bytes(image[20:24], "big")) == (picture.width, picture.height)


def test_png_refuses_what_no_renderer_can_draw(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "--schedule", "1f1b", "--pp", "4", "--microbatches", "600", "--format", "png"]) == 2
    assert "a png takes at most 32000: write svg, or draw fewer" in capfd.readouterr().err


def test_png_without_matplotlib_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["schedule", "--schedule", "1f1b", "--pp", "2", "--microbatches", "2", "--format", "png"]) == 2
    assert "pip install matplotlib, or write svg" in capfd.readouterr().err


def simulated(seconds: float = 1.0, balance: str = "bpipe", chunks: int = 1, update_s: float = 0.0) -> Simulation:
    """Four ranks; a forward takes `seconds`, a micro-batch holds a GiB."""
    schedule = build(
        ScheduleConfig(
            "1f1b" if chunks == 1 else "interleaved-1f1b", 4, 8, num_chunks=chunks, balance=named_balance(balance)
        )
    )
    cost = StageCost(
        seconds, 2 * seconds, transfer_s=seconds / 2, saved_bytes=2**30, moved_bytes=2**30, optimizer_s=update_s
    )
    return simulate(schedule, uniform(4 * chunks, cost))


def test_a_simulation_has_a_name_a_legend_and_an_axis_with_its_unit() -> None:
    """It had boxes, and neither what they were, nor of what, nor how long."""
    picture = lay_out_simulation(simulated(), "gpt: t=1 p=4")
    words = {word.text for word in picture.words}
    assert {
        "gpt: t=1 p=4",
        "forward",
        "backward",
        "evict, return",
        "load, host",
        "activations held",
        "time, s",
    } <= words
    assert "1f1b: 4 ranks, 8 micro-batches; iteration 33 s, bubble 27.3 %" in words
    assert {"0", "5", "10", "30"} <= words
    ticks = {word.text: word.x for word in picture.words if word.text in ("0", "10", "30")}
    # 33 seconds are the width.
    assert [ticks[text] for text in ("0", "10", "30")] == pytest.approx(
        [MARGIN, MARGIN + 10 / 33 * WIDTH, MARGIN + 30 / 33 * WIDTH]
    )


def test_a_boxs_place_is_its_time() -> None:
    report = simulated()
    boxes = [shape for shape in lay_out_simulation(report).shapes if shape.style == "forward"][1:]
    starts = sorted(
        float(timed.start_s) for row in report.computations for timed in row if timed.action.kind.value == "F"
    )
    assert sorted(min(x for x, _ in box.points) for box in boxes) == pytest.approx(
        [MARGIN + start / 33 * WIDTH for start in starts]
    )


def test_short_simulations_are_in_milliseconds_and_the_update_is_named() -> None:
    picture = lay_out_simulation(simulated(0.001, update_s=0.02))
    words = {word.text for word in picture.words}
    assert {"time, ms", "reduction and update"} <= words
    assert any("iteration 53 ms" in word for word in words)


def test_the_bound_is_a_line_that_no_curve_crosses() -> None:
    picture = lay_out_simulation(simulated())
    bounds = [shape.points[0][1] for shape in picture.shapes if shape.style == "bound"][1:]
    curves = [shape for shape in picture.shapes if shape.style == "curve"][1:]
    assert len(bounds) == len(curves) == 4
    for bound, curve in zip(bounds, curves, strict=True):
        assert min(y for _, y in curve.points) >= bound - 1e-9
    words = [word.text for word in picture.words]
    assert (words.count("bound 3.00 GiB"), words.count("peak 3.00 GiB"), words.count("peak 2.00 GiB")) == (4, 3, 1)
    plain = lay_out_simulation(simulated(balance="none"))
    assert not [word for word in plain.words if "bound" in word.text or "evict" in word.text]
    assert not [shape for shape in plain.shapes if shape.style == "bound"]


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_simulations_words_and_shapes_are_inside(chunks: int) -> None:
    picture = lay_out_simulation(simulated(chunks=chunks), "name")
    ElementTree.fromstring(render_svg(picture))
    for shape in picture.shapes:
        assert all(0 <= x <= picture.width and 0 <= y <= picture.height for x, y in shape.points)
    for word in picture.words:
        # Six and a half pixels a letter at size 11, and more room than that to the right.
        width = 0.62 * word.size * len(word.text)
        left = word.x - {"start": 0, "middle": width / 2, "end": width}[word.anchor]
        assert left >= 0
        assert left + width <= picture.width
        assert 0 < word.y < picture.height
    assert {len(shape.points) for shape in picture.shapes if shape.style in ("away", "towards")} == {5}
    # With several stages per rank `F0` alone would be two different forwards.
    computed = {word.text for word in picture.words if re.fullmatch(r"\d?[FB]\d", word.text)}
    assert {len(text) for text in computed} == {2 if chunks == 1 else 3}
