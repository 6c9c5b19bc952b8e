"""A 70B model on H100s by costs that were given, eight ranks, 32 micro-batches: every schedule's seconds, bubble and
peak, and their order.

F, I and W take 73, 75 and 66 ms per rank and micro-batch; nodes are apart and pairs together; a message has 33.5 MB at 45
GB/s, a micro-batch's activations 4 GB at 180 GB/s.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import pytest

from bpipe.balance.config import named_balance
from bpipe.build import ScheduleConfig, build
from bpipe.schedule.families.families import FAMILIES, exchange_of
from bpipe.schedule.families.family import ALIKE, UnitCosts
from bpipe.schedule.memory import peak_counts
from bpipe.simulate.cost import Costs, Link, Links, StageCost
from bpipe.simulate.engine import simulate

P, M = 8, 32


class Row(NamedTuple):
    """What a prototype's simulation of the same costs said.

    `peaks`: micro-batches of a rank's share, as generated and balanced.

    `quicker`: by what share of its time the order is found to be quicker here.
    """

    schedule: str
    chunks: int
    group: int | None
    seconds: float
    bubble_percent: float
    peaks: tuple[float, float]
    quicker: float = 0


ROWS = (
    Row("grouped-interleaved", 8, 8, 7.02, 2.5, (8, 7.625)),
    # The next two take equally long there.
    Row("zb-v", 2, None, 7.13, 4.0, (8, 8)),
    Row("grouped-interleaved", 4, 8, 7.13, 4.0, (8, 7.25)),
    Row("interleaved-1f1b", 5, None, 7.20, 4.9, (9.4, 8.2)),
    Row("grouped-interleaved", 8, 4, 7.34, 6.8, (4.5, 4.125)),
    Row("grouped-interleaved", 4, 4, 7.39, 7.4, (5, 4.25)),
    Row("v-half", 2, None, 7.55, 9.3, (5, 5)),
    # The order made for these costs here takes 8.02 s.
    Row("v-min", 2, None, 8.31, 17.6, (4, 4), quicker=0.035),
    Row("1f1b", 1, None, 8.40, 18.5, (8, 5)),
)


class Result(NamedTuple):
    seconds: float
    bubble_percent: float
    peak: float
    exposed_s: float


def result(row: Row, balance: str) -> Result:
    # The families placed as a V make their order for costs.
    chosen_by = UnitCosts(73, 75, 66, Fraction(3, 4)) if FAMILIES[row.schedule].max_chunks == 2 else ALIKE
    schedule = build(
        ScheduleConfig(
            row.schedule,
            P,
            M,
            num_chunks=row.chunks,
            balance=named_balance(balance),
            group_size=row.group,
            costs=chosen_by,
        )
    )
    moved = 4e9 / row.chunks
    cost = StageCost(
        0.073 / row.chunks,
        0.141 / row.chunks,
        0.066 / row.chunks,
        sent_bytes=33_500_000,
        transfer_s=moved / 180e9,
        saved_bytes=int(moved),
    )
    links = Links(Link(450e9), Link(45e9), tuple(min(rank, P - 1 - rank) for rank in range(P)))
    costs = Costs(
        (cost,) * schedule.num_stages, links, exchange_of(row.schedule).predicted, one_sided=frozenset(range(P))
    )
    run = simulate(schedule, costs)
    busy, seconds = max(float(run.busy_s(rank)) for rank in range(P)), float(run.makespan_s)
    return Result(
        seconds,
        100 * (1 - busy / seconds),
        float(max(peak_counts(schedule))) / row.chunks,
        float(run.exposed_transfer_s),
    )


RESULTS = [(row, tuple(result(row, balance) for balance in ("none", "bpipe"))) for row in ROWS]


@pytest.mark.parametrize(("row", "found"), RESULTS, ids=[f"{row.schedule}-{row.chunks}-{row.group}" for row in ROWS])
def test_it_takes_and_holds_what_was_said(row: Row, found: tuple[Result, Result]) -> None:
    for one, peak in zip(found, row.peaks, strict=True):
        assert one.seconds == pytest.approx(row.seconds * (1 - row.quicker), rel=0.005)
        # What is gained is bubble.
        bubble = 100 * (1 - (1 - row.bubble_percent / 100) / (1 - row.quicker))
        assert one.bubble_percent == pytest.approx(bubble, abs=0.5)
        assert one.peak == peak
        assert one.exposed_s == 0


def test_their_order_is_the_tables() -> None:
    assert [row for row, _ in sorted(RESULTS, key=lambda one: one[1][1].seconds)] == list(ROWS)
