"""The families whose backwards come in halves: what each holds and how long it takes, by formula."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.build import ScheduleConfig, build
from bpipe.cli import main
from bpipe.schedule.families.family import UnitCosts
from bpipe.schedule.families.timing import iteration_time
from bpipe.schedule.files.grid import write_grid
from bpipe.schedule.memory import peak_counts

ZB_H1 = """\
# bpipe schedule=zb-h1 microbatches=8 stage_to_rank=0,1,2,3
slot      0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26
rank 0 C F0 F1 F2 F3  .  .  . I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7
rank 1 C  . F0 F1 F2  .  . I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 F7 I5 W4 I6 W5 I7 W6 W7
rank 2 C  .  . F0 F1  . I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 F7 I6 W4 I7 W5 W6 W7
rank 3 C  .  .  . F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7
"""

DURATION = st.fractions(Fraction(1, 4), 4, max_denominator=6)


def test_zb_h1_is_its_papers_figure() -> None:
    assert write_grid(build(ScheduleConfig("zb-h1", 4, 8))) == ZB_H1


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 20), DURATION, DURATION, DURATION)
def test_zb_h1_holds_the_same_everywhere_and_is_as_long_as_its_formula(
    p: int, m: int, f: Fraction, i: Fraction, w: Fraction
) -> None:
    schedule = build(ScheduleConfig("zb-h1", p, m))
    assert peak_counts(schedule) == (min(p, m),) * p
    # The formula is of pipelines that fill, and of W that fits beside the others. To draw until both hold was too many
    # draws for hypothesis, one run in hundreds.
    w = min(w, f, i)
    if m >= p:
        assert iteration_time(schedule, UnitCosts(f, i, w)).makespan == m * (f + i + w) + (p - 1) * (f + i - w)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 20), st.integers(0, 25), DURATION, DURATION, DURATION)
def test_1f1b_split_holds_and_takes_what_its_formulas_say(
    p: int, m: int, delay: int, f: Fraction, i: Fraction, w: Fraction
) -> None:
    schedule = build(ScheduleConfig("1f1b-split", p, m, delay=delay))
    assert peak_counts(schedule) == tuple(min(p - rank + delay, m) for rank in range(p))
    assert iteration_time(schedule, UnitCosts(f, i, w)).makespan == m * (f + i + w) + (p - 1) * (f + i)


def test_a_share_held_between_the_halves_is_counted(capfd: pytest.CaptureFixture[str]) -> None:
    sizes = ["--pp", "4", "--microbatches", "8"]
    assert main(["schedule", "--schedule", "zb-h1", *sizes, "--kept", "0.5"]) == 0
    assert "# peak=4,3.5,3,2.5 " in capfd.readouterr().out
    assert main(["schedule", "--schedule", "1f1b", *sizes, "--kept", "0.5"]) == 2
    assert "its backwards are not split into I and W" in capfd.readouterr().err


def test_a_delay_is_for_those_that_take_it(capfd: pytest.CaptureFixture[str]) -> None:
    sizes = ["--pp", "4", "--microbatches", "8", "--delay", "2"]
    assert main(["schedule", "--schedule", "1f1b-split", *sizes]) == 0
    assert "# peak=6,5,4,3 " in capfd.readouterr().out
    assert main(["schedule", "--schedule", "1f1b", *sizes]) == 2
    assert "schedule 1f1b does not delay weight gradients" in (error := capfd.readouterr().err)
    assert "choose from 1f1b-split" in error
    with pytest.raises(ValueError, match="delay is -1"):
        build(ScheduleConfig("1f1b-split", 4, 8, delay=-1))
