"""Engines of all ranks in threads, where one sends to several and several to one: the bits of one piece, the peaks of
the plan.

Freed memory is poisoned, transfers are late, and every iteration is another's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from bpipe.balance.budget import ActivationBudget
from bpipe.balance.config import BalanceConfig
from bpipe.balance.pairs import allocated_bytes
from bpipe.balance.pool import balance_over_pool
from bpipe.build import ScheduleConfig, build
from bpipe.runtime.config import EngineConfig
from bpipe.runtime.engine import Engine
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.check.rules import check
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.host_buffers import guests_of
from bpipe.schedule.hosts import device_ranks, read_hosts
from bpipe.schedule.memory import memory_of
from bpipe.schedule.schedule import Schedule, Slot
from bpipe.transport.config import TransferConfig
from tests.unit.runtime.pipeline import in_one_piece
from tests.unit.runtime.threaded import CPU, KINDS, Pipeline


def in_counts(announced: Sequence[int], name: str = "1f1b", m: int = 8, v: int = 1) -> Schedule:
    plain = FAMILIES[name].generate(len(announced), m, v)
    return balance_over_pool(plain, ActivationBudget(tuple(announced), memory_of([1] * plain.num_stages)))


POOLS: dict[str, Callable[[], Schedule]] = {
    "one to several": lambda: in_counts((2, 3, 3, 3)),
    "several to one": lambda: in_counts((3, 2, 2, 6)),
    "three to one": lambda: in_counts((4, 3, 2, 3, 11), m=10),
    "both": lambda: in_counts((3, 3, 4, 5, 4, 4), m=12),
    "chunks": lambda: in_counts((9, 9, 8, 6), "interleaved-1f1b", 8, 2),
    "halves, as a V": lambda: build(
        ScheduleConfig("v-half", 4, 8, num_chunks=2, balance=BalanceConfig((4, 7, 7, 7), hosts="pool"))
    ),
}


def test_they_are_no_pairs() -> None:
    for name, make in POOLS.items():
        schedule = make()
        check(schedule)
        others = [
            {*device_ranks(schedule.hosts[rank]), *guests_of(schedule, rank)} for rank in range(schedule.num_ranks)
        ]  # type: ignore[index]
        assert max(map(len, others)) > 1, name
    assert max(len(guests_of(POOLS["three to one"](), rank)) for rank in range(5)) == 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", POOLS)
def test_pools_move_activations_and_give_the_bits_of_the_model_in_one_piece(name: str, kind: str) -> None:
    schedule = POOLS[name]()
    pipeline = Pipeline(schedule, kind, timeout_s=20.0)
    found = pipeline.run(3)
    assert all(map(torch.equal, found, in_one_piece(schedule.num_stages, schedule.num_microbatches, 3)))
    held = [
        sum(allocated_bytes(schedule, rank, memory_of([1] * schedule.num_stages))) for rank in range(schedule.num_ranks)
    ]
    if not schedule.split_stages:
        assert [meter.peak_microbatches for meter in pipeline.meters] == held


def test_a_micro_batch_goes_to_one_host_only() -> None:
    """A file may say otherwise; what leaves a second time is still known to whoever sent it first."""
    plain = FAMILIES["1f1b"].generate(4, 4, 1)
    rows = [list(row) for row in plain.ranks]
    for slot, host, kinds in ((2, 2, "EH"), (3, 2, "LR"), (4, 3, "EH"), (5, 3, "LR")):
        own, other = (Kind.EVICT, Kind.HOST) if kinds == "EH" else (Kind.LOAD, Kind.RETURN)
        for rank, kind in ((0, own), (host, other)):
            rows[rank][slot] = Slot(rows[rank][slot].compute, (*rows[rank][slot].transfers, Action(0, kind, 1)))
    schedule = replace(plain, ranks=tuple(map(tuple, rows)), hosts=read_hosts("2+3,none,none,none"))
    check(schedule)
    with pytest.raises(
        ValueError, match=r"rank 0: micro-batch 1 of stage 0 is evicted both to rank 2 and to rank 3 in one iteration"
    ):
        Engine(schedule, 0, {}, EngineConfig("rank 0", CPU, TransferConfig(minimum_bytes=1, timeout_s=1.0)))
