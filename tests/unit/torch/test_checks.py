"""What is refused before torch's runtime runs a schedule, in the words of its arguments."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.record.report.memory import without_transfers
from bpipe.schedule.check.deadlock import WaitLevel, blocked_ranks
from bpipe.schedule.program import Exchange
from bpipe.torch.checks import received_in, refuse_split_recomputation, refuse_standstill, why_unmoved
from bpipe.torch.orders import torch_orders
from bpipe.torch.schedule import name_arguments
from bpipe.torch.upstream import Computation, TorchAction
from bpipe.transport.config import TransferConfig
from bpipe.transport.connect import MeasuredLink
from tests.unit.torch.test_torch_exchange import balanced_schedules, torchs

TRANSFERS = TransferConfig()
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
BLOCKING, CONNECTIONS = "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS"


def test_launches_that_block_are_judged_by_the_checker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer over NCCL holds the host that launches it, and with it the messages that its partner waits for. Until
    this level was known here such a run stood still."""
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


@pytest.mark.timeout(120)
def test_torchs_messages_alone_stand_launches_that_block() -> None:
    """Torch lists a receive where it lists its send, so each two meet; of plans with transfers some stand still."""
    stuck = 0
    for schedule in balanced_schedules(1, 30):
        alone = without_transfers(schedule)
        assert torch_orders(alone) == torch_orders(schedule)
        assert not blocked_ranks(alone, WaitLevel.BLOCKING_LAUNCHES, Exchange.TORCH)
        stuck += bool(blocked_ranks(schedule, WaitLevel.BLOCKING_LAUNCHES, Exchange.TORCH))
    assert 0 < stuck < 30


def test_a_send_that_does_not_follow_what_makes_it_is_refused() -> None:
    """Deferred, its call of the engine would come behind other computations."""
    schedule = build(ScheduleConfig("1f1b", 2, 2))
    order = torchs(schedule)
    place = next(place for place, action in enumerate(order[0]) if action.computation_type is Computation.SEND_F)
    order[0].insert(place, TorchAction.from_str("0RECV_B0"))
    with pytest.raises(ValueError, match=r"lists 0SEND_F0 on rank 0 after 0RECV_B0, not after the action whose result"):
        received_in(order, schedule)


def test_a_rank_that_was_to_evict_and_moved_nothing_is_told_why() -> None:
    """A small model trained balanced and moved 0 bytes without a word: all its storages were below 64 KiB."""
    schedule = build(ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig()))
    assert "less than 65536 bytes" in (why_unmoved(schedule, 0, {0: 0}, 65536) or "")
    assert "less than 65536 bytes" in (why_unmoved(schedule, 0, {}, 65536) or "")
    assert why_unmoved(schedule, 0, {0: 1}, 65536) is None
    assert why_unmoved(schedule, 3, {}, 65536) is None


def test_an_error_that_names_flags_says_the_arguments() -> None:
    error, other = RuntimeError("the time-out is 60 s, --bpipe-timeout: --bpipe-transport host"), ValueError("1F1B")
    name_arguments(error)
    name_arguments(other)
    assert error.__notes__ == [
        "bpipe: under torch.distributed.pipelining --bpipe-transport is transport of TransferConfig, "
        "--bpipe-timeout is timeout_s of TransferConfig"
    ]
    assert not hasattr(other, "__notes__")


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
