"""Several trainings in one process without Megatron: each releases its resources, and none waits for a missing rank."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gloo import twice
from tests.gloo.conftest import forked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

NOTHING = {"files": 0, "mappings": 0, "groups": 0, "threads": 0}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return forked("twice", tmp_path_factory.mktemp("twice"), timeout_s=100)


def test_every_training_has_torchs_bits_and_leaves_nothing(results: list[dict[str, Any]]) -> None:
    """Each training left two threads, three groups and a piece of shared memory."""
    for rank in results:
        assert [training["same"] for training in rank["trainings"]] == [True] * len(twice.TRANSPORTS)
        assert [training["left"] for training in rank["trainings"]] == [NOTHING] * len(twice.TRANSPORTS)
    for number, transport in enumerate(twice.TRANSPORTS):
        evictor, lender = (results[rank]["trainings"][number] for rank in (0, 3))
        assert evictor["moved"] > 0
        for training in (evictor, lender):
            assert (training["held"]["files"] > 0) is (training["held"]["mappings"] > 0) is (transport == "peer")
            assert training["held"]["groups"] == (3 if transport == "gloo" else 1)
            assert training["held"]["threads"] == 2


def test_a_loop_of_ones_own_leaves_nothing(results: list[dict[str, Any]]) -> None:
    for rank in results:
        first, second = rank["own loop"]
        assert first == second
        assert first[-1] == NOTHING


def test_a_closed_schedule_takes_no_step(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert rank["refusal"].startswith("this BalancedSchedule is closed: ")


def test_an_error_between_two_steps_waits_for_nobody(results: list[dict[str, Any]]) -> None:
    assert all(rank["raised_s"] < 1.0 for rank in results), [rank["raised_s"] for rank in results]


def test_a_partner_that_left_is_named_and_not_waited_for(results: list[dict[str, Any]]) -> None:
    """Rank 3 lends to rank 0; the others have no partner."""
    (line,) = results[0]["alone"]
    assert line.startswith("bpipe: memory that ranks lend to each other stays until this process ends: ")
    assert results[1]["alone"] == results[2]["alone"] == []
    assert all(rank["alone_s"] < twice.TIMEOUT_S for rank in results[:3])
