"""The executor over gloo, engine included: the bits of the model in one piece, whatever the schedule and however
activations move."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from bpipe.schedule.layout import Vocabulary
from tests.gloo.conftest import ROOT
from tests.gloo.executors import CASES, RANKS, SPLIT


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("executors")
    command = [sys.executable, "-m", "tests.gloo.executors", str(folder)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", CASES)
def test_every_gradient_has_the_bits_of_the_model_in_one_piece(case: str, found: list[dict[str, Any]]) -> None:
    assert [rank[case]["same"] for rank in found] == [True] * RANKS
    moved, hosts = [rank[case]["moved"] > 0 for rank in found], [rank[case]["hosts"] > 0 for rank in found]
    assert any(moved) is ("balanced" in case)
    assert hosts == [moved[partner] for partner in ((2, 3, 0, 1) if case.startswith("v-") else (3, 2, 1, 0))]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("vocabulary", SPLIT, ids=lambda split: split.value)
def test_shards_of_the_output_layer_over_real_collectives(vocabulary: Vocabulary, found: list[dict[str, Any]]) -> None:
    shards = [rank[f"shards {vocabulary.value}"] for rank in found]
    assert max(rank["error"] for rank in shards) < 1e-9
    assert [rank["balanced_same"] for rank in shards] == [True] * RANKS
    assert any(rank["moved"] for rank in shards)
