"""Megatron's combined 1F1B in the unmodified trainer, with experts on several ranks: moving activations changes no bit.

Experts exchange over gloo, one stream stands in for both, and `megatron.scheduling.cpu` lets an all-to-all take its
sizes as tensors. Freed and refilled memory is poisoned, and what moves is verified, as in any guarded run.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.gloo.compare import row_is_same
from tests.gloo.conftest import Case, Outcome, Row
from tests.gloo.flags import BPIPE, FOUR, INPUT_BYTES, REPORT, TWO

pytestmark = pytest.mark.timeout(2460)

COMBINED = (
    "--num-layers 8 --bf16 --disable-bias-linear --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 "
    "--moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm"
)
CAPACITY = "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"
# With two ranks, pairing gains nothing, so activations go to the node's memory.
CHUNKS_OF_TWO = f"{TWO} --num-layers-per-virtual-pipeline-stage 2 --global-batch-size 16"
HOST = "--bpipe-hosts host --bpipe-bound 4"
SHARED = "--moe-shared-expert-intermediate-size 32 --swiglu"
FURTHER = "--mtp-num-layers 1 --position-embedding-type rope"
RECOMPUTED = "--recompute-granularity selective --recompute-modules layernorm core_attn"
# In pairs: with fewer than 8 micro-batches nothing would move.
PAIRS = f"{FOUR} --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 32"
# Stock's flags, ours, and the number of ranks. Without a capacity, sizes differ from those predicted.
ROWS: dict[str, tuple[str, str, int]] = {
    "padded": (f"{CHUNKS_OF_TWO} {CAPACITY}", HOST, 4),
    "dropless_and_dense": (f"{CHUNKS_OF_TWO} --moe-layer-freq 2", HOST, 4),
    "shared_experts": (f"{CHUNKS_OF_TWO} {CAPACITY} {SHARED}", HOST, 4),
    "further_tokens": (f"{CHUNKS_OF_TWO} {CAPACITY} {FURTHER}", HOST, 4),
    "recomputed": (f"{CHUNKS_OF_TWO} {CAPACITY} {RECOMPUTED}", HOST, 4),
    "together": (f"{CHUNKS_OF_TWO} {CAPACITY} {SHARED} {FURTHER} {RECOMPUTED}", HOST, 4),
    "pairs": (f"{PAIRS} {CAPACITY}", "", 8),
    "pairs_no_overlap": (f"{PAIRS} {CAPACITY} --no-overlap-p2p-communication", "", 8),
    "pairs_dropless": (PAIRS, "--bpipe-transport gloo", 8),
}
ALWAYS = ("together",)
PREDICTED = ("padded", "shared_experts", "recomputed", "together")


def row_of(name: str, stock: str, ours: str, world: int) -> Row:
    common, moves = f"{COMBINED} {stock}", True if name in PREDICTED else None
    case = Case(f"{name}_balanced", f"{common} {BPIPE} {ours} {REPORT}")
    # Both micro-batches of a pair are held while it runs.
    return Row(name, Case(name, common), case, world, name not in ALWAYS, moves=moves, slack_bytes=2 * INPUT_BYTES)


@pytest.mark.parametrize("row", [row_of(name, *row).parameter() for name, row in ROWS.items()])
def test_combined_1f1b_with_activations_away_has_its_own_bits(trained: Callable[[Row], Outcome], row: Row) -> None:
    outcome = trained(row)
    row_is_same(outcome, row)
    first = outcome.reports(row.ours.name)[0]
    assert first["evictions"] > 0, "nothing was moved, so nothing was tested"
    assert first["verified_iterations"] == 2
    printed = outcome.said(row.ours.name)
    assert "guarded (see docs/supported.md): combined 1F1B" in printed
    share = re.search(r"stage 0 moves (\d\.\d+) of what a forward keeps for its backward", printed)
    assert share is not None
    assert float(share[1]) > 0.9, "parts of a graph in pieces were not found"
