"""Charts, compared by what stands in them: how many bars, how long, which words. Never by pixels."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from bpipe.balance.config import named_balance
from bpipe.build import ScheduleConfig, build
from bpipe.draw.picture import lay_out, stack
from bpipe.draw.plots import StagePeaks, memory_chart, to_png, to_svg
from bpipe.draw.svg import render_svg

SVG = "{http://www.w3.org/2000/svg}"
MIB = 2**20
# The quickstart's, in docs/start.md.
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


def words(svg: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_bars_differ_without_colours() -> None:
    patterns = {bool(bar.get_hatch()) for bar in memory_chart(STAGES, "title").axes[0].patches}
    assert patterns == {True, False}


def test_the_same_numbers_are_the_same_files() -> None:
    drawn = [(to_svg(memory_chart(STAGES, "title")), to_png(memory_chart(STAGES, "title"))) for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert "<dc:date>" not in drawn[0][0]
    assert drawn[0][1].startswith(b"\x89PNG\r\n")


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
