"""Pictures of schedules and simulations, and plots of plans."""

import re
import sys
from xml.etree import ElementTree

import pytest

from bpipe.balance.config import named_balance
from bpipe.build import ScheduleConfig, build
from bpipe.cli import main
from bpipe.draw.picture import Picture, lay_out, render_png, render_svg, stack
from bpipe.draw.plots import StagePeaks, memory_chart, to_png, to_svg
from bpipe.draw.timeline import lay_out_simulation
from bpipe.simulate.cost import StageCost, uniform
from bpipe.simulate.engine import simulate
from bpipe.simulate.report import Simulation


def test_png_refuses_what_no_renderer_can_draw() -> None:
    with pytest.raises(ValueError, match="a png takes at most 32000: write svg, or draw fewer"):
        render_png(Picture(32_001, 10))


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


def test_short_simulations_are_in_milliseconds_and_the_update_is_named() -> None:
    picture = lay_out_simulation(simulated(0.001, update_s=0.02))
    words = {word.text for word in picture.words}
    assert {"time, ms", "reduction and update"} <= words
    assert any("iteration 53 ms" in word for word in words)


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
