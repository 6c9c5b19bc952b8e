"""Launches as users start them: any script through our module, torchrun with restarts and with two agents, and signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.gloo.conftest import ROOT, finish, free_ports, start
from tests.gloo.flags import BPIPE, ITERATIONS, TINY

pytestmark = pytest.mark.timeout(120)

FOUR = f"{TINY} --num-layers 4 --pipeline-model-parallel-size 4 --global-batch-size 16"
LAUNCH = "-m megatron.scheduling.launch"


def iterations(folder: Path) -> list[dict[str, Any]]:
    """Return what each iteration computed, without its duration, which differs between runs."""
    records = [json.loads(line) for line in (folder / "iterations.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key != "elapsed_s"} for record in records]


def torchrun(folder: Path, processes: int, script: Sequence[str], *options: str) -> subprocess.Popen[bytes]:
    """Start an agent in its own session, logging to `<folder>/agent<port>.log`."""
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONUNBUFFERED": "1",
        # torch 2.15 gives restarted workers the same rendezvous store, in which gloo finds addresses of dead workers.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), *options, *script]
    with (folder / f"agent{len(list(folder.glob('agent*.log')))}.log").open("wb") as log:
        return subprocess.Popen(
            command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def end(agents: Sequence[subprocess.Popen[bytes]], folder: Path, timeout_s: float) -> list[int]:
    """Wait for the agents, and check that no process with a path in `folder` is left."""
    try:
        return [agent.wait(timeout_s) for agent in agents]
    finally:
        for process in psutil.process_iter(["cwd"]):
            # A rank that is killed cannot end the helpers of its checkpoint writer.
            if process.info["cwd"] == str(folder):
                process.kill()


def test_a_script_without_our_flags_trains_and_each_repair_is_named_once(tmp_path: Path) -> None:
    """Every launched run tests the repairs, on stand-ins that may lack what a newer Megatron reads."""
    two = "--num-layers 2 --pipeline-model-parallel-size 2 --global-batch-size 8"
    script = f"{LAUNCH} {ROOT / 'tests/gloo/plain_script.py'} {TINY} {two} {ITERATIONS}"
    outcome = finish(start(2, script.split(), tmp_path, free_ports(1)[0]), tmp_path, 100)
    assert outcome.codes == [0] * 2, outcome.logs[0][-3000:]
    assert "iteration        3/       3" in "".join(outcome.logs)
    repaired = [
        line for log in outcome.logs for line in log.splitlines() if line.startswith("bpipe: repaired in memory")
    ]
    assert repaired
    assert len(set(repaired)) == len(repaired)


SLOW = pytest.mark.slow
CHUNKS = "--num-layers 8 --num-virtual-stages-per-pipeline-rank 2"
SCRIPTS = [
    pytest.param("plain_script.py", "--num-layers 4 --label-shift 2", 3, id="gpt"),
    pytest.param("plain_script.py", CHUNKS, 2, id="gpt_interleaved", marks=SLOW),
    pytest.param("plain_script_bert.py", "--num-layers 4", 3, id="bert", marks=SLOW),
    pytest.param("plain_script_hybrid.py", "--num-layers 12", 3, id="hybrid", marks=SLOW),
]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("name", "flags", "evictions"), SCRIPTS)
def test_an_unmodified_script_is_balanced(tmp_path: Path, name: str, flags: str, evictions: int) -> None:
    """The script imports only Megatron and torch; its model, loss and data are its own."""
    script = str(ROOT / "tests/gloo" / name)
    assert "bpipe" not in Path(script).read_text()
    folders = []
    for case, more in (("stock", ""), ("balanced", BPIPE)):
        folder = tmp_path / case
        folder.mkdir()
        folders.append(folder)
        command = f"{LAUNCH} {script} {FOUR} {flags} {ITERATIONS} --bpipe-report {folder} {more}".split()
        # One rank imports everything itself, as a user's process does.
        cold = int(case == "balanced" and "--label-shift" in flags)
        outcome = finish(start(4, command, folder, free_ports(1)[0], cold=cold), folder, 80)
        assert outcome.codes == [0] * 4, outcome.logs[0][-3000:]
    stock, balanced = (iterations(folder) for folder in folders)
    assert len(stock) == 3
    assert len({step["lm loss"] for step in stock}) == 3
    assert balanced == stock
    assert json.loads((folders[1] / "rank_00000.json").read_text())["evictions"] == evictions


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        pytest.param(
            ["1"],
            [
                "1f1b, 4 stages, 8 micro-batches: at most 3 held; evicting 0 -> 3",
                "1f1b, 4 stages, 4 micro-batches: at most 3 held; evicting 0 -> 3",
            ],
            id="1f1b",
        ),
        pytest.param(
            ["2"],
            [
                "interleaved-1f1b, 4 stages, 8 micro-batches: at most 9 held; evicting 0 -> 3",
                "interleaved-1f1b, 4 stages, 4 micro-batches: pairing stages cannot get all of them below "
                "the 8 micro-batches of a chunk",
            ],
            id="interleaved",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["2", "grouped-interleaved"],
            [
                "grouped-interleaved, 4 stages, 8 micro-batches: at most 5 held; evicting 0 -> 3",
                "grouped-interleaved, 4 stages, 4 micro-batches: at most 5 held; evicting 0 -> 3",
            ],
            id="grouped-interleaved",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_loop_of_ones_own_is_balanced(tmp_path: Path, arguments: list[str], lines: list[str]) -> None:
    """`place`, `install` and `remove` from code, without Megatron's trainer; the loop compares the bits itself."""
    script = [str(ROOT / "tests/gloo/own_loop.py"), *arguments]
    # One rank imports everything itself, without Megatron's trainer.
    outcome = finish(start(4, script, tmp_path, free_ports(1)[0], cold=int(arguments == ["1"])), tmp_path, 100)
    assert outcome.codes == [0] * 4, outcome.logs[0][-3000:]
    for rank, log in enumerate(outcome.logs):
        assert f"rank {rank}: plain, balanced and plain again are equal" in log
    assert "bpipe:   node 0: stages 0 3 1 2" in outcome.logs[0]
    # One program for each of the two numbers of micro-batches, although each occurs twice.
    for line in lines:
        assert outcome.logs[0].count(line) == 1, outcome.logs[0]
    assert "refused: this run cannot start:\n  --bpipe: Megatron's own recomputation of the MLP" in outcome.logs[0]


