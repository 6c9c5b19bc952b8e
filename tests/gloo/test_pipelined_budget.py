"""`bpipe.torch` within a memory budget has the bits of torch's own class, and on every rank the planned bytes."""

from __future__ import annotations

import pytest

from tests.gloo.conftest import asked_for, forked, slow_but
from tests.gloo.pipelined_budget import CASES
from tests.gloo.test_pipelined import Results

pytestmark = pytest.mark.timeout(180)

RANKS = 4
ALWAYS = {"1f1b, parts of a micro-batch", "interleaved, own memory", "FSDP2"}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    names = {*ALWAYS, "too small", *(name for (name,) in asked_for(request, "case"))}
    return forked("pipelined", tmp_path_factory.mktemp("budget"), str(RANKS), "pipelined_budget", *sorted(names))


@pytest.mark.parametrize("case", slow_but(ALWAYS, CASES))
def test_every_bit_is_that_of_torchs_own_class(case: str, results: Results) -> None:
    """Measuring a stage runs it, which must not change random numbers or buffers."""
    assert [rank[case]["same"] for rank in results] == [True] * RANKS
    assert all(all(rank[case]["buffers"]) for rank in results)
    assert bool(results[0][case]["buffers"]) is (case == "random numbers and buffers")


@pytest.mark.parametrize("case", slow_but(ALWAYS, CASES))
def test_peaks_are_those_planned_and_keep_the_budget(case: str, results: Results) -> None:
    for rank in (rank_results[case] for rank_results in results):
        assert rank["measured"] == rank["predicted"] <= rank["budget"]
        assert (rank["evictions"] > 0) is (rank["alone"] > rank["budget"])
        assert (rank["moved"] > 0) is (rank["evictions"] > 0)
    assert any(rank[case]["evictions"] for rank in results) is (CASES[case].least < 1)


@pytest.mark.parametrize("case", slow_but(ALWAYS, CASES))
def test_a_trace_without_memory_predicts_what_was_measured(case: str, results: Results) -> None:
    """Modules are traced on fake tensors before anything starts; sharding parameters does not change the prediction."""
    for rank in (rank_results[case] for rank_results in results):
        assert (rank["traced alone"], rank["traced"]) == (rank["alone"], rank["measured"])


def test_parts_leave_where_they_are_enough(results: Results) -> None:
    assert results[0]["1f1b, parts of a micro-batch"]["parts"] == [0]
    assert results[0]["FSDP2"]["parts"] == []


def test_a_budget_that_nothing_keeps_is_refused_everywhere_with_the_smallest(results: Results) -> None:
    messages = {rank["too small"]["said"] for rank in results}
    assert len(messages) == 1
    text = messages.pop()
    assert text.startswith(
        "memory: no plan keeps ranks 0 and 3 within 0.000019 GiB per device. The smallest budget that one"
    )
    assert 'hosts="host"' in text
