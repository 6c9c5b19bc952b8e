"""docs/schedules.md holds the table of all families to what they are."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.families.family import ALIKE
from bpipe.schedule.families.timing import iteration_time
from bpipe.schedule.memory import num_transfers, peak_counts, plain
from bpipe.schedule.schedule import Schedule

PAGE = (Path(__file__).parents[4] / "docs/schedules.md").read_text()
P, M = 8, 32
ROW = re.compile(
    r"\| `([\w-]+)`(?: v=(\d+))?(?: g=(\d+))? \| [^|]* \| ([^|]*) \| ([\d.]+) \| ([\d.]+) \| ?([^|]*?) ?\|"
)


def held(schedule: Schedule) -> str:
    return str(plain(Fraction(max(peak_counts(schedule)), schedule.num_chunks)))


def test_the_table_says_what_the_families_are() -> None:
    table = PAGE.partition("| name | holds at most (micro-batches per rank) |")[2].partition("\n\n")[0]
    rows = [match for line in table.splitlines() if (match := ROW.match(line))]
    assert {row[1] for row in rows} == set(FAMILIES)
    assert len(rows) == table.count("\n| `")
    for name, chunks, group, peak, bubble, moved, needs in (row.groups() for row in rows):
        family = FAMILIES[name]
        v, g = int(chunks or family.min_chunks), None if group is None else int(group)
        plain_one = build(ScheduleConfig(name, P, M, num_chunks=v, group_size=g))
        balanced = build(ScheduleConfig(name, P, M, num_chunks=v, balance=BalanceConfig(), group_size=g))
        peaks = [held(plain_one), held(balanced)]
        assert peak.strip() == " → ".join(peaks if peaks[0] != peaks[1] else peaks[:1]), name
        assert bubble == f"{float(iteration_time(plain_one, ALIKE).bubble_percent):.1f}", name
        assert moved == str(plain(Fraction(sum(num_transfers(balanced, rank).evictions for rank in range(P)), v))), name
        in_v = "V" if plain_one.layout.placements[0][-1] == 0 and v > 1 else ""
        pipes = "bidirectional" if family.num_pipes > 1 else ""
        wanted = ["split" if family.splits else "", in_v or ("chunks" if v > 1 else ""), pipes]
        assert needs.strip() == ", ".join(filter(None, wanted)), name
