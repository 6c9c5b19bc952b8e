"""`bpipe profile --time-kernels` on this machine's CPU: two ranks measure, and predictions take what they found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bpipe.cli import main
from bpipe.models.kernel_times import read_kernel_times

SIZES = ["--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--seq", "64", "--vocab-size", "256"]
CHOSEN = [*SIZES, "--tp", "2", "--attention", "unfused", "--precision", "fp32"]


@pytest.mark.timeout(120)
def test_two_ranks_measure_what_they_compute_and_gather(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "times.json"
    asked = [
        "profile",
        *CHOSEN,
        "--mbs",
        "1",
        "2",
        "--repeats",
        "2",
        "--device",
        "cpu",
        "--time-kernels",
        "--output",
        str(path),
    ]
    ended = subprocess.run(
        [sys.executable, "-m", "bpipe", *asked], capture_output=True, text=True, timeout=100, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    times = read_kernel_times([str(path)])
    assert times.device == "cpu"
    # 64 and 128 tokens of 64 features of four bytes.
    assert set(times.gathers) == {(2, 64 * 64 * 4), (2, 128 * 64 * 4)}
    asked = ["simulate", *CHOSEN, "--cluster", "a100-80g:4", "--pp", "2", "--mbs", "2", "--gbs", "8"]
    assert main([*asked, "--format", "json"]) == 0
    formulas = json.loads(capsys.readouterr().out)["iteration_time_s"]
    assert main([*asked, "--kernel-times", str(path), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["configuration"]["kernel_times"] == "cpu"
    assert found["iteration_time_s"] > formulas, "no CPU computes as an A100 does"
    assert main([*asked, "--kernel-times", str(path)]) == 0
    said = capsys.readouterr().out
    assert "of 1 attention cores 1 as measured; of 1 gathers 1 as measured; all else by formula" in said
