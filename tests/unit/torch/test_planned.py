"""`bpipe.torch.memory_budget`: budgets as they are given, what they are refused beside, and plans of weighed stages."""

from __future__ import annotations

from typing import Any

import pytest

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.schedule.host_buffers import host_buffers, stages_in_buffers
from bpipe.schedule.memory import num_transfers
from bpipe.torch.memory_budget import RankBudgets, budget_bytes
from bpipe.torch.sizes import StageSizes
from bpipe.transport.layout import BufferLayout

PLAIN = build(ScheduleConfig("1f1b", 4, 8))


@pytest.mark.parametrize("given", [0, -1, [], [1, 2, 3], "much", "0"])
def test_what_is_no_budget_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"bytes above 0|number of GiB above 0|3 budgets for 2 ranks"):
        budget_bytes(given, 2)


@pytest.mark.parametrize(
    ("schedule", "how", "differing", "why"),
    [
        (PLAIN, None, False, "balance None evicts nothing"),
        (PLAIN, BalanceConfig((3,)), False, "bounds and memory exclude each other"),
        (PLAIN, BalanceConfig(), True, "it assumes micro-batches of one size"),
        (build(ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig())), BalanceConfig(), False, "is already balanced"),
        (build(ScheduleConfig("zb-h1", 4, 8)), BalanceConfig(), False, "zb-h1 splits backwards"),
    ],
)
def test_a_budget_is_refused_beside_what_says_otherwise(
    schedule: Any, how: BalanceConfig | None, differing: bool, why: str
) -> None:
    with pytest.raises(ValueError, match=f"^memory 5: .*{why}"):
        RankBudgets.of(5, schedule, how, differing)


def test_a_part_is_taken_from_the_end_as_an_evictor_takes_it() -> None:
    sizes = StageSizes(0, 100, (10, 20, 30), (30, 50, 60))
    assert sizes.moved_bytes == 60
    assert sizes.lengths_of(60) == (30, 20, 10)
    assert sizes.lengths_of(31) == (30, 20)
    assert sizes.lengths_of(30) == (30,)
    assert sizes.lengths_of(0) == ()


def test_what_host_buffers_take_to_begin_where_copies_like_it_keeps_the_budget_too() -> None:
    """1,000 bytes take 1,024 in a host buffer: planned without that, a rank of small storages exceeded its budget."""
    lengths = (1000,) * 8
    sizes = {stage: StageSizes(stage, 8000, lengths, (8000,)) for stage in range(4)}
    # Rank 3 holds a micro-batch of its own, and two of rank 0's.
    held = 8000 + 2 * 8 * 1024
    found = RankBudgets((held,) * 4, BalanceConfig()).plan(PLAIN, sizes)
    assert num_transfers(found.schedule, 0).evictions
    hosted = stages_in_buffers(host_buffers(found.schedule, 3))
    assert BufferLayout.of(hosted, dict.fromkeys(sizes, lengths)).nbytes + 8000 == found.need_bytes[3] == held
    with pytest.raises(ValueError, match=r"^memory: no plan keeps .* Micro-batches and host buffers are counted"):
        RankBudgets((held - 1,) * 4, BalanceConfig()).plan(PLAIN, sizes)
