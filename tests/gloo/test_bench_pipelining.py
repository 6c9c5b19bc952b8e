"""scripts/bench/pipelining.py measures torch's own schedule and ours on every rank, and says so in a table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gloo.conftest import ROOT


@pytest.mark.timeout(150)
@pytest.mark.parametrize("chunks", ["1", "2"])
def test_every_rank_has_its_ratios(chunks: str, tmp_path: Path) -> None:
    small = ("--stages", "2", "--microbatches", "4", "--hidden", "32", "--sequence", "16", "--rounds", "3")
    written = tmp_path / "steps.json"
    command = [sys.executable, "-W", "ignore", str(ROOT / "scripts/bench/pipelining.py"), *small, "--chunks", chunks]
    ended = subprocess.run([*command, "--json", str(written)], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    title, *rows = ended.stdout.splitlines()
    assert f"2 ranks of {chunks} stages, 4 micro-batches; 3 rounds" in title
    assert [row.split()[0] for row in rows] == ["0"] * 5 + ["1"] * 5
    for rank, entry in enumerate(json.loads(written.read_text())):
        assert entry["rank"] == rank
        assert all(len(ratios) == 3 and min(ratios) > 0 for ratios in entry["ratios"].values())
        assert len(entry["ratios"]) == 4
        assert entry["evictions"]["nothing moves"] == entry["evictions"]["reported"] == 0
