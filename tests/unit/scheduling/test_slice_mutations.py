"""Mistakes in slices are noticed, each by an error, another loss or another gradient; in one process for all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.scheduling.slice_mutations import MUTATIONS, ORDERS

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.timeout(400)
def test_every_mistake_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(Path(__file__).with_name("check_slice_mutations.py")), str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=390, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    noticed: dict[str, str] = json.loads(path.read_text())
    assert noticed.keys() == {*MUTATIONS, *ORDERS}
    missed = [name for name, how in noticed.items() if not how]
    assert not missed, "slices make the same loss and gradients in spite of these"
