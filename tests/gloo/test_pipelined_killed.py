"""If a rank dies under torch's pipelining, all others end in time, each with its place, and leave nothing behind."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.gloo.conftest import asked_for, forked, slow_but
from tests.gloo.pipelined_killed import RANKS

POINTS = [
    f"{rank} {part} {transport}"
    for rank, part, transport in product(range(RANKS), (0, 0.2, 0.5, 0.7, 0.9), ("gloo", "peer"))
]
# The rank that evicts and the one that hosts.
ALWAYS = {"0 0.5 peer", "3 0.5 gloo"}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("killed")
    points = sorted(point for (point,) in asked_for(request, "point"))
    forked("pipelined_killed", folder, *points, timeout_s=50 * len(points))
    return json.loads((folder / "killed.json").read_text())


@pytest.mark.timeout(2000)
@pytest.mark.parametrize("point", slow_but(ALWAYS, POINTS))
def test_the_others_end_in_time_and_say_where_they_were(point: str, results: dict[str, Any]) -> None:
    dying, of_point = int(point.split()[0]), results[point]
    assert of_point["late"] == []
    assert of_point["codes"] == [9 if rank == dying else 1 for rank in range(RANKS)]
    for rank in range(RANKS):
        if rank != dying:
            assert f"bpipe: rank {rank}, stage {rank}, " in of_point["said"][f"rank{rank}"]
