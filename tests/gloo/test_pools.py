"""A pool of hosts in the unmodified trainer: uneven stages, one that sends to several, several that send to one.

Moving changes no bit, memory is as predicted, and with uneven stages a pool reaches a lower peak than pairs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from bpipe.plan.budget import Devices, budget_text, within
from tests.gloo.compare import as_predicted, devices_of, same
from tests.gloo.conftest import Case, Outcome
from tests.gloo.flags import BPIPE, INPUT_BYTES, REPORT
from tests.support.smallest import smallest_bytes

pytestmark = pytest.mark.timeout(400)

BATCH = "--global-batch-size 16"
# The first two stages are large, and their partners in pairs have too little room.
UNEVEN = f"--num-layers 9 --pipeline-model-parallel-layout Et*4|t*2|t*2|tL {BATCH}"
POOL = "--bpipe-hosts pool"


def uneven(hosts: str) -> Devices:
    return devices_of(f"{UNEVEN} --bpipe-hosts {hosts}")


def least(hosts: str) -> str:
    """Return the smallest budget that a plan keeps, in GiB."""
    return budget_text([smallest_bytes(uneven(hosts))])


@pytest.fixture(scope="module")
def four(run_cases: Callable[..., Outcome]) -> Outcome:
    pair, pool = least("pair"), least("pool")
    ours = {
        "to_several": f"{BATCH} {POOL} --bpipe-bound 2,3,3,3 --bpipe-transport gloo",
        "to_one": f"{BATCH} {POOL} --bpipe-bound 3,2,2,6 --bpipe-transport peer --bpipe-executor",
        "uneven_pair": f"{UNEVEN} --bpipe-memory {pair} --bpipe-transport peer",
        "uneven_pool": f"{UNEVEN} --bpipe-memory {pool} {POOL} --bpipe-transport peer",
        "uneven_auto": f"{UNEVEN} --bpipe-memory auto:{pool} {POOL} --bpipe-transport gloo",
    }
    cases = [Case("even", BATCH), Case("uneven", UNEVEN)]
    return run_cases(4, [*cases, *(Case(name, f"{BPIPE} {REPORT} {flags}") for name, flags in ours.items())])


@pytest.mark.parametrize(
    ("stock", "name"),
    [
        ("even", "to_several"),
        ("even", "to_one"),
        ("uneven", "uneven_pair"),
        ("uneven", "uneven_pool"),
        ("uneven", "uneven_auto"),
    ],
)
def test_a_pool_changes_no_bit_and_holds_what_was_predicted(four: Outcome, stock: str, name: str) -> None:
    same(four, stock, name, 4)
    as_predicted(four, name, 4, moves=True)


def test_who_hosts_for_whom(four: Outcome) -> None:
    assert "evicting 0 -> 2 (2 of 8, 1 host buffers), 0 -> 3 (5 of 8, 2 host buffers)\n" in four.said("to_several")
    assert re.search(
        r"evicting 0 -> 3 \(\d of 8, 2 host buffers\), 1 -> 3 \(\d of 8, 2 host buffers\)\n", four.said("to_one")
    )
    assert [report["evictions"] > 0 for report in four.reports("to_one")] == [True, True, False, False]
    fit = within(replace(uneven("pool"), budget_bytes=(int(float(least("pool")) * 2**30),) * 4))
    for line in need_lines(four, "uneven_pool"):
        assert line.startswith("bpipe: rank ")
    assert any(len(of_rank) > 1 for of_rank in fit.schedule.hosts or ())


def need_lines(outcome: Outcome, name: str) -> list[str]:
    lines = [line for line in outcome.said(name).splitlines() if " would need " in line]
    assert lines
    return lines


def test_where_stages_differ_a_pool_reaches_less_than_pairs(four: Outcome) -> None:
    """Compare the fullest ranks: measured activations plus predicted weights, gradients and optimizer state."""
    fullest = {}
    for name, hosts in (("uneven_pair", "pair"), ("uneven_pool", "pool")):
        besides = uneven(hosts).besides
        need_bytes = [
            report["peak_bytes"] + besides.fixed_bytes[rank] for rank, report in enumerate(four.reports(name))
        ]
        assert max(need_bytes) <= float(least(hosts)) * 2**30 + INPUT_BYTES
        fullest[hosts] = max(need_bytes)
    assert fullest["pool"] < 0.97 * fullest["pair"]
