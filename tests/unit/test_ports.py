"""What leaves may go into a node's memory through another rank's port: which does, what that takes on its device, and when it is there."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from bpipe.check.case import ScheduleError
from bpipe.check.rules import check
from bpipe.cli import main
from bpipe.ir.action import Action, Kind
from bpipe.ir.document import read_json, write_json
from bpipe.ir.grid import read_grid, write_grid
from bpipe.ir.host_buffers import STAGING, hosts_of, num_host_buffers, num_own_buffers, num_passed_on, passed_on_for
from bpipe.ir.hosts import OWN_MEMORY, PORTS, is_through, other_ranks, read_hosts, through, write_hosts
from bpipe.ir.memory import counts_of, peak_counts
from bpipe.ir.schedule import Schedule
from bpipe.ir.text import read_csv, write_csv
from bpipe.passes.balance import occupied
from bpipe.passes.tiers import arranged_within
from bpipe.program import BalanceConfig, ScheduleConfig, build
from bpipe.simulate.cost import Costs, Link, Links, StageCost
from bpipe.simulate.engine import simulate
from bpipe.simulate.report import Simulation, Timed


def by_ports(name: str = "1f1b", p: int = 4, m: int = 8, v: int = 1, bounds: tuple[int, ...] | None = (3,)) -> Schedule:
    return build(ScheduleConfig(name, p, m, v, balance=BalanceConfig(bounds, hosts=PORTS)))


FAMILIES = {
    "1f1b": by_ports(),
    "of eight": by_ports(p=8, m=16, bounds=(5,)),
    "chunks": by_ports("interleaved-1f1b", v=2, bounds=(8,)),
}


@pytest.mark.parametrize("schedule", FAMILIES.values(), ids=FAMILIES)
def test_every_second_one_goes_through_a_rank_that_sends_nothing_and_has_room(schedule: Schedule) -> None:
    assert schedule.hosts is not None
    used = [through(host) for of_rank in schedule.hosts for host in of_rank if is_through(host)]
    assert used
    assert len(set(used)) == len(used), "a port passes on for one other at most"
    for rank, of_rank in enumerate(schedule.hosts):
        hosts = list(hosts_of(schedule, rank).values())
        helper = next((through(host) for host in of_rank if is_through(host)), None)
        assert hosts == [rank if helper is None or number % 2 == 0 else helper for number in range(len(hosts))]
        if helper is not None:
            assert not schedule.hosts[helper]
            assert passed_on_for(schedule, helper) == (rank,)
            assert num_host_buffers(schedule, helper) == STAGING
            assert num_passed_on(schedule, helper) > 0
            assert sum(occupied(schedule, helper, counts_of(schedule))) <= (schedule.bounds or ())[helper] * counts_of(schedule).parts
    # A device that passes on holds its own alone.
    plain = build(ScheduleConfig(schedule.name, schedule.num_ranks, schedule.num_microbatches, schedule.num_chunks))
    assert [peak_counts(schedule)[rank] for rank in used] == [peak_counts(plain)[rank] for rank in used]


@pytest.mark.parametrize("schedule", FAMILIES.values(), ids=FAMILIES)
def test_it_is_read_as_it_is_written(schedule: Schedule) -> None:
    for reading, writing in ((read_csv, write_csv), (read_json, write_json), (read_grid, write_grid)):
        assert reading(writing(schedule)) == schedule


def test_hosts_in_text() -> None:
    hosts = ((2, through(3), OWN_MEMORY), (through(0),), (), ())
    assert write_hosts(hosts) == "2+via3+own,via0,none,none"
    assert read_hosts(write_hosts(hosts)) == hosts
    assert other_ranks(hosts[0]) == (2, 3)
    for text in ("via", "via-1", "viaown", "via01", "viavia1"):
        with pytest.raises(ValueError, match="is no list of hosts"):
            read_hosts(text)


def test_it_goes_through_nobody_on_another_node_and_nobody_without_room() -> None:
    plain = build(ScheduleConfig("1f1b", 4, 8))
    assert arranged_within(plain, PORTS, (3,) * 4, (0, 0, 0, 1)).hosts == ((OWN_MEMORY,), (), (), ())
    assert arranged_within(plain, PORTS, (3,) * 4, (0, 1, 1, 0)).hosts == ((through(3), OWN_MEMORY), (), (), ())
    # Of two micro-batches the last rank holds one, so two buffers more have no room.
    assert arranged_within(plain, PORTS, (2,) * 4).hosts == ((OWN_MEMORY,), (OWN_MEMORY,), (), ())


def changed(schedule: Schedule, rank: int, old: Action, new: Action | None) -> Schedule:
    """With another transfer in its place, or none."""
    rows = [list(row) for row in schedule.ranks]
    slot = next(slot for slot, cell in enumerate(rows[rank]) if old in cell.transfers)
    kept = tuple(one for one in rows[rank][slot].transfers if one != old)
    rows[rank][slot] = replace(rows[rank][slot], transfers=kept)
    if new is not None:
        rows[rank][slot] = replace(rows[rank][slot], transfers=(*kept, new))
    return replace(schedule, ranks=tuple(map(tuple, rows)))


def hosted(schedule: Schedule, kind: Kind) -> Action:
    return next(one for cell in schedule.ranks[3] for one in cell.transfers if one.kind is kind)


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ("via0+own,none,none,none", r"rank 0: host via0 is no other rank of 0 to 3"),
        ("via4+own,none,none,none", r"rank 0: host via4 is no other rank of 0 to 3"),
        ("3+via3+own,none,none,none", r"rank 0: rank 3 keeps what comes on its device or in its node's memory \(via3\): say which"),
        ("via2+own,none,none,none", r"stage 0 is none of rank|rank 3 has no partner|0HOST"),
        ("via3,none,none,none", r"rank 3 has no 0HOST"),
        ("own,none,none,none", r"rank 3 has no partner"),
    ],
)
def test_wrong_hosts_are_refused(hosts: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check(replace(by_ports(), hosts=read_hosts(hosts)))


def test_wrong_transfers_are_refused() -> None:
    schedule = by_ports()
    hosting, back = hosted(schedule, Kind.HOST), hosted(schedule, Kind.RETURN)
    with pytest.raises(ScheduleError, match="it is with rank 3, not with the rank's own host memory"):
        check(changed(schedule, 3, back, None))
    with pytest.raises(ScheduleError, match="0LOAD3: it is with the rank's own host memory, not with rank 3"):
        check(changed(schedule, 3, hosting, replace(hosting, microbatch=7)))


# -- in time ------------------------------------------------------------------------------------------------------------------------------


def run(schedule: Schedule, inside: int, host: int) -> Simulation:
    """Computations of 10 and 20 seconds; a transfer of a byte takes `inside` between devices and `host` to and from memory."""
    stages = (StageCost(10, 20, moved_bytes=60, saved_bytes=60),) * schedule.num_stages
    return simulate(schedule, Costs(stages, Links(inside=Link(60 // inside), host=Link(60 // host)), one_sided=frozenset(range(4))))


def moves(report: Simulation, rank: int, *kinds: Kind) -> list[Timed]:
    return sorted((one for one in report.transfers[rank] if one.action.kind in kinds), key=lambda one: one.start_s)


def test_it_has_left_when_it_is_on_the_other_device_which_takes_the_next_once_it_has_passed_it_on() -> None:
    schedule = by_ports(m=16)
    report = run(schedule, 1, 30)
    here, there = moves(report, 3, Kind.HOST), moves(report, 3, Kind.RETURN)
    assert len(here) > 1
    assert {one.end_s - one.start_s for one in (*here, *there)} == {1}
    for row in (here, there):
        assert all(later.start_s - before.end_s >= 30 for before, later in pairwise(row))
    # Out to the memory, and back to the device.
    went = {one.action.microbatch: one.end_s for one in here}
    assert all(one.start_s >= went[one.action.microbatch] + 60 for one in there)
    # The device of the rank that passes on holds nothing of it.
    assert report.peak_bytes(3) == 60


def test_ranks_wait_less_where_their_own_port_is_too_slow_and_not_where_it_is_not() -> None:
    own, both = (build(ScheduleConfig("1f1b", 4, 16, balance=BalanceConfig((3,), hosts=hosts))) for hosts in ("host", PORTS))
    slow, helped = (sum(run(one, 1, 60).exposed_s) for one in (own, both))
    assert 0 < helped < slow
    assert sum(run(own, 1, 5).exposed_s) <= sum(run(both, 1, 5).exposed_s)


def test_the_grid_counts_what_is_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--schedule", "1f1b", "--stages", "4", "--microbatches", "8", "--balance", "bpipe", "--bound", "3", "--hosts", "ports")
    assert main(["schedule", *flags]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    schedule = by_ports()
    assert f" own_memory={num_own_buffers(schedule, 0)},0,0,0 passed_on=0,0,0,{num_passed_on(schedule, 3)}" in last
