"""What a rank says of the buffers it would keep in its host's memory, before a micro-batch was measured."""

from __future__ import annotations

import pytest

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.ir.memory import peak_counts
from bpipe.runtime.links import host_buffers
from bpipe.transport.host_memory import Buffers

GIB = 1 << 30


@pytest.mark.parametrize(("stage", "count"), [(0, 4), (1, 3), (2, 2), (3, 0), (7, 0)])
def test_a_stage_may_come_to_pin_its_share_of_its_device_for_every_buffer(stage: int, count: int) -> None:
    """As many micro-batches as the bound fit into the device: none is larger than an equal part of it."""
    plan = build(ScheduleConfig("1f1b", 8, 32, balance=BalanceConfig()))
    found = host_buffers(plan, stage, 80 * GIB)
    assert found.count == count
    assert found == (Buffers(count, 80 * GIB // peak_counts(plan)[stage]) if count else Buffers(0))


def test_on_a_cpu_nobody_knows_how_large_they_may_be() -> None:
    assert host_buffers(build(ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig())), 0, 0).most_bytes == 0
