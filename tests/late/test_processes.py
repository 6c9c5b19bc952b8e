"""The late group between processes: what it carries, and how its watchdog ends a process whose operation never does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gloo.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 90.0


@pytest.mark.timeout(300)
def test_the_watchdog_ends_a_rank_that_waits_longer_than_the_group_allows(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "tests/late/lonely_worker.py"), str(rank), str(port), "3"],
            cwd=tmp_path,
            env=environment,
            stdout=logs[rank].open("wb"),
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    try:
        assert ranks[0].wait(LIMIT_S) == -signal.SIGABRT, logs[0].read_text()
        ranks[1].wait(LIMIT_S)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    said = logs[0].read_text()
    assert said.count("heard\n") == logs[1].read_text().count("heard\n") == 1
    assert "late: watchdog of rank 0: " in said
    assert "receive 1>0 was issued 3 s ago and has not ended, its time-out is 3 s." in said
    assert "receive 1>0 has begun and waits for the other end" in said
