"""`bpipe.torch` over gloo: the bits of torch's own schedule classes, and the peaks that were predicted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gloo.conftest import ROOT
from tests.gloo.pipelined import CASES

Found = list[dict[str, Any]]


def ran(world: int, folder: Path, module: str = "tests.gloo.pipelined", timeout_s: float = 170.0) -> Found:
    command = [sys.executable, "-W", "ignore", "-m", module, str(world), str(folder)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]


@pytest.fixture(scope="module", params=[2, 4], ids=["p2", "p4"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return ran(request.param, tmp_path_factory.mktemp("pipelined"))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("case", CASES)
def test_every_bit_is_that_of_torchs_own_class(case: str, found: Found) -> None:
    assert [rank[case]["same"] for rank in found] == [True] * len(found)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("case", CASES)
def test_peaks_are_those_predicted(case: str, found: Found) -> None:
    peaks = [(rank[case]["peak"], rank[case]["predicted"]) for rank in found]
    if CASES[case].frees:
        assert all(measured <= predicted for measured, predicted in peaks), peaks
    else:
        assert [measured for measured, _ in peaks] == [predicted for _, predicted in peaks]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("case", CASES)
def test_what_was_to_leave_has_left(case: str, found: Found) -> None:
    for rank in found:
        of_case = rank[case]
        assert (of_case["moved"] > 0) is (of_case["evictions"] > 0)
        # What a stage hands over on its own rank is held by both stages, and stays.
        assert CASES[case].frees or all(share > 0.9 for share in of_case["shares"]), of_case["said"]
    if len(found) == 4:
        assert any(rank[case]["evictions"] for rank in found) is CASES[case].moves


@pytest.mark.timeout(180)
def test_every_step_is_verified_where_that_is_asked(found: Found) -> None:
    assert [rank["1f1b, verified"]["verified"] for rank in found] == [2] * len(found)
