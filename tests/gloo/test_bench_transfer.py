"""scripts/bench/transfer.py measures what it says, and says it in a table and in a file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gloo.conftest import ROOT


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_transport_is_measured(tmp_path: Path) -> None:
    written = tmp_path / "transfers.json"
    sizes = "--sizes 0.5 --microbatch 0.5 --rounds 2".split()
    command = [sys.executable, str(ROOT / "scripts/bench/transfer.py"), *sizes]
    ended = subprocess.run([*command, "--json", str(written)], capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    measured = json.loads(written.read_text())
    assert [(entry["storages"], sorted(entry["seconds"])) for entry in measured["links"]] == [
        (storages, ["gloo", "host", "memcpy", "peer"]) for storages in (1, 17)
    ]
    assert all(len(seconds) == 2 for entry in measured["links"] for seconds in entry["seconds"].values())
    modes = measured["pipeline"]["samples"]
    assert set(modes) == {
        "none",
        *(f"{name}{how}" for name in ("gloo", "peer", "host") for how in ("", ", synchronous", ", verified")),
    }
    assert measured["pipeline"]["moved_bytes"] > 0
    for name in ("memcpy", *modes):
        assert f"| {name} |" in ended.stdout
