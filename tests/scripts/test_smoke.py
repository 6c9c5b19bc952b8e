"""examples/smoke_8gpu.sh with fake trainings: each is compared; failing or hanging ones are reported."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Replaces Python: a training writes the report of a run that went as $GOES says (run=how, run=how); anything else is
# run by Python.
FAKE = """
import json, os, sys, time
from pathlib import Path

arguments = sys.argv[1:]
if "device_count" in arguments[1]:
    sys.exit(print(os.environ.get("GPUS", "0")))
if "torch.distributed.run" not in arguments:
    os.execv(sys.executable, [sys.executable, *arguments])
folder = Path(arguments[arguments.index("--bpipe-report") + 1])
(folder / "arguments.txt").write_text(" ".join(arguments))
goes = dict(entry.split("=") for entry in os.environ["GOES"].split()).get(folder.name, "well")
if goes == "hangs":
    time.sleep(60)
if goes == "fails":
    sys.exit("CUDA error: nobody knows")
(folder / "rank_00000.json").write_text(json.dumps({"balanced": "--bpipe" in arguments}))
with (folder / "iterations.jsonl").open("w") as stream:
    for iteration in range(1, 6):
        loss = 7.0 / iteration + (2**-50 if goes == "differs" and iteration == 3 else 0)
        stream.write(json.dumps({"iteration": iteration, "lm loss": loss.hex(), "grad_norm": (0.3).hex(), "skipped": 0}) + "\\n")
"""


def smoke(tmp_path: Path, goes: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "fake.py").write_text(FAKE)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/fake.py "$@"\n')
    python.chmod(0o755)
    variables = {
        "ON_CPU": "1",
        "LAYOUTS": "pipeline",
        "PYTHON": str(python),
        "RUNS": str(tmp_path / "runs"),
        "GOES": goes,
    }
    script = ["bash", str(ROOT / "examples/smoke_8gpu.sh")]
    env = {**os.environ, **variables, **environment}
    return subprocess.run(script, env=env, capture_output=True, text=True, timeout=55, check=False)


def table(ended: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Return each run's verdict."""
    rows = [line.split("\t") for line in ended.stdout.splitlines()[:-1]]
    return {f"{layout} {run}": verdict for layout, run, verdict in rows}


def test_every_run_is_compared(tmp_path: Path) -> None:
    ended = smoke(tmp_path, LAYOUTS="pipeline interleaved")
    assert ended.returncode == 0, ended.stderr
    rows = table(ended)
    assert list(rows) == [
        f"{layout} {run}" for layout in ("pipeline", "interleaved") for run in ("gloo", "peer", "host", "timers")
    ]
    assert set(rows.values()) == {"identical"}
    assert ended.stdout.splitlines()[-1] == "all 8 runs train as stock Megatron does, to the last bit"


def test_one_bit_is_enough_to_fail_and_the_others_are_tried(tmp_path: Path) -> None:
    ended = smoke(tmp_path, "peer=differs gloo=fails")
    assert ended.returncode == 1
    rows = table(ended)
    assert rows["pipeline peer"] == "DIFFERS"
    assert rows["pipeline gloo"] == "failed with status 1"
    assert rows["pipeline host"] == "identical"
    assert ended.stdout.splitlines()[-1] == "NOT as stock Megatron: see above"
    assert "CUDA error: nobody knows" in ended.stderr, "the log's end is shown"
    assert "iteration 3" in ended.stderr


def test_what_hangs_is_ended(tmp_path: Path) -> None:
    ended = smoke(tmp_path, "gloo=hangs", LIMIT="3", RUNS_WITH="gloo host")
    assert ended.returncode == 1
    assert table(ended)["pipeline gloo"] == "stopped after 3 s"
    assert table(ended)["pipeline host"] == "identical"


def test_without_stock_there_is_nothing_to_compare_with(tmp_path: Path) -> None:
    ended = smoke(tmp_path, "stock=fails", LAYOUTS="pipeline tensor")
    assert ended.returncode == 1
    assert list(table(ended)) == ["pipeline stock", "tensor stock"]


@pytest.mark.parametrize("on_cpu", ["", pytest.param("1", marks=pytest.mark.slow)])
def test_one_gpu_is_shared_by_all_ranks(tmp_path: Path, on_cpu: str) -> None:
    """On the CPU it is a rehearsal: the flag is set but has no effect."""
    ended = smoke(tmp_path, ONE_GPU="1", ON_CPU=on_cpu, GPUS="1")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1].endswith(" runs train as stock Megatron does, to the last bit")
    commands = [path.read_text() for path in (tmp_path / "runs").rglob("arguments.txt")]
    assert len(commands) == (5 if on_cpu else 6)
    assert all("--bpipe-share-gpus" in command for command in commands)


def test_without_enough_gpus_nothing_runs(tmp_path: Path) -> None:
    ended = smoke(tmp_path, ON_CPU="", GPUS="7")
    assert ended.returncode == 2
    assert (
        "8 GPUs are needed, but torch sees 7: use another machine, ONE_GPU=1 to share one, or ON_CPU=1" in ended.stderr
    )
    assert smoke(tmp_path, ON_CPU="", ONE_GPU="1").returncode == 2
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("name", "value"), [("LAYOUTS", "diagonal"), ("RUNS_WITH", "pigeon")])
def test_a_name_that_is_none_is_refused_before_anything_runs(tmp_path: Path, name: str, value: str) -> None:
    ended = smoke(tmp_path, **{name: value})
    assert ended.returncode == 2
    assert re.search(rf"{name}: unknown (layout|run) {value}: choose from ", ended.stderr)
    assert not (tmp_path / "runs").exists()
