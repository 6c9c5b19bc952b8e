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


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("mutations") / "found.json"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(Path(__file__).with_name("check_slice_mutations.py")), str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=390, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    noticed: dict[str, str] = json.loads(path.read_text())
    return noticed


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [*MUTATIONS, *ORDERS])
def test_a_mistake_is_noticed(found: dict[str, str], name: str) -> None:
    assert found[name], f"{name}: slices make the same loss and gradients"
    print(found[name])
