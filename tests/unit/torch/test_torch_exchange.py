"""How torch's own runtime passes messages: lowered as torch lowers it, and judged with one queue for each two ranks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.check.deadlock import WaitLevel, blocked_ranks
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.memory import moves_anything, peak_counts
from bpipe.schedule.program import Exchange
from bpipe.schedule.schedule import Schedule
from bpipe.torch import checks
from bpipe.torch.checks import received_in
from bpipe.torch.orders import torch_orders
from bpipe.torch.upstream import Computation
from tests.support.levels import STOOD

ONE_PIPE = [name for name, family in FAMILIES.items() if family.num_pipes == 1]


def torchs(schedule: Schedule, defer: bool = False) -> dict[int, list[Any]]:
    """Torch's own lists, messages among the computations."""
    order = {rank: list(row) for rank, row in torch_orders(schedule).items()}
    owner = schedule.layout.placements[0].__getitem__
    listed = schedules._add_send_recv(order, owner, schedule.num_stages)
    return schedules._defer_recv_ops(listed, owner) if defer else listed


def balanced_schedules(seed: int, count: int) -> Iterator[Schedule]:
    """Families, sizes, bounds, partners and pools at random, of which something moves."""
    rnd = random.Random(seed)
    made = 0
    while made < count:
        name, p = rnd.choice(ONE_PIPE), rnd.choice((2, 3, 4, 5, 6, 8))
        family = FAMILIES[name]
        chunks = rnd.randint(family.min_chunks, family.max_chunks or 3)
        m = p * rnd.choice((1, 2, 3))
        plain = build(ScheduleConfig(name, p, m, num_chunks=chunks))
        peaks = [float(peak) for peak in peak_counts(plain)]
        bound = (rnd.randint(max(2, int(sum(peaks) / p)), max(3, int(max(peaks)))),)
        how = rnd.choice([BalanceConfig(), BalanceConfig(bounds=bound), BalanceConfig(bounds=bound, hosts="pool")])
        try:
            schedule = build(ScheduleConfig(name, p, m, num_chunks=chunks, balance=how, exchange=Exchange.TORCH))
        except ValueError:
            continue
        if moves_anything(schedule):
            made += 1
            yield schedule


LEVELS = [(waits, births) for waits in STOOD for births in (False, True)]


@pytest.mark.timeout(300)
def test_no_balanced_schedule_deadlocks() -> None:
    """In every level of waiting, communicators made on the way or there before."""
    for schedule in balanced_schedules(1, 30):
        for waits, births in LEVELS:
            stuck = blocked_ranks(schedule, waits, Exchange.TORCH, births)
            assert not stuck, (schedule.name, schedule.num_ranks, schedule.num_microbatches, waits, births, stuck)


defers = pytest.mark.skipif(not hasattr(schedules, "_defer_recv_ops"), reason="torch before 2.13 defers no receives")


def test_waits_for_sends_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.15 lists them between a backward and its SEND_B, and every schedule was refused."""
    schedule = build(ScheduleConfig("interleaved-1f1b", 3, 3, num_chunks=2))
    listed = torchs(schedule)
    # Before 2.15 there is no such word.
    waiting = {
        rank: [
            one
            for action in row
            for one in (action, action._replace(computation_type=Computation.UNSHARD))
            if one is action or action.computation_type is Computation.FULL_BACKWARD
        ]
        for rank, row in listed.items()
    }
    with pytest.raises(ValueError, match="after the action"):
        received_in(waiting, schedule)
    monkeypatch.setattr(checks, "SEND_WAITS", (Computation.UNSHARD,))
    assert received_in(waiting, schedule) == received_in(listed, schedule)


@defers
def test_lists_that_send_elsewhere_are_refused() -> None:
    """The engine's `sent` comes behind the last SEND of a computation, and a receive before it would be behind it."""
    schedule = build(ScheduleConfig("interleaved-1f1b", 3, 3, num_chunks=2))
    received_in(torchs(schedule), schedule)
    with pytest.raises(ValueError, match=r"torch 2\.\S+ lists \dSEND_[FB]\d on rank \d after \dRECV_[FB]\d, not after"):
        received_in(torchs(schedule, defer=True), schedule)


@pytest.mark.parametrize(("late", "least"), [(2, 2), (8, 8)])
def test_a_host_that_comes_late_is_missed(late: int, least: int) -> None:
    """The teeth: what is received for others so many computations late leaves somebody waiting."""
    stuck = 0
    for schedule in itertools.islice(balanced_schedules(7, 16), 16):
        stuck += bool(blocked_ranks(_hosting_late(schedule, late), WaitLevel.IN_EVERY_OPERATION, Exchange.TORCH))
    assert stuck >= least, stuck


def _hosting_late(schedule: Schedule, late: int) -> Schedule:
    """Every HOST, and the RETURN behind it, so many slots later."""
    ranks = []
    for row in schedule.ranks:
        moved: list[list[Action]] = [[] for _ in row]
        for number, slot in enumerate(row):
            for action in slot.transfers:
                hosts = action.kind in (Kind.HOST, Kind.RETURN)
                moved[min(len(row) - 1, number + late * hosts)].append(action)
        ranks.append(tuple(replace(slot, transfers=tuple(actions)) for slot, actions in zip(row, moved, strict=True)))
    return replace(schedule, ranks=tuple(ranks))
