"""Pictures of schedules and simulations."""

import re
from xml.etree import ElementTree

from bpipe.balance.config import named_balance
from bpipe.build import ScheduleConfig, build
from bpipe.draw.picture import lay_out, render_svg, stack
from bpipe.draw.timeline import lay_out_simulation
from bpipe.simulate.cost import StageCost, uniform
from bpipe.simulate.engine import simulate
from bpipe.simulate.report import Simulation


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
