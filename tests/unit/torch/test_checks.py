"""What torch's runtime is about to run: its messages in our programs, and what is refused."""

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules
from torch.utils.checkpoint import checkpoint

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.schedule.check.deadlock import blocked_ranks
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.memory import moves_anything, peak_counts
from bpipe.schedule.program import Exchange
from bpipe.schedule.schedule import Schedule
from bpipe.torch import orders
from bpipe.torch.orders import received_in, refuse_split_recomputation, refuse_standstill, torch_orders, why_unmoved
from bpipe.torch.schedule import name_arguments
from bpipe.torch.upstream import Computation, TorchAction
from bpipe.transport.config import TransferConfig
from bpipe.transport.connect import MeasuredLink
from tests.support.hand_made import PLANNED_WAITS

TRANSFERS = TransferConfig()
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
BLOCKING, CONNECTIONS = "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS"


def test_launches_that_block_are_judged_by_the_checker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer over NCCL blocks the host that launches it, and with it the messages that its partner waits for. Such
    a run deadlocked before this level was checked."""
    monkeypatch.delenv(CONNECTIONS, raising=False)
    schedule = build(
        ScheduleConfig("interleaved-1f1b", 6, 12, num_chunks=2, balance=BalanceConfig(), exchange=Exchange.TORCH)
    )
    order = torchs(schedule)
    nccl, peer = ([MeasuredLink((rank, 5 - rank), name, {}) for rank in range(3)] for name in ("nccl", "peer"))
    monkeypatch.setenv(BLOCKING, "0")
    refuse_standstill(schedule, order, TRANSFERS, CUDA, nccl)
    monkeypatch.setenv(BLOCKING, "1")
    message = (
        r"with CUDA_LAUNCH_BLOCKING=1 ranks of .* can wait for each other for ever: rank \d waits for .*\. "
        r'Use TransferConfig\(transport="peer"\), or unset CUDA_LAUNCH_BLOCKING'
    )
    with pytest.raises(ValueError, match=message):
        refuse_standstill(schedule, order, TRANSFERS, CUDA, nccl)
    refuse_standstill(schedule, order, TRANSFERS, CUDA, peer)
    refuse_standstill(schedule, order, TRANSFERS, CPU, nccl)


def test_a_send_that_does_not_follow_what_makes_it_is_refused() -> None:
    """If it were deferred, its call of the engine would come after other computations."""
    schedule = build(ScheduleConfig("1f1b", 2, 2))
    order = torchs(schedule)
    place = next(place for place, action in enumerate(order[0]) if action.computation_type is Computation.SEND_F)
    order[0].insert(place, TorchAction.from_str("0RECV_B0"))
    with pytest.raises(ValueError, match=r"lists 0SEND_F0 on rank 0 after 0RECV_B0, not after the action whose result"):
        received_in(order, schedule)


def test_a_rank_that_was_to_evict_and_moved_nothing_is_told_why() -> None:
    """A small model trained balanced and moved 0 bytes without a message: all its storages were below 64 KiB."""
    schedule = build(ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig()))
    assert "less than 65536 bytes" in (why_unmoved(schedule, 0, {0: 0}, 65536) or "")
    assert "less than 65536 bytes" in (why_unmoved(schedule, 0, {}, 65536) or "")
    assert why_unmoved(schedule, 0, {0: 1}, 65536) is None
    assert why_unmoved(schedule, 3, {}, 65536) is None


def test_an_error_that_names_flags_says_the_arguments() -> None:
    error, plain = RuntimeError("the time-out is 60 s, --bpipe-timeout: --bpipe-transport host"), ValueError("1F1B")
    name_arguments(error)
    name_arguments(plain)
    assert error.__notes__ == [
        "bpipe: under torch.distributed.pipelining --bpipe-transport is transport of TransferConfig, "
        "--bpipe-timeout is timeout_s of TransferConfig"
    ]
    assert not hasattr(plain, "__notes__")


def test_halves_of_a_stage_that_recomputes_are_refused() -> None:
    """Torch's own error came from the second half, in the middle of a step, and named nothing."""
    x = torch.randn(4, 8, requires_grad=True)
    stage = SimpleNamespace(stage_index=3, dw_builder=None)
    out = checkpoint(torch.exp, torch.sin(x), use_reentrant=False)
    with pytest.raises(ValueError, match=r"stage 3 recomputes \(torch\.utils\.checkpoint\) and zb-v splits"):
        refuse_split_recomputation(stage, [out], "zb-v")
    refuse_split_recomputation(stage, [torch.exp(torch.sin(x))], "zb-v")
    stage.dw_builder = lambda: lambda: None
    refuse_split_recomputation(stage, [out], "zb-v")


ONE_PIPE = [name for name, family in FAMILIES.items() if family.num_pipes == 1]


def torchs(schedule: Schedule) -> dict[int, list[Any]]:
    """Torch's own lists, including messages."""
    order = {rank: list(row) for rank, row in torch_orders(schedule).items()}
    owner = schedule.layout.placements[0].__getitem__
    return schedules._add_send_recv(order, owner, schedule.num_stages)


def balanced_schedules(seed: int, count: int) -> Iterator[Schedule]:
    """Schedules of random families, sizes, bounds and hosts in which something moves."""
    rnd = random.Random(seed)
    count_made = 0
    while count_made < count:
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
            count_made += 1
            yield schedule


LEVELS = [(waits, births) for waits in PLANNED_WAITS for births in (False, True)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [15, pytest.param(30, marks=pytest.mark.slow)])
def test_no_balanced_schedule_deadlocks(count: int) -> None:
    """At every level of waiting, with communicators that are made on the way or before."""
    for schedule in balanced_schedules(1, count):
        for waits, births in LEVELS:
            stuck = blocked_ranks(schedule, waits, Exchange.TORCH, births)
            assert not stuck, (schedule.name, schedule.num_ranks, schedule.num_microbatches, waits, births, stuck)


def test_waits_for_sends_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.15 lists them between a backward and its SEND_B, and every schedule was refused."""
    schedule = build(ScheduleConfig("interleaved-1f1b", 3, 3, num_chunks=2))
    listed = torchs(schedule)
    # Torch before 2.15 has no such action, so UNSHARD takes its place.
    waiting = {
        rank: [
            candidate
            for action in row
            for candidate in (action, action._replace(computation_type=Computation.UNSHARD))
            if candidate is action or action.computation_type is Computation.FULL_BACKWARD
        ]
        for rank, row in listed.items()
    }
    with pytest.raises(ValueError, match="after the action"):
        received_in(waiting, schedule)
    monkeypatch.setattr(orders, "SEND_WAITS", (Computation.UNSHARD,))
    assert received_in(waiting, schedule) == received_in(listed, schedule)
