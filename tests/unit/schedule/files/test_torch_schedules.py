"""Torch's own pipeline schedules: read, written back, and their peaks counted as torch counts them."""

from __future__ import annotations

from typing import Any

import pytest

from bpipe.build import ScheduleConfig, build
from bpipe.schedule.check.rules import check
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.families.unit_grid import align
from bpipe.schedule.files.document import read
from bpipe.schedule.files.text import read_csv, write_csv
from bpipe.schedule.memory import peak_counts
from bpipe.schedule.schedule import Schedule
from tests.support.oracle import is_sound
from tests.support.torch_schedules import COUNTS, LOOPED, MULTIPLE, SINGLE, as_csv, parsed, peak, rows, torch_schedule

counts = pytest.mark.skipif(not COUNTS, reason="torch before 2.15 does not count what a schedule holds")

CASES = [
    *(
        (name, p, m, 1)
        for name in SINGLE
        for p in (1, 2, 3, 4, 8)
        for m in (1, 2, 5, 8, 16)
        if name != "Schedule1F1B" or m >= p
    ),
    *((name, p, m, v) for name in LOOPED for p in (2, 4) for m in (p, 2 * p, 4 * p) for v in (1, 2, 3)),
    *(
        (name, p, m, 2)
        for name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
        for p in (2, 3, 4, 8)
        for m in (2 * p, 2 * p + 1, 4 * p)
    ),
]


def of(schedule: Any) -> Schedule:
    """Read as a user would: the file, on the unit grid."""
    return align(read(as_csv(schedule)))


@counts
@pytest.mark.parametrize(("name", "p", "m", "v"), CASES)
def test_peaks_are_those_that_torch_counts(name: str, p: int, m: int, v: int) -> None:
    theirs = torch_schedule(name, p, m, v)
    ours = of(theirs)
    check(ours)
    assert is_sound(ours)
    mine = [[stage for stage, rank in enumerate(ours.layout.placements[0]) if rank == at] for at in range(p)]
    assert list(peak_counts(ours)) == [peak(theirs, rank, mine[rank]) for rank in range(p)]


@counts
@pytest.mark.parametrize(("ours", "theirs"), [("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 4), (4, 4), (4, 9), (8, 16)])
def test_our_generators_hold_what_torchs_do(ours: str, theirs: str, p: int, m: int) -> None:
    assert ours in FAMILIES
    plain = torch_schedule(theirs, p, m)
    assert list(peak_counts(build(ScheduleConfig(ours, p, m)))) == [peak(plain, rank, [rank]) for rank in range(p)]


@pytest.mark.parametrize("name", MULTIPLE)
def test_compute_only_files_go_both_ways(name: str) -> None:
    theirs = torch_schedule(name, 4, 8, 2)
    text = as_csv(theirs)
    schedule = read_csv(text)
    written = write_csv(schedule)
    # Torch's rows end where they end, ours are of one length.
    assert [line.rstrip(",") for line in written.splitlines()] == [line.rstrip(",") for line in text.splitlines()]
    assert read_csv(written) == schedule
    assert {rank: [one for one in row if one is not None] for rank, row in parsed(written).items()} == {
        rank: [one for one in row if one is not None] for rank, row in rows(theirs).items()
    }
