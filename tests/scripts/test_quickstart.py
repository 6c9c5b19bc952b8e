"""scripts/quickstart.sh with fake trainings: which two it runs, what it shows of them, and what it refuses."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from bpipe.balance.config import named_balance
from bpipe.build import ScheduleConfig, build
from bpipe.schedule.memory import num_transfers, peak_counts

ROOT = Path(__file__).resolve().parents[2]
FLAGS = {"grouped-interleaved": ["--num-virtual-stages-per-pipeline-rank", "2"], "zb-h1": []}

TABLE = "\\n held activations\\n 0 5 (5)\\n\\nmore\\n"
# Replaces Python: the environment has everything, and a training writes its command line and the report of a run that
# held what $HELD says.
FAKE = """
import json, os, sys
from pathlib import Path

arguments = sys.argv[1:]
if "scripts/environment.py" in " ".join(arguments):
    print("as it should be") if "--stamp" in arguments else None
    sys.exit()
if "device_count" in arguments[1]:
    sys.exit(print(os.environ["GPUS"]))
if "torch.distributed.run" not in arguments:
    os.execv(sys.executable, [sys.executable, *arguments])
after = lambda flag: arguments[arguments.index(flag) + 1]
folder = Path(after("--bpipe-report"))
folder.mkdir(parents=True)
(folder / "arguments.json").write_text(json.dumps(arguments))
balanced = "--bpipe" in arguments
for stage, (held, moved) in enumerate(json.loads(os.environ["HELD"])[balanced]):
    report = {"rank": stage, "stage": stage, "balanced": balanced, "evictions": moved, "loads": moved}
    for name in ("peak", "predicted"):
        report |= {f"{name}_microbatches": held, f"{name}_bytes": held << 20}
    (folder / f"rank_{stage:05d}.json").write_text(json.dumps(report))
with (folder / "iterations.jsonl").open("w") as stream:
    for iteration in range(1, int(after("--train-iters")) + 1):
        loss = 7.0 / iteration + (2**-50 if balanced and os.environ["GOES"] == "differs" else 0)
        stream.write(json.dumps({"iteration": iteration, "lm loss": loss.hex(), "grad_norm": (0.3).hex(), "skipped": 0}) + "\\n")
print(" iteration 1/ 9 | a line of Megatron's |")
"""


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """Make a virtual environment in which everything is installed, with a `bpipe` whose report is fake."""
    folder = tmp_path / "environment"
    (folder / "bin").mkdir(parents=True)
    (folder / "pyvenv.cfg").write_text("")
    (folder / ".bpipe-installed").write_text("as it should be")
    (folder / "fake.py").write_text(FAKE)
    for name, does in (
        ("python", f'exec {sys.executable} {folder}/fake.py "$@"'),
        (
            "bpipe",
            f'if [ "$1" = report ]; then echo "the report of $2 $3 $4"; printf "{TABLE}"; '
            f'else exec {sys.executable} -m bpipe "$@"; fi',
        ),
    ):
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{does}\n")
        (folder / "bin" / name).chmod(0o755)
    return folder


def held(schedule: str) -> list[list[tuple[int, int]]]:
    """Return by run and rank the peak, and the number of evictions; the first run is Megatron's own schedule."""
    chunks = 2 if FLAGS[schedule] else 1
    plain = build(ScheduleConfig("interleaved-1f1b" if chunks == 2 else "1f1b", 8, 16, num_chunks=chunks))
    balanced = build(ScheduleConfig(schedule, 8, 16, num_chunks=chunks, balance=named_balance("bpipe")))
    return [
        [(peak, num_transfers(plan, rank).evictions) for rank, peak in enumerate(peak_counts(plan))]
        for plan in (plain, balanced)
    ]


def quickstart(
    tmp_path: Path, environment: Path, *arguments: str, goes: str = "well", gpus: int = 0
) -> subprocess.CompletedProcess[str]:
    schedule = arguments[1] if len(arguments) > 1 and arguments[1] in FLAGS else "zb-h1"
    variables = {
        "VENV": str(environment),
        "RUNS": str(tmp_path / "runs"),
        "HELD": json.dumps(held(schedule)),
        "GOES": goes,
    }
    if gpus:
        driver = environment / "bin" / "nvidia-smi"
        driver.write_text("#!/bin/sh\n")
        driver.chmod(0o755)
        variables["GPUS"] = str(gpus)
    env = {**os.environ, **variables, "PYTHONPATH": f"{ROOT}{os.pathsep}{sysconfig.get_path('purelib')}"}
    script = ["bash", str(ROOT / "scripts/quickstart.sh"), *arguments]
    return subprocess.run(script, env=env, capture_output=True, text=True, timeout=55, check=False)


def trained(folder: Path, name: str) -> list[str]:
    """Return the flags of a training after the script."""
    arguments: list[str] = json.loads((folder / name / "arguments.json").read_text())
    return arguments[arguments.index("pretrain_gpt.py") + 1 :]


