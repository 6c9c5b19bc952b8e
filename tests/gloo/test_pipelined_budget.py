"""`bpipe.torch` within a memory budget: the bits of torch's own class, and on every rank the bytes that were planned."""

from __future__ import annotations

import pytest

from tests.gloo.conftest import forked
from tests.gloo.pipelined_budget import CASES
from tests.gloo.test_pipelined import Found

pytestmark = pytest.mark.timeout(180)

RANKS = 4


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return forked("pipelined", tmp_path_factory.mktemp("budget"), str(RANKS), "pipelined_budget")


@pytest.mark.parametrize("case", CASES)
def test_every_bit_is_that_of_torchs_own_class(case: str, found: Found) -> None:
    """To weigh a stage runs it: that must be seen in no random number and no buffer."""
    assert [rank[case]["same"] for rank in found] == [True] * RANKS
    assert all(all(rank[case]["buffers"]) for rank in found)
    assert bool(found[0][case]["buffers"]) is (case == "random numbers and buffers")


@pytest.mark.parametrize("case", CASES)
def test_peaks_are_those_planned_and_keep_the_budget(case: str, found: Found) -> None:
    for rank in (each[case] for each in found):
        assert rank["measured"] == rank["predicted"] <= rank["budget"]
        assert (rank["evictions"] > 0) is (rank["alone"] > rank["budget"])
        assert (rank["moved"] > 0) is (rank["evictions"] > 0)
    assert any(rank[case]["evictions"] for rank in found) is (CASES[case].least < 1)


@pytest.mark.parametrize("case", CASES)
def test_a_trace_without_memory_predicts_what_was_measured(case: str, found: Found) -> None:
    """Of modules on fake tensors, before anything is started; what shards parameters changes nothing of it."""
    for rank in (each[case] for each in found):
        assert (rank["traced alone"], rank["traced"]) == (rank["alone"], rank["measured"])


def test_parts_leave_where_they_are_enough(found: Found) -> None:
    assert found[0]["1f1b, parts of a micro-batch"]["parts"] == [0]
    assert found[0]["FSDP2"]["parts"] == []


def test_a_budget_that_nothing_keeps_is_refused_everywhere_with_the_smallest(found: Found) -> None:
    said = {rank["too small"]["said"] for rank in found}
    assert len(said) == 1
    text = said.pop()
    assert text.startswith(
        "memory: no plan keeps ranks 0 and 3 within 0.000019 GiB per device. The smallest budget that one"
    )
    assert 'hosts="host"' in text
