"""The picture: well-formed, complete, and readable without colours."""

from __future__ import annotations

import sys

import pytest

from bpipe.balance.config import named_balance
from bpipe.build import ScheduleConfig, build
from bpipe.cli import main
from bpipe.draw.timeline import lay_out_simulation
from bpipe.simulate.cost import StageCost, uniform
from bpipe.simulate.engine import simulate
from bpipe.simulate.report import Simulation


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


def test_short_simulations_are_in_milliseconds_and_the_update_is_named() -> None:
    picture = lay_out_simulation(simulated(0.001, update_s=0.02))
    words = {word.text for word in picture.words}
    assert {"time, ms", "reduction and update"} <= words
    assert any("iteration 53 ms" in word for word in words)
