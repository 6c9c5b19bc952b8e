"""The late group between processes, and its watchdog, which ends a process whose operation does not end."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

import pytest

from tests.gloo.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 90.0


@contextmanager
def two_ranks(role: str, folder: Path, timeout_s: int) -> Iterator[tuple[list[Popen[bytes]], list[Path]]]:
    """Yield two processes and their logs, and end both afterwards."""
    (port,) = free_ports(1)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    logs = [folder / f"{rank}.log" for rank in range(2)]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "tests/late/pair_worker.py"), role, str(rank), str(port), str(timeout_s)],
            cwd=folder,
            env=environment,
            stdout=logs[rank].open("wb"),
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    try:
        yield ranks, logs
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.timeout(300)
def test_the_watchdog_ends_a_rank_that_waits_longer_than_the_group_allows(tmp_path: Path) -> None:
    with two_ranks("lonely", tmp_path, 3) as (ranks, logs):
        assert ranks[0].wait(LIMIT_S) == -signal.SIGABRT, logs[0].read_text()
        ranks[1].wait(LIMIT_S)
    printed = logs[0].read_text()
    assert printed.count("heard\n") == logs[1].read_text().count("heard\n") == 1
    assert "late: watchdog of rank 0: " in printed
    assert "receive 1>0 was issued 3 s ago and has not ended, its time-out is 3 s." in printed
    assert "receive 1>0 has begun and waits for the other end" in printed


@pytest.mark.timeout(300)
def test_a_link_that_carries_nothing_is_given_up_before_the_watchdog_ends_the_process(tmp_path: Path) -> None:
    """`auto` waited for NCCL as long as the group allows, so the watchdog ended the process before the next try."""
    with two_ranks("probing", tmp_path, 6) as (ranks, logs):
        for rank, log in zip(ranks, logs, strict=True):
            assert rank.wait(LIMIT_S) == 0, log.read_text()
            printed = log.read_text()
            assert "not nccl: nothing arrived within 3 s (half of --bpipe-timeout)" in printed
            assert "chosen: peer" in printed or "chosen: host" in printed


BEFORE = """
import torch


def test_a_backward():
    torch.autograd.backward(torch.ones(1, requires_grad=True).sum())
"""


@pytest.mark.timeout(300)
def test_a_backward_of_another_folder_does_not_matter(tmp_path: Path) -> None:
    """After unit tests in the same process, all cases of the grid failed by an assertion in torch's autograd, with no
    queue for the device."""
    before = tmp_path / "test_before.py"
    before.write_text(BEFORE)
    case = "tests/late/test_grid.py::test_both_say_the_same_of_plans_that_stand_still"
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", str(before), case]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "2 passed" in ended.stdout
