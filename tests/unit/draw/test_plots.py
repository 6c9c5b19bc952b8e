"""Charts, compared by what stands in them: how many bars, how long, which words. Never by pixels."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from bpipe.balance.config import named_balance
from bpipe.build import ScheduleConfig, build
from bpipe.draw.picture import lay_out, stack
from bpipe.draw.plots import Overhead, Ranked, StagePeaks, memory_chart, overhead_chart, ranking_chart, to_png, to_svg
from bpipe.draw.svg import render_svg

SVG = "{http://www.w3.org/2000/svg}"
MIB = 2**20
# The quickstart's, in the README.
PLAIN = (86.06, 73.80, 63.30, 52.79, 42.28, 31.77, 21.27, 12.27)
BALANCED = (53.81, 52.80, 52.80, 52.79, 42.28, 52.77, 52.77, 55.27)
STAGES = tuple(
    StagePeaks(
        stage,
        round(one * MIB),
        round(one * MIB),
        8 - stage,
        round(other * MIB),
        round((other + 1) * MIB),
        5 - (stage == 4),
    )
    for stage, (one, other) in enumerate(zip(PLAIN, BALANCED, strict=True))
)
LINES = (
    Overhead("nothing recomputed", (16, 32, 64), (5.0, 10.0, 12.0), True),
    Overhead("nothing recomputed", (16, 32, 64), (0.0, 0.0, 0.1), False),
    Overhead("attention recomputed", (16, 32, 64), (2.0, 3.0, 4.0), True),
)
RANKED = (
    Ranked("t=4 p=8", 46.5, True, "without: 81.7 GiB"),
    Ranked("t=2 p=8", 40.6, False),
    Ranked("t=4 p=4", 40.1, False),
)


def words(svg: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_ends_upon_each_other_get_one_number() -> None:
    same = Overhead("attention recomputed", (16, 32, 64), (0.0, 0.0, 0.1), False)
    assert words(to_svg(overhead_chart((*LINES, same), "title", "batch size"))).count("0.1 %") == 1


def test_bars_differ_without_colours() -> None:
    for chart in (memory_chart(STAGES, "title"), ranking_chart(RANKED, "title")):
        patterns = {bool(bar.get_hatch()) for bar in chart.axes[0].patches}
        assert patterns == {True, False}
    looks = {
        (line.get_linestyle(), line.get_marker()) for line in overhead_chart(LINES, "title", "batch size").axes[0].lines
    }
    assert len(looks) == len(LINES)


def test_the_same_numbers_are_the_same_files() -> None:
    drawn = [(to_svg(memory_chart(STAGES, "title")), to_png(memory_chart(STAGES, "title"))) for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert "<dc:date>" not in drawn[0][0]
    assert drawn[0][1].startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize("draw", [memory_chart, ranking_chart])
def test_nothing_to_draw_is_said(draw: object) -> None:
    with pytest.raises(ValueError, match="there is no"):
        draw((), "title")  # type: ignore[operator]


def test_halves_lie_below_each_other() -> None:
    halves = [
        lay_out(build(ScheduleConfig("1f1b", 4, 8, balance=named_balance(balance))), text)
        for balance, text in (("none", "without"), ("bpipe", "with"))
    ]
    both = stack(halves)
    assert (both.width, both.height) == (max(half.width for half in halves), sum(half.height for half in halves))
    assert len(both.shapes) == sum(len(half.shapes) for half in halves)
    titles = [word for word in both.words if word.text.startswith("1f1b: 4 ranks")]
    assert [word.text.rsplit(", ", 1)[1] for word in titles] == ["without", "with"]
    assert titles[1].y - titles[0].y == halves[0].height
    evictions = [word for word in both.words if re.fullmatch(r"E\d", word.text)]
    assert [word.text for word in evictions] == ["E1", "E3", "E5"], "those of the paper's figure 4"
    assert all(word.y > halves[0].height for word in evictions), "the upper half has no transfers"
    ElementTree.fromstring(render_svg(both))
