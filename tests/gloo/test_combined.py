"""Megatron's combined 1F1B in the unmodified trainer, with experts on several ranks: moving activations changes no bit.

Exchanges of experts go through gloo, one stream stands in for both, and `megatron.scheduling.cpu` lets an all-to-all take
its sizes as tensors. Freed and refilled memory is poisoned, and what moves is checked, as in any run with what is guarded.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.gloo.conftest import BPIPE, Case, Outcome, asked_for
from tests.gloo.test_parallelism import INPUT_BYTES
from tests.gloo.test_training import same, slowly

COMBINED = (
    *("--num-layers", "8", "--global-batch-size", "16", "--bf16", "--disable-bias-linear", "--num-experts", "4"),
    *("--moe-router-topk", "2", "--moe-aux-loss-coeff", "0.01", "--moe-token-dispatcher-type", "alltoall"),
    *("--expert-model-parallel-size", "2", "--overlap-moe-expert-parallel-comm"),
)
CAPACITY = ("--moe-expert-capacity-factor", "1.0", "--moe-pad-expert-input-to-capacity")
# Two stages of a rank of two are one apart: in pairs they have nothing to gain, so what leaves goes to the node's memory.
TWO = ("--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "2")
HOST = ("--bpipe-hosts", "host", "--bpipe-bound", "4")
FOUR = ("--pipeline-model-parallel-size", "4", "--num-layers-per-virtual-pipeline-stage", "1")
SHARED = ("--moe-shared-expert-intermediate-size", "32", "--swiglu")

# Stock's flags on 4 ranks, and ours.
ROWS = {
    "padded": ((*TWO, *CAPACITY), HOST),
    "dropless_and_dense": ((*TWO, "--moe-layer-freq", "2"), HOST),
    "shared_experts": ((*TWO, *CAPACITY, *SHARED), HOST),
    "further_tokens": ((*TWO, *CAPACITY, "--mtp-num-layers", "1", "--position-embedding-type", "rope"), HOST),
    "recomputed": (
        (*TWO, *CAPACITY, "--recompute-granularity", "selective", "--recompute-modules", "layernorm", "core_attn"),
        HOST,
    ),
    "together": (
        (
            *(*TWO, *CAPACITY, *SHARED),
            *("--mtp-num-layers", "1", "--position-embedding-type", "rope"),
            *("--recompute-granularity", "selective", "--recompute-modules", "layernorm", "core_attn"),
        ),
        HOST,
    ),
}
# Each of these has a share of the row `together`.
ALONE = ("padded", "shared_experts", "further_tokens", "recomputed")
# On 8 ranks, in pairs: of fewer than 8 micro-batches nothing would move.
EIGHT = (*FOUR, "--global-batch-size", "32")
WIDE_ROWS = {
    "pairs": ((*EIGHT, *CAPACITY), ()),
    "pairs_no_overlap": ((*EIGHT, *CAPACITY, "--no-overlap-p2p-communication"), ()),
    "pairs_dropless": (EIGHT, ("--bpipe-transport", "gloo")),
}


def cases_of(rows: dict[str, tuple[tuple[str, ...], tuple[str, ...]]], request: pytest.FixtureRequest) -> list[Case]:
    wanted = {name for (name,) in asked_for(request, "row")}
    cases = []
    for name, (stock, ours) in rows.items():
        if name in wanted:
            report = ("--bpipe-report", f"{{folder}}/{name}_balanced")
            cases += [
                Case(name, [*COMBINED, *stock]),
                Case(f"{name}_balanced", [*COMBINED, *stock, *BPIPE, *ours, *report]),
            ]
    return cases


@pytest.fixture(scope="module")
def four(run_cases: Callable[..., Outcome], request: pytest.FixtureRequest) -> Outcome:
    return run_cases(4, cases_of(ROWS, request), timeout_s=900)


@pytest.fixture(scope="module")
def eight(run_cases: Callable[..., Outcome], request: pytest.FixtureRequest) -> Outcome:
    return run_cases(8, cases_of(WIDE_ROWS, request), timeout_s=900)


def moved_and_was_checked(outcome: Outcome, row: str) -> None:
    first = outcome.reports(f"{row}_balanced")[0]
    assert first["evictions"] > 0, "nothing was moved, so nothing was tested"
    assert first["verified_iterations"] == 2
    said = outcome.logs[0].split(f"=== {row}_balanced")[1].split("===")[0]
    assert "guarded (see docs/supported.md): combined 1F1B" in said
    share = re.search(r"stage 0 moves (\d\.\d+) of what a forward keeps for its backward", said)
    assert share is not None
    assert float(share[1]) > 0.9, "parts of a graph in pieces were not found"


@pytest.mark.timeout(960)
@pytest.mark.parametrize("row", [slowly(row) if row in ALONE else row for row in ROWS])
def test_combined_1f1b_with_activations_away_has_its_own_bits(four: Outcome, row: str) -> None:
    same(four, row, f"{row}_balanced", 4)
    moved_and_was_checked(four, row)


@pytest.mark.slow
@pytest.mark.timeout(960)
@pytest.mark.parametrize("row", WIDE_ROWS)
def test_combined_1f1b_in_pairs_has_its_own_bits(eight: Outcome, row: str) -> None:
    same(eight, row, f"{row}_balanced", 8)
    moved_and_was_checked(eight, row)


@pytest.mark.timeout(960)
@pytest.mark.parametrize("row", [slowly("padded"), slowly("shared_experts"), slowly("recomputed"), "together"])
def test_a_rank_holds_what_was_predicted(four: Outcome, row: str) -> None:
    """What runs together with a backward counts, too: both are held during a pair."""
    for report in four.reports(f"{row}_balanced"):
        assert report["peak_microbatches"] == report["predicted_microbatches"]
        assert abs(report["peak_bytes"] - report["predicted_bytes"]) <= 2 * INPUT_BYTES, f"stage {report['stage']}"
