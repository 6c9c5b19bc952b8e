"""`bpipe.torch` over gloo has the bits of torch's own schedule classes, and the predicted peaks."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

from bpipe.cli import main
from tests.gloo.conftest import asked_for, forked
from tests.gloo.pipelined import CASES

pytestmark = pytest.mark.timeout(180)

Results = list[dict[str, Any]]


def parameters(named: Mapping[str, Any], always: Collection[str]) -> list[Any]:
    """Return names as parameters: slow except `always`; skipped if the installed torch cannot train them."""
    return [
        pytest.param(
            name,
            marks=[
                *([pytest.mark.skip(reason=case.lacks)] if case.lacks else []),
                *([] if name in always else [pytest.mark.slow]),
            ],
        )
        for name, case in named.items()
    ]


ALWAYS = {
    *("1f1b over peer", "1f1b, verified", "1f1b, reported", "interleaved", "InterleavedZeroBubble", "DualPipeV"),
    *("v-half", "pool", "a file, balanced", "several tensors, keywords, evaluation"),
}
ALL = parameters(CASES, ALWAYS)


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow, id="p2"), pytest.param(4, id="p4")])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pipelined")
    names = {"1f1b, verified", *(name for (name,) in asked_for(request, "case"))}
    forked("pipelined", path, str(request.param), "pipelined", *sorted(names))
    return path


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank?.json"))]


@pytest.mark.parametrize("case", ALL)
def test_every_bit_is_that_of_torchs_own_class(case: str, results: Results) -> None:
    assert [rank[case]["same"] for rank in results] == [True] * len(results)


@pytest.mark.parametrize("case", ALL)
def test_peaks_are_those_predicted(case: str, results: Results) -> None:
    peaks = [(rank[case]["peak"], rank[case]["predicted"]) for rank in results]
    if CASES[case].frees:
        assert all(measured <= predicted for measured, predicted in peaks), peaks
    else:
        assert [measured for measured, _ in peaks] == [predicted for _, predicted in peaks]


@pytest.mark.parametrize("case", ALL)
def test_what_was_to_leave_has_left(case: str, results: Results) -> None:
    for rank in results:
        of_case = rank[case]
        assert (of_case["moved"] > 0) is (of_case["evictions"] > 0)
        # A tensor that a stage passes within its own rank is held by both stages, and is not evicted.
        assert CASES[case].frees or all(share > 0.9 for share in of_case["shares"]), of_case["said"]
    if len(results) == 4:
        assert any(rank[case]["evictions"] for rank in results) is CASES[case].moves


def test_every_step_is_verified_where_that_is_asked(results: Results) -> None:
    assert [rank["1f1b, verified"]["verified"] for rank in results] == [2] * len(results)


@pytest.mark.parametrize("case", parameters({name: case for name, case in CASES.items() if case.is_reported}, ALWAYS))
def test_a_report_of_a_run_judges_it(
    case: str, folder: Path, results: Results, capsys: pytest.CaptureFixture[str]
) -> None:
    """`bpipe report` works as for a run under Megatron."""
    assert main(["report", str(folder / case), "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    stages = report["stages"]
    assert report["iterations"] == [3, 4]
    assert [stage["evictions"] for stage in stages] == [rank[case]["evictions"] for rank in results]
    assert [stage["measured_microbatches"] for stage in stages] == [rank[case]["peak"] for rank in results]
    for place, stage in enumerate(stages):
        # What a stage passes to another stage of the same rank is held by both, and is not evicted.
        folds = CASES[case].places == "v" and place == len(results) - 1
        assert stage["measured_bytes"] == pytest.approx(stage["predicted_bytes"], rel=0.1 if folds else 0)
    losses = [json.loads(line)["loss"] for line in (folder / case / "iterations.jsonl").read_text().splitlines()]
    assert len(losses) == 4