def test_two_pipes_run_in_a_loop_of_ones_own(tmp_path: Path) -> None:
    """The loop asks which samples a chunk reads: two pipes read different ones."""
    outcome = finish(
        start(4, [str(ROOT / "tests/gloo/own_loop_of_two_pipes.py")], tmp_path, free_ports(1)[0]), tmp_path, 100
    )
    assert outcome.codes == [0] * 4, outcome.logs[0][-3000:]
    for rank, log in enumerate(outcome.logs):
        assert f"rank {rank}: stock and two pipes are equal" in log


# Slow: eight ranks each import everything themselves.
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_run_resumes_under_torchrun(tmp_path: Path) -> None:
    """Rank 2 dies in its third iteration; torchrun restarts all ranks, which continue from the second's checkpoint."""
    common = f"{FOUR} --train-iters 4 {BPIPE} --bpipe-placement none"
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    script = f"{ROOT / 'pretrain_gpt.py'} {common} --bpipe-report {whole}"
    outcome = finish(start(4, script.split(), whole, free_ports(1)[0]), whole, 80)
    assert outcome.codes == [0] * 4
    saved = f"--save {broken / 'c'} --load {broken / 'c'} --save-interval 2 --bpipe-report {broken}"
    script = f"{ROOT / 'tests/gloo/faulty.py'} {common} {saved}"
    os.environ["FAULT"] = "2 2B1 SIGKILL 3"
    try:
        codes = end([torchrun(broken, 4, script.split(), "--standalone", "--max-restarts", "1")], broken, 200)
    finally:
        del os.environ["FAULT"]
    log = (broken / "agent0.log").read_text(errors="replace")
    assert codes == [0], log[-3000:]
    assert "successfully loaded checkpoint" in log
    assert iterations(broken) == iterations(whole)


@pytest.mark.timeout(180)
def test_a_signal_saves_and_ends(tmp_path: Path) -> None:
    """`--exit-signal-handler`: SIGTERM lets the iteration finish, saves, and ends every rank with 0."""
    saved = f"--save {tmp_path / 'c'} --save-interval 1000"
    script = f"{ROOT / 'tests/gloo/faulty.py'} {FOUR} --train-iters 1000 {BPIPE} --exit-signal-handler {saved}"
    processes = start(4, script.split(), tmp_path, free_ports(1)[0])
    try:
        deadline = time.monotonic() + 80
        # The last stage prints the iterations; with adjacent pairs it is the second process.
        while "iteration        2/" not in (tmp_path / "rank1.log").read_text(errors="replace"):
            assert time.monotonic() < deadline, (tmp_path / "rank1.log").read_text(errors="replace")[-3000:]
            time.sleep(0.2)
        for process in processes:
            process.send_signal(signal.SIGTERM)
    finally:
        outcome = finish(processes, tmp_path, 80)
    assert outcome.codes == [0] * 4, outcome.logs[1][-3000:]
    assert (tmp_path / "c/latest_checkpointed_iteration.txt").read_text().strip().isdigit()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_two_agents_are_two_nodes(tmp_path: Path) -> None:
    """There are two torchrun agents of four processes each, and every pair is on one agent."""
    sizes = "--num-layers 8 --pipeline-model-parallel-size 8 --global-batch-size 32"
    port = str(free_ports(1)[0])
    options = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port, "--node-rank")
    script = f"{ROOT / 'pretrain_gpt.py'} {TINY} {sizes} {ITERATIONS} {BPIPE}".split()
    codes = end([torchrun(tmp_path, 4, script, *options, str(node)) for node in range(2)], tmp_path, 150)
    logs = [path.read_text(errors="replace") for path in sorted(tmp_path.glob("agent*.log"))]
    assert codes == [0, 0], logs[0][-3000:]
    assert "bpipe:   node 0: stages 0 7 1 6" in logs[0]
    assert "bpipe:   node 1: stages 2 5 3 4" in logs[0]
    assert "use the network" not in logs[0]
