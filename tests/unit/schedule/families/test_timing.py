"""How long orders take: formulas of known schedules, the simulator's answer, and what the command says of it."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.build import ScheduleConfig, build
from bpipe.cli import main
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.families.family import ALIKE, UnitCosts
from bpipe.schedule.families.timing import iteration_time, stage_ticks, starts, work_of
from bpipe.schedule.families.unit_grid import align, backwards, forwards
from bpipe.schedule.files.text import read_csv
from bpipe.schedule.layout import one_pipe
from bpipe.simulate.cost import Costs, StageCost
from bpipe.simulate.engine import simulate

COSTS = st.builds(UnitCosts, *[st.fractions(Fraction(1, 4), 4, max_denominator=12)] * 3)


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 4), (4, 8), (3, 2), (8, 5)])
def test_a_pipeline_is_as_long_as_its_formula(name: str, p: int, m: int) -> None:
    found = iteration_time(build(ScheduleConfig(name, p, m)), UnitCosts(Fraction(3, 2), 1, Fraction(1, 3)))
    each = Fraction(3, 2) + 1 + Fraction(1, 3)
    assert found.makespan == (m + p - 1) * each
    assert found.bubble_percent == 100 * Fraction(p - 1, m + p - 1)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(FAMILIES)), st.integers(1, 5), st.integers(1, 9), COSTS)
def test_it_takes_as_long_as_the_simulator_says(name: str, p: int, m: int, costs: UnitCosts) -> None:
    """The simulator runs the programs; here only what needs what is looked at."""
    family = FAMILIES[name]
    p, v = p * family.num_pipes, family.min_chunks
    schedule = family.generate(p, m, v)
    backward = costs.backward_input + costs.backward_weight
    one = StageCost(Fraction(costs.forward) / v, Fraction(backward) / v, weight_s=Fraction(costs.backward_weight) / v)
    simulation = simulate(schedule, Costs((one,) * schedule.num_stages))
    found = iteration_time(schedule, costs)
    assert found.makespan == simulation.pipeline_s
    busiest = max(sum(timed.end_s - timed.start_s for timed in row) for row in simulation.computations)
    assert found.bubble_percent == 100 * (1 - Fraction(busiest) / found.makespan)


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (4, 8)])
def test_a_message_takes_its_hop(p: int, m: int) -> None:
    """The first forward to the last rank, the last backward back."""
    hop = Fraction(1, 3)
    assert (
        iteration_time(build(ScheduleConfig("gpipe", p, m)), UnitCosts(1, 1, 1, hop)).makespan
        == 3 * (m + p - 1) + 2 * (p - 1) * hop
    )


def test_two_that_overlap_take_as_long_as_both_and_begin_with_the_later_input() -> None:
    text = "# bpipe schedule=a microbatches=2 stage_to_rank=0,1\n0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n"
    schedule = align(read_csv(text))
    # 1F1 waits for 0F1, with it 1B0; 0B0 for both of them.
    assert iteration_time(schedule, UnitCosts(2, 1, 2)).makespan == 2 + 2 + (2 + 3) + 3 + 3


def test_orders_that_wait_for_each_other_are_named() -> None:
    everything = range(2)
    orders = [forwards(0, everything) + backwards(0, everything), backwards(1, everything) + forwards(1, everything)]
    with pytest.raises(ValueError, match=r"wait for each other: rank 0 at 0B0, rank 1 at 1B0"):
        starts(work_of(one_pipe((0, 1)), 2, orders, stage_ticks(ALIKE, 1)))


@pytest.mark.parametrize("costs", [(0, 1, 1), (1, 0, 1), (1, 1, -1), (-1, 2, 2), (1, 1, 1, -1)])
def test_costs_below_nothing_are_refused(costs: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"costs .*: a forward and a backward must cost more than 0"):
        UnitCosts(*costs)


EXAMPLE = ["schedule", "--schedule", "1f1b", "--pp", "4", "--microbatches", "8"]


@pytest.mark.parametrize("text", ["1", "1,2,3,4", "1,-2", "a,b", "1/0,2", "1,", "1.,2"])
def test_what_are_no_costs_is_refused(text: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*EXAMPLE, "--costs", text])
    assert "is not 2 or 3 numbers such as 1, 1.5 or 1/2" in capfd.readouterr().err


def test_costs_that_do_not_fit_are_refused(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    split, shards = tmp_path / "split.csv", tmp_path / "shards.csv"
    split.write_text("0F0,0I0,0W0\n")
    shards.write_text("# bpipe schedule=a microbatches=1 stage_to_rank=0 vocabulary=1\n0F0,0S0,0T0,0B0\n")
    for path, costs, reason in (
        (split, "1,2", "its backwards are computed in halves, I and W: give three costs, F,I,W"),
        (shards, "1,2", "shards of the vocabulary take part in it, and have no cost here: leave it out"),
        (split, "0,1,1", "costs 0, 1, 1 and a hop of 0: a forward and a backward must cost more than 0"),
    ):
        assert main(["schedule", "--input", str(path), "--costs", costs, "--format", "json"]) == 2
        assert reason in capfd.readouterr().err
    assert main(["schedule", "--input", str(shards), "--format", "json"]) == 0
    assert "makespan" not in json.loads(capfd.readouterr().out)
    assert main(["schedule", "--input", str(split), "--costs", "1,1,0"]) == 0
    assert capfd.readouterr().out.endswith("# peak=1 evictions=0 makespan=2 bubble_percent=0\n")
