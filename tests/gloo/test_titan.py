"""torchtitan's own trainer with its debug model: a balanced pipeline has every bit of an unbalanced one.

Needs torchtitan 0.3.0 with its dependencies, installed next to torch or in another environment whose interpreter is
TORCHTITAN_PYTHON.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bpipe.cli import main
from tests.gloo.conftest import ROOT
from tests.gloo.ports import free_ports
from tests.gloo.titan_worker import RECOMPUTED

PYTHON = os.environ.get("TORCHTITAN_PYTHON") or (sys.executable if importlib.util.find_spec("torchtitan") else None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1300),
    pytest.mark.skipif(
        PYTHON is None, reason="torchtitan is not installed, and TORCHTITAN_PYTHON names no other Python"
    ),
]

STOCK = ("--module", "llama3")
OURS = ("--module", "bpipe.torch.titan")
SMALL = (
    *("--training.local_batch_size", "8", "--training.seq_len", "64", "--training.disable_cuda_graphs"),
    *("--debug.seed", "1"),
)
MOVING = (
    "--balance.transfers.minimum_bytes",
    "256",
    "--balance.transfers.poison",
    "--balance.transfers.timeout_s",
    "60",
)
# Selective checkpointing and the chunked loss are defaults of the model's configuration.
PIPELINE = ("--parallelism.pipeline_parallel_degree", "4", "--parallelism.pipeline_parallel_schedule", "1F1B")
LOOPED = ("--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_schedule", "Interleaved1F1B")
SHARDED = (*LOOPED, "--parallelism.data_parallel_shard_degree", "2")
SPLIT = (*LOOPED, "--parallelism.tensor_parallel_degree", "2")
# By name: flags, what is recomputed, the hosts of activations, and the least share that must move.
TRAINED = {
    "PP 4": (PIPELINE, "selective", "pair", 0.9),
    "PP 4, nothing recomputed": (PIPELINE, "none", "pair", 0.9),
    "PP 4, all recomputed": (PIPELINE, "full", "pair", 0.9),
    "PP 2, FSDP 2": (SHARDED, "selective", "host", 0.9),
    "PP 2, TP 2": (SPLIT, "selective", "host", 0.9),
}


class Titan:
    """Runs of the trainer in one folder with assets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write = "from pathlib import Path; import titan_worker, sys; titan_worker.write_assets(Path(sys.argv[1]))"
        subprocess.run(
            [str(PYTHON), "-c", write, str(folder)], cwd=ROOT / "tests/gloo", env=self.env(), check=True, timeout=120
        )

    @staticmethod
    def env() -> dict[str, str]:
        more = {
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_DATASETS_OFFLINE": "1",
        }
        return {**os.environ, **more, "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1"}

    def train(
        self, name: str, *arguments: str, steps: int = 4, world: int = 4, recomputed: str = "selective"
    ) -> list[dict[str, Any]]:
        """Train, and return what every rank wrote."""
        environment = {**self.env(), "WORLD_SIZE": str(world), "MASTER_PORT": str(free_ports(1)[0])}
        if recomputed != "selective":
            environment[RECOMPUTED] = recomputed
        config = "llama3_debugmodel" if arguments[1] == "llama3" else "llama3.llama3_debugmodel"
        command = [str(PYTHON), "-W", "ignore", str(ROOT / "tests/gloo/titan_worker.py"), str(self.folder), name]
        command += [*arguments, "--config", config, *SMALL, "--training.steps", str(steps)]
        if "--dump_folder" not in arguments:
            command += ["--dump_folder", str(self.folder / name)]
        logs = [(self.folder / f"{name}.{rank}.log").open("wb") for rank in range(world)]
        processes = [
            subprocess.Popen(
                command,
                cwd=self.folder,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for rank, log in enumerate(logs)
        ]
        begin = time.monotonic()
        try:
            codes = [process.wait(max(1.0, begin + 400 - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired:
            for process in processes:
                # Python then prints its stack.
                process.send_signal(signal.SIGABRT)
            codes = [process.wait(20) for process in processes]
        finally:
            for process in processes:
                process.kill()
        wrong = next((rank for rank, code in enumerate(codes) if code), 0)
        printed = (self.folder / f"{name}.{wrong}.log").read_text(errors="replace")
        assert codes == [0] * world, printed[-5000:]
        return [json.loads((self.folder / f"{name}.rank{rank}.json").read_text()) for rank in range(world)]


@pytest.fixture(scope="module")
def titan(tmp_path_factory: pytest.TempPathFactory) -> Titan:
    return Titan(tmp_path_factory.mktemp("titan"))


def bits(ranks: list[dict[str, Any]], first_step: int = 1) -> list[Any]:
    return [([note for note in rank["notes"] if int(note["step"]) >= first_step], rank["weights"]) for rank in ranks]


@pytest.mark.parametrize("name", TRAINED)
def test_a_balanced_training_has_every_bit_of_torchtitans_own(titan: Titan, name: str) -> None:
    flags, recomputed, hosts, enough = TRAINED[name]
    stock = titan.train(f"{name}, stock", *STOCK, *flags, steps=10, recomputed=recomputed)
    moving = ("--balance.hosts", hosts, *MOVING)
    balanced = titan.train(f"{name}, balanced", *OURS, *flags, *moving, steps=10, recomputed=recomputed)
    assert len(stock[0]["notes"]) == 10
    assert bits(balanced) == bits(stock)
    assert any(rank["moved"] for rank in balanced)
    assert all(share > enough for rank in balanced for share in rank["shares"])


def test_a_training_of_torchtitans_goes_on_balanced(titan: Titan) -> None:
    whole = titan.train("whole", *STOCK, *PIPELINE)
    saving = ("--checkpoint.enable", "--checkpoint.interval", "2", "--dump_folder", str(titan.folder / "resumed"))
    titan.train("first", *STOCK, *PIPELINE, *saving, steps=2)
    resumed = titan.train("second", *OURS, *PIPELINE, *MOVING, *saving)
    assert bits(resumed) == bits(whole, first_step=3)


def test_torchtitan_reads_what_bpipe_schedule_writes(titan: Titan, capsys: pytest.CaptureFixture[str]) -> None:
    """Train by torchtitan's own trainer, without our code."""
    command = "schedule --schedule interleaved-1f1b --pp 2 --vp 2 --microbatches 8 --format csv"
    assert main(command.split()) == 0
    path = titan.folder / "schedule.csv"
    path.write_text(capsys.readouterr().out)
    flags = ("--parallelism.pipeline_parallel_degree", "2")
    flags = (*flags, "--parallelism.pipeline_parallel_schedule", "Interleaved1F1B")
    stock = titan.train("looped", *STOCK, *flags, world=2)
    from_file = ("--parallelism.pipeline_parallel_schedule_csv", str(path))
    assert bits(titan.train("csv", *STOCK, *flags, *from_file, world=2)) == bits(stock)
