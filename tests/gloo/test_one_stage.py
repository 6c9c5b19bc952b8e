"""`--bpipe` where there is one stage, and so nothing to balance: it is said, the run is recorded, and no bit is
another."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bpipe.record.report.output.table import table
from bpipe.record.report.report import report_of
from tests.gloo.compare import same
from tests.gloo.conftest import Case, Outcome
from tests.gloo.flags import BPIPE

# Two replicas of a model of one stage.
ONE = "--pipeline-model-parallel-size 1 --global-batch-size 16"


@pytest.mark.timeout(240)
def test_one_stage_says_so_and_is_recorded(run_cases: Callable[..., Outcome]) -> None:
    cases = [Case("stock", ONE), Case("asked", f"{ONE} {BPIPE} --bpipe-report {{folder}}/asked")]
    outcome = run_cases(2, cases, 200)
    same(outcome, "stock", "asked", 2)
    said = "bpipe: 1f1b, 1 stage, 4 micro-batches: a single stage has no other to share with; training as usual"
    assert sum(log.count(said) for log in outcome.logs) == 1
    for row in outcome.reports("asked"):
        assert (row["peak_microbatches"], row["evictions"]) == (1, 0)
        assert row["peak_bytes"] == row["predicted_bytes"] > 0
    report = report_of(outcome.report_folder("asked"))
    assert report.comparison.measured.schedule.num_ranks == 1
    text = table(report)
    assert "1f1b, 1 stage, 4 micro-batches" in text
    assert "Stage 0 (rank 0) is the memory bottleneck: 2.0 MiB of activations" in text
    assert "With 1 stage and 4 micro-batches there was nothing to balance." in text
