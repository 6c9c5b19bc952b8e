"""What a rank says of the buffers it would keep in its host's memory, before a micro-batch was measured."""

from __future__ import annotations

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.runtime.links import host_buffers


def test_on_a_cpu_nobody_knows_how_large_they_may_be() -> None:
    assert host_buffers(build(ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig())), 0, 0).most_bytes == 0
