"""Hosts may be pairs, a pool, or a rank's own host memory. Each is checked, simulated, written and read."""

from dataclasses import replace
from itertools import product

import pytest

from bpipe.balance.budget import ActivationBudget, BudgetTooSmall
from bpipe.balance.config import BalanceConfig
from bpipe.balance.pairs import balance
from bpipe.balance.pool import balance_over_hosts
from bpipe.build import ScheduleConfig, build
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.check.rules import ScheduleError, check
from bpipe.schedule.files.text import TextError, read_csv
from bpipe.schedule.hosts import POOL, Host, Tier, in_pairs, partners_of, read_hosts, write_hosts
from bpipe.schedule.memory import memory_of
from bpipe.schedule.schedule import Schedule
from bpipe.simulate.cost import Costs, Link, Links, StageCost
from bpipe.simulate.engine import simulate

PAIRS = build(ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig()))
GUEST = (Kind.HOST, Kind.RETURN)


def in_a_pool() -> Schedule:
    """Return a schedule in which micro-batch 3 of rank 0 goes to rank 2 instead of rank 3."""
    rows = [list(row) for row in PAIRS.ranks]
    for slot, cell in enumerate(rows[3]):
        moved = tuple(action for action in cell.transfers if action.kind in GUEST and action.microbatch == 3)
        rows[3][slot] = replace(cell, transfers=tuple(action for action in cell.transfers if action not in moved))
        rows[2][slot] = replace(rows[2][slot], transfers=rows[2][slot].transfers + moved)
    return replace(PAIRS, ranks=tuple(map(tuple, rows)), hosts=read_hosts("3+2,none,none,none"), bounds=None)


@pytest.mark.parametrize(
    "forwards",
    [(2, 5, 1, 3, 1), *(pytest.param(order, marks=pytest.mark.slow) for order in ((1, 1, 1, 1, 6), (6, 1, 1, 1, 1)))],
)
def test_both_ends_of_a_transfer_are_one_whoever_is_there_first(forwards: tuple[int, ...]) -> None:
    """Two hosts may both arrive before the evictor, which sends first to the one that arrived last."""
    plain = build(ScheduleConfig("1f1b", 5, 12))
    for activation_budget in product((2, 3, 5, 8), repeat=5):
        try:
            pooled = balance_over_hosts(plain, POOL, ActivationBudget(activation_budget, memory_of([1] * 5)))
        except BudgetTooSmall:
            continue
        if all(len(of_rank) < 2 for of_rank in pooled.hosts or ()):
            continue
        stages = tuple(StageCost(seconds, 2, moved_bytes=3, saved_bytes=3) for seconds in forwards)
        report = simulate(pooled, Costs(stages, Links(Link(1))))
        spans: dict[tuple[int, int, bool], set[tuple[object, object]]] = {}
        for transfer in (transfer for row in report.transfers for transfer in row):
            leaves = transfer.action.kind in (Kind.EVICT, Kind.HOST)
            spans.setdefault((transfer.action.stage, transfer.action.microbatch, leaves), set()).add(
                (transfer.start_s, transfer.end_s)
            )
        assert all(len(same) == 1 for same in spans.values()), activation_budget


def test_what_comes_back_from_elsewhere_is_refused() -> None:
    """Micro-batch 3 goes to rank 2 and would come back from rank 3."""
    schedule = in_a_pool()
    rows = [list(row) for row in schedule.ranks]
    load = Action(0, Kind.RETURN, 3)
    slot = next(slot for slot, cell in enumerate(rows[2]) if load in cell.transfers)
    rows[2][slot] = replace(
        rows[2][slot], transfers=tuple(action for action in rows[2][slot].transfers if action != load)
    )
    rows[3][slot] = replace(rows[3][slot], transfers=(*rows[3][slot].transfers, load))
    with pytest.raises(ScheduleError, match="0LOAD3: it is with rank 2, not with rank 3"):
        check(replace(schedule, ranks=tuple(map(tuple, rows))))


def test_two_hosts_of_one_micro_batch_are_refused() -> None:
    schedule = in_a_pool()
    rows = [list(row) for row in schedule.ranks]
    hosting = Action(0, Kind.HOST, 3)
    slot = next(slot for slot, cell in enumerate(rows[2]) if hosting in cell.transfers)
    rows[3][slot] = replace(rows[3][slot], transfers=(*rows[3][slot].transfers, hosting))
    with pytest.raises(ScheduleError, match="0EVICT3: ranks 3 and 2 both have 0HOST3 in this slot"):
        check(replace(schedule, ranks=tuple(map(tuple, rows))))


def test_what_knows_pairs_only_says_so() -> None:
    assert PAIRS.partners == (3, 2, 1, 0)
    with pytest.raises(ValueError, match=r"hosts are 3\+2,none,none,none: only pairs are supported here"):
        _ = in_a_pool().partners


@pytest.mark.parametrize("text", ["", "1+", "1,,2", "own+x", "01", "-1", "None", "1 ,2"])
def test_other_text_is_no_list_of_hosts(text: str) -> None:
    with pytest.raises(ValueError, match="is not a list of hosts"):
        read_hosts(text)
    with pytest.raises(TextError, match="line 1: hosts="):
        read_csv(f"# bpipe schedule=a microbatches=1 stage_to_rank=0 hosts={text.replace(' ', '_')}\n0F0,0B0\n")


def test_pairs_are_hosts_and_back() -> None:
    hosts = in_pairs((2, 1, 0))
    assert hosts == ((Host(2),), (), (Host(0),))
    assert partners_of(hosts) == (2, 1, 0)
    assert partners_of(read_hosts("1,2,0")) is None
    hosts = ((Host(1), Host(0, Tier.HOST_MEMORY)), (), (Host(0),))
    assert write_hosts(hosts) == "1+own,none,0"
    assert read_hosts("1+own,none,0") == hosts
    plain = build(ScheduleConfig("1f1b", 4, 8))
    assert balance(plain, [3] * 4, (3, 2, 1, 0)).hosts == in_pairs((3, 2, 1, 0))
