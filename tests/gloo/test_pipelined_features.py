"""`bpipe.torch` with sharded, replicated, compiled, recomputed or cast stages: torch's bits, and nearly all moves."""

from __future__ import annotations

from pathlib import Path

import pytest

from bpipe.torch.upstream import KEEPS_BUFFERS
from tests.gloo.conftest import asked_for, forked
from tests.gloo.pipelined_features import FEATURES, RANKS
from tests.gloo.test_pipelined import Results, parameters

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    names = {*GATHERED, "lean buffers", *(name for (name,) in asked_for(request, "feature"))}
    return forked("pipelined", tmp_path_factory.mktemp("features"), str(RANKS), "pipelined_features", *sorted(names))


# Two features whose forwards gather parameters, and one whose parameters are whole.
GATHERED = ("DDP", "FSDP2", "FSDP2, sharded again behind a forward")
ALWAYS = {*GATHERED, "DTensors between stages", "selectively checkpointed, FSDP2"}
TOGETHER = parameters({name: feature for name, feature in FEATURES.items() if not feature.slow}, ALWAYS)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("feature", [name for name, feature in FEATURES.items() if feature.slow])
def test_a_feature_that_takes_minutes(feature: str, tmp_path: Path) -> None:
    """Inductor needs a C++ compiler."""
    results = forked("pipelined", tmp_path, str(RANKS), "pipelined_features", feature, timeout_s=880.0)
    test_every_bit_is_that_of_torchs_own_class(feature, results)
    test_peaks_are_those_predicted_and_nearly_all_moves(feature, results)
    test_receive_buffers_hold_nothing_between_steps(feature, results)


@pytest.mark.parametrize("feature", TOGETHER)
def test_every_bit_is_that_of_torchs_own_class(feature: str, results: Results) -> None:
    assert [rank[feature]["same"] for rank in results] == [True] * RANKS


@pytest.mark.parametrize("feature", TOGETHER)
def test_peaks_are_those_predicted_and_nearly_all_moves(feature: str, results: Results) -> None:
    assert [rank[feature]["peak"] for rank in results] == [rank[feature]["predicted"] for rank in results]
    assert any(rank[feature]["evictions"] for rank in results)
    for rank in results:
        assert (rank[feature]["moved"] > 0) is (rank[feature]["evictions"] > 0)
        assert all(share >= FEATURES[feature].enough for share in rank[feature]["shares"]), rank[feature]["said"]


def test_parameters_that_are_gathered_for_a_step_are_not_moved(results: Results) -> None:
    """With FSDP2, whole parameters exist from UNSHARD to RESHARD, and every graph saves them."""
    for rank in results:
        assert len({rank[feature]["moved"] for feature in GATHERED}) == 1


@pytest.mark.parametrize("feature", TOGETHER)
def test_receive_buffers_hold_nothing_between_steps(feature: str, results: Results) -> None:
    received = [rank[feature]["received_bytes"] for rank in results]
    # If stages pass DTensors, torch still holds those of the last rank's stages.
    assert received == [0] * RANKS or (not FEATURES[feature].emptied and received[:2] == [0, 0])


def test_lean_buffers_hold_less_at_the_peak_and_nothing_between_steps(results: Results) -> None:
    for rank in (rank_results["lean buffers"] for rank_results in results):
        assert rank["same"]
        assert (rank["between, False"] > 0) is KEEPS_BUFFERS
        assert rank["between, True"] == 0
    peaks = [
        (rank["peak, True"], rank["peak, False"]) for rank in (rank_results["lean buffers"] for rank_results in results)
    ]
    # Later versions of torch release everything but the last stage's input.
    assert [lean < full for lean, full in peaks] == [KEEPS_BUFFERS] * (RANKS - 1) + [True], peaks
