"""Gradients of weights that are added up inside their matrix product, as GPUs do by default; see fused_worker for
what stands in."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gloo.conftest import Case, Outcome
from tests.gloo.test_parallelism import INTERLEAVED, pair
from tests.gloo.test_training import same

DEFERRED = (
    "--global-batch-size",
    "16",
    "--defer-embedding-wgrad-compute",
    "--spec",
    "tests.gloo.layers",
    "computing_at_once",
)

FUSED_ROWS = {
    "fused_gradients": ("--global-batch-size", "16"),
    "deferred_embedding_gradients": DEFERRED,
    "interleaved_deferred": (
        *INTERLEAVED,
        *DEFERRED,
        "--untie-embeddings-and-output-weights",
        "--wgrad-deferral-limit",
        "3",
    ),
}


@pytest.fixture(scope="module")
def fused(run_cases: Callable[..., Outcome], request: pytest.FixtureRequest) -> Outcome:
    cases: list[Case] = []
    for name in FUSED_ROWS if request.config.getoption("--slow") else ["fused_gradients"]:
        cases += pair(name, FUSED_ROWS[name])
    return run_cases(4, cases, worker="fused_worker.py")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "row",
    [
        "fused_gradients",
        *(pytest.param(name, marks=pytest.mark.slow) for name in FUSED_ROWS if name != "fused_gradients"),
    ],
)
def test_gradients_added_in_place_are_stock(fused: Outcome, row: str) -> None:
    same(fused, row, f"{row}_balanced", 4)
    assert fused.reports(f"{row}_balanced")[0]["evictions"] > 0, "nothing was moved, so nothing was tested"
