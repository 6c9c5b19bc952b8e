"""Megatron's fine-grained activation offloading beside `--bpipe`: what it takes stays its own, the rest moves, and no
bit changes."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.gloo.conftest import BPIPE, Case, Outcome
from tests.gloo.test_training import same

OFFLOADING = (
    *("--num-layers", "8", "--global-batch-size", "16", "--transformer-impl", "transformer_engine"),
    *("--spec", "tests.gloo.layers", "attending_plainly", "--fine-grained-activation-offloading"),
    *("--offload-modules", "core_attn", "attn_proj", "--min-offloaded-tensor-size", "1024"),
)
CHUNKS = ("--num-layers", "16", "--num-layers-per-virtual-pipeline-stage", "2")
ROWS = {"one_stage": (), "chunks": CHUNKS}


@pytest.fixture(scope="module")
def rows(run_cases: Callable[..., Outcome]) -> Outcome:
    cases = []
    for name, more in ROWS.items():
        report = ("--bpipe-report", f"{{folder}}/{name}_balanced")
        cases += [
            Case(name, [*OFFLOADING, *more]),
            Case(f"{name}_balanced", [*OFFLOADING, *more, *BPIPE, *report]),
        ]
    return run_cases(4, cases, timeout_s=600, worker="offload_worker.py")


@pytest.mark.timeout(660)
@pytest.mark.parametrize("row", ROWS)
def test_what_offloading_takes_stays_its_own(rows: Outcome, row: str) -> None:
    same(rows, row, f"{row}_balanced", 4)
    report = rows.reports(f"{row}_balanced")[0]
    assert report["evictions"] > 0, "nothing was moved, so nothing was tested"
    assert report["verified_iterations"] == 2
    stock, balanced = (
        json.loads((rows.folder / f"{name}.offloaded.rank0").read_text()) for name in (row, f"{row}_balanced")
    )
    assert stock == balanced, "what was offloaded is not what stock Megatron offloads"
    assert stock[0] == stock[1] > 0, "nothing was offloaded, so nothing was tested"
