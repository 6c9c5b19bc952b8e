"""--bpipe-hosts ports: what cannot stand beside it, what is planned, and what a rank says of the memory that it keeps for others."""

from __future__ import annotations

from typing import Any

import pytest

from bpipe import cli
from bpipe.ir.host_buffers import num_passed_on, passed_on_for
from bpipe.ir.memory import peak_counts
from bpipe.program import BalanceConfig, ScheduleConfig, build
from bpipe.transport.host_memory import Buffers
from megatron.scheduling.choosing import balance_asked, own_schedule
from megatron.scheduling.links import own_buffers
from megatron.scheduling.schedule_lines import describe
from tests.unit.scheduling.test_budgets import WORDS, asked
from tests.unit.scheduling.test_choosing import args

GIB = 1 << 30
PORTS = {"bpipe": True, "bpipe_hosts": "ports", "bpipe_transport": "auto", "bpipe_differing_sizes": False}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"bpipe": False}, r"--bpipe-hosts ports says how to balance: give --bpipe, too"),
        ({"bpipe_transport": "peer"}, r"has to hear when it has come, and with --bpipe-transport peer it would not: leave that out"),
        ({"bpipe_transport": "host"}, r"has to hear when it has come, and with --bpipe-transport host it would not: leave that out"),
        ({"bpipe_differing_sizes": True}, r"where micro-batches differ in size, .* take --bpipe-hosts host, or pad them to one size"),
        ({"variable_seq_lengths": True}, r"where micro-batches differ in size, .* take --bpipe-hosts host, or pad them to one size"),
    ],
)
def test_what_cannot_stand_beside_it_is_refused_with_the_reason(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        balance_asked(args(**PORTS | flags))


@pytest.mark.parametrize("transport", ["auto", "gloo", "nccl"])
def test_who_passes_on_takes_part(transport: str) -> None:
    how, told = balance_asked(args(**PORTS | {"bpipe_transport": transport, "bpipe_bound": (3,)}))
    assert how == BalanceConfig((3,), buffers_stay=True, hosts="ports")
    assert told == ()
    found = own_schedule(args(**PORTS | {"bpipe_executor": True, "bpipe_bound": (3,)}))
    assert found is not None
    assert passed_on_for(build(found), 3) == (0,)


def test_a_budget_is_the_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The lines in the log are those that `bpipe simulate` prints, of the same flags."""
    words = (*WORDS, "--bpipe-hosts", "ports")
    how, told = balance_asked(asked(monkeypatch, "2.5", "--bpipe-hosts", "ports", **PORTS))
    assert how is not None
    schedule = build(ScheduleConfig("1f1b", 4, 24, balance=how))
    assert any(num_passed_on(schedule, rank) for rank in range(4))
    assert any(", through rank 3 that one's node hosts " in line for line in told)
    simulate = ["simulate", "--cluster", "h100-80g:3x8", "--kernels", "cpu", "--attention", "unfused", "--memory", "2.5"]
    assert cli.main([*simulate, "--", *words]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert list(told) == [line for line in printed if line in told]


def test_what_a_rank_keeps_for_others_counts_in_its_nodes_memory() -> None:
    """As large as the largest that it may be: of its own rank's micro-batches or of those for whom it passes on."""
    plan = build(ScheduleConfig("1f1b", 8, 32, balance=BalanceConfig((5,), hosts="ports")))
    for rank in (5, 6, 7):
        fewest = min(peak_counts(plan)[one] for one in (rank, *passed_on_for(plan, rank)))
        assert own_buffers(plan, rank, 80 * GIB) == Buffers(num_passed_on(plan, rank), 80 * GIB // fewest)
    assert own_buffers(plan, 4, 80 * GIB) == Buffers(0)


def test_the_log_says_where_each_goes() -> None:
    plan = build(ScheduleConfig("1f1b", 8, 16, balance=BalanceConfig((6,), hosts="ports")))
    said = describe(plan)
    assert (
        "0 -> its own memory (2 of 16, 2 host buffers), 0 -> a node's memory through 7 (2 of 16, 2 host buffers and 2 on the device of 7), "
        in said
    )