@pytest.mark.parametrize("schedule", FLAGS)
def test_a_schedule_is_trained_beside_megatrons_own(schedule: str, tmp_path: Path, environment: Path) -> None:
    """Both runs have the same flags except those that select the schedule."""
    ended = quickstart(tmp_path, environment, "--schedule", schedule, "--lr", "1e-3")
    assert ended.returncode == 0, ended.stderr + ended.stdout
    folder = tmp_path / "runs" / schedule
    plain, balanced = trained(folder, "plain"), trained(folder, "balanced")
    assert " ".join(FLAGS[schedule]) in " ".join(plain)
    assert any("virtual" in flag for flag in plain) is bool(FLAGS[schedule])
    for flags, name in ((plain, "plain"), (balanced, "balanced")):
        flags.remove(str(folder / name))
    assert plain[-2:] == ["--lr", "1e-3"]
    assert balanced == [*plain[:-2], "--bpipe", "--bpipe-schedule", schedule, *plain[-2:]]
    assert plain[plain.index("--hidden-dropout") + 1] == plain[plain.index("--attention-dropout") + 1] == "0"
    first, last = held(schedule)
    assert f"A trained with Megatron's own schedule, B with {schedule} and --bpipe\n" in ended.stdout
    assert "identical: all numbers of" in ended.stdout
    peaks = " -> ".join(f"{max(peak for peak, _ in run):.1f}" for run in (first, last))
    verdict = f"fullest stage {peaks} MiB, {20 if FLAGS[schedule] else 40} iterations identical"
    assert ended.stdout.endswith(
        f"to the last bit\n held activations\n 0 5 (5)\n\n{verdict}; open {folder}/report.html\n"
    )
    assert (
        (folder / "report.txt").read_text().startswith(f"the report of {folder}/balanced --baseline {folder}/plain\n")
    )


def test_without_one_it_is_1f1b(tmp_path: Path, environment: Path) -> None:
    ended = quickstart(tmp_path, environment)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    folder = tmp_path / "runs"
    plain, balanced = trained(folder, "plain"), trained(folder, "balanced")
    assert balanced == [*(flag.replace("/plain", "/balanced") for flag in plain), "--bpipe"]
    assert not any("dropout" in flag or "virtual" in flag for flag in plain)
    assert "A trained" not in ended.stdout
    assert "identical: all numbers of 40 iterations" in ended.stdout


@pytest.mark.parametrize(("gpus", "iterations"), [(7, 10), (8, 40), pytest.param(1, 10, marks=pytest.mark.slow)])
def test_fewer_gpus_than_stages_are_shared(gpus: int, iterations: int, tmp_path: Path, environment: Path) -> None:
    """Too few GPUs were once unused, and the CPU trained."""
    ended = quickstart(tmp_path, environment, gpus=gpus)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    for name in ("plain", "balanced"):
        flags = trained(tmp_path / "runs", name)
        assert ("--bpipe-share-gpus" in flags) == (gpus < 8)
        assert "--deterministic-mode" in flags
    assert f"identical: all numbers of {iterations} iterations" in ended.stdout
    assert ("the ranks share them, so times mean nothing" in ended.stderr) == (gpus < 8)


def test_slices_are_trained_twice_and_balanced_once(tmp_path: Path, environment: Path) -> None:
    """Both runs have slices, because slices equal whole sequences only up to rounding."""
    ended = quickstart(tmp_path, environment, "--slices", "4", "--lr", "1e-3")
    assert ended.returncode == 0, ended.stderr + ended.stdout
    folder = tmp_path / "runs" / "slices-4"
    plain, balanced = trained(folder, "plain"), trained(folder, "balanced")
    assert "--bpipe-slices 4 --recompute-granularity selective --recompute-modules core_attn" in " ".join(plain)
    assert balanced == [*(flag.replace("/plain", "/balanced") for flag in plain[:-2]), "--bpipe", *plain[-2:]]
    assert "identical: all numbers of 40 iterations" in ended.stdout
    refused = quickstart(tmp_path, environment, "--slices", "many")
    assert refused.returncode == 1
    assert "--slices 'many' is not a number of slices. Give --slices 4." in refused.stderr


def test_one_bit_is_enough_to_fail(tmp_path: Path, environment: Path) -> None:
    ended = quickstart(tmp_path, environment, "--schedule", "grouped-interleaved", goes="differs")
    assert ended.returncode == 1
    assert "NOT identical: lm loss of iteration 1" in ended.stdout
    assert not (tmp_path / "runs/grouped-interleaved/report.txt").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v-half", "--schedule v-half gives ranks other layers"),
        ("gpipe", "--schedule 'gpipe' is not grouped-interleaved, "),
        ("", "--schedule '' is not grouped-interleaved, "),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(
    name: str, message: str, tmp_path: Path, environment: Path
) -> None:
    ended = quickstart(tmp_path, environment, "--schedule", name)
    assert ended.returncode == 1
    assert message in ended.stderr
    assert ". Give " in ended.stderr
    assert not (tmp_path / "runs").exists()


def test_its_usage_is_its_head() -> None:
    ended = subprocess.run(
        ["bash", str(ROOT / "scripts/quickstart.sh"), "--help"], capture_output=True, text=True, timeout=20, check=True
    )
    assert "Usage: scripts/quickstart.sh [--schedule NAME | --slices K]" in ended.stdout
    assert ended.stdout.endswith("in a subfolder there, such as zb-h1 or slices-4.\n")
