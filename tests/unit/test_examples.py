"""The launch scripts of examples/, without a GPU, SLURM or Megatron: they are valid bash, print what they run, and
continue in a new job when their time is up.

Whether Megatron understands their flags is tested in tests/gloo/test_examples.py, because importing Megatron takes
seconds.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = sorted([*EXAMPLES.glob("*.sh"), *EXAMPLES.glob("*.sbatch")])
JOBS = sorted(EXAMPLES.glob("*.sbatch"))


def named(path: Path) -> str:
    return path.name


def bash(script: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return subprocess.run(
        ["bash", str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        env={**clean, **environment},
        check=False,
    )


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing() -> None:
    ended = subprocess.run(
        ["shellcheck", "-x", *map(str, SCRIPTS)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stdout


@pytest.mark.parametrize("job", JOBS, ids=named)
def test_a_job_starts_one_torchrun_on_each_node_it_asks_for(job: Path) -> None:
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", job.read_text(), re.MULTILINE))
    ended = bash(job, DRY_RUN="1", CONTAINER_IMAGE="registry/image:1", CONTAINER_MOUNTS="/data:/data")
    assert ended.returncode == 0, ended.stderr
    command = ended.stdout
    assert asked["ntasks-per-node"] == "1"
    assert f"--nodes {asked['nodes']} --ntasks {asked['nodes']} --ntasks-per-node 1 " in command
    assert f"torchrun --nnodes {asked['nodes']} --nproc-per-node {asked['gpus-per-node']} " in command
    root = EXAMPLES.parent
    assert (
        f"--container-image registry/image:1 --container-mounts {root}:{root}\\,/data:/data --container-workdir {root} "
        in command
    )
    hours, minutes = map(int, asked["time"].split(":")[:2])
    (exit_minutes,) = re.findall(r"--exit-duration-in-mins (\d+)", command)
    assert 10 <= 60 * hours + minutes - int(exit_minutes) <= 30, "time to start and to write the last checkpoint"


def test_every_job_has_a_port_of_its_own() -> None:
    """At one fixed port, the second of two jobs with the same first node joined the first one's rendezvous, or did
    not start."""

    def port(**environment: str) -> int:
        (number,) = re.findall(r"--rdzv-endpoint localhost:(\d+) ", bash(JOBS[0], DRY_RUN="1", **environment).stdout)
        return int(number)

    jobs = [port(SLURM_JOB_ID=str(job)) for job in (123456, 123457, 98765432)]
    assert len(set(jobs)) == 3
    # Below the ports that a system assigns by itself.
    assert all(20000 <= number < 32768 for number in (*jobs, port()))
    assert port(SLURM_JOB_ID="7", MASTER_PORT="4242") == 4242


def test_data_need_their_tokenizer(tmp_path: Path) -> None:
    script = EXAMPLES / "train_gpt3_13b.sh"
    ended = bash(script, DRY_RUN="1", DATA="d_text_document")
    assert ended.returncode != 0
    assert "name the tokenizer that made the data" in ended.stderr
    ended = bash(script, DRY_RUN="1", DATA="d_text_document", TOKENIZER="t")
    assert "--data-path d_text_document " in ended.stdout
    assert "--mock-data" not in ended.stdout


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs a job whose training only saves and exits as given; `asked` has its requests to
    SLURM."""
    commands = tmp_path / "bin"
    commands.mkdir()
    srun = (
        'if [ -n "$SAVES" ]; then echo "$SAVES" >"$CHECKPOINTS/latest_checkpointed_iteration.txt"; fi\nexit "$ENDS"\n'
    )
    scontrol = f'echo "$@" >>{tmp_path}/asked\nif [ "$1" = show ]; then echo first-node; fi\n'
    for name, text in (("srun", srun), ("scontrol", scontrol)):
        (commands / name).write_text(f"#!/bin/sh\n{text}")
        (commands / name).chmod(0o755)
    (tmp_path / "checkpoints").mkdir()

    def run(saved: str, saves: str, ends: str = "0") -> subprocess.CompletedProcess[str]:
        if saved:
            (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").write_text(saved)
        return bash(
            JOBS[0],
            PATH=f"{commands}:{os.environ['PATH']}",
            CHECKPOINTS=str(tmp_path / "checkpoints"),
            TRAIN_ITERS="100",
            SLURM_JOB_ID="42",
            SLURM_JOB_NODELIST="nodes",
            SLURM_SUBMIT_DIR=str(EXAMPLES.parent),
            SAVES=saves,
            ENDS=ends,
        )

    return run


@pytest.mark.parametrize(
    ("saved", "saves", "ends", "status", "requeued", "says"),
    [
        ("", "40", "0", 0, True, "iterations 1 to 40 of 100 are done; the next job continues"),
        ("40", "80", "0", 0, True, "iterations 41 to 80 of 100 are done"),
        ("80", "100", "0", 0, False, "all 100 iterations are done"),
        ("80", "", "0", 1, False, "no iteration after 80 was saved"),
        ("", "", "0", 1, False, "no iteration after 0 was saved"),
        ("release", "40", "0", 0, True, "iterations 1 to 40 of 100 are done"),
        ("40", "60", "3", 3, False, ""),
    ],
)
def test_a_job_goes_on_only_where_its_time_was_up(
    job: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
    saved: str,
    saves: str,
    ends: str,
    status: int,
    requeued: bool,
    says: str,
) -> None:
    ended = job(saved, saves, ends)
    assert ended.returncode == status, ended.stderr
    assert says in ended.stderr
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == ["show hostnames nodes", *["requeue 42"] * requeued]
