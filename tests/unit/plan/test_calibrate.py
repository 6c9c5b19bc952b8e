"""One run says how far a cluster is from its prediction: read from logs and folders, applied to all times, or
refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bpipe.cli import main

TRAINED = "--num-layers 16 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --swiglu --bf16".split()
TRAINED += (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2"
).split()
TRAINED += "--no-overlap-p2p-communication --micro-batch-size 1 --global-batch-size 32 --sequence-parallel".split()
TRAINED += ["--recompute-granularity", "selective", "--attention-backend", "flash"]
CLUSTER = ["--cluster", "h100-80g:2x8"]

LINE = (
    " [2026-01-01 00:00:00.0] iteration {:8d}/     200 | consumed samples: 32 | elapsed time per iteration (ms): "
    "{:.1f} | "
)
LINE += "learning rate: 6.0E-04 | global batch size: {:5d} | lm loss: 5.5E+00 | loss scale: 1.0 | grad norm: 8.632 |\n"


# The run's configuration, after all other flags of a command.
LAUNCHED = ["--vocab-size", "50257", "--", *TRAINED]


def log(seconds: list[float], every: int = 1, batches: list[int] | None = None) -> str:
    return "".join(
        LINE.format((number + 1) * every, 1e3 * duration, batches[number] if batches else 32)
        for number, duration in enumerate(seconds)
    )


def output(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words]) == 2
    return capsys.readouterr().err


@pytest.fixture
def predicted(capsys: pytest.CaptureFixture[str]) -> float:
    words = ("simulate", *CLUSTER, "--vocab-size", "50257", "--format", "json", "--", *TRAINED)
    return float(output(capsys, *words)["iteration_time_s"])


def test_a_log_says_how_fast_a_launch_trained(
    predicted: float, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Warm-up is slow, one iteration saved a checkpoint, the rest vary: the factor is the median's, and then all
    times are."""
    seconds = [9 * predicted] * 5 + [predicted * (1.2 + 0.002 * (number % 7 - 3)) for number in range(30)]
    seconds[20] = 30 * predicted
    (tmp_path / "run.log").write_text(log(seconds))
    file = str(tmp_path / "calibration.json")
    run = str(tmp_path / "run.log")
    calibration = output(capsys, "calibrate", run, *CLUSTER, "--output", file, "--format", "json", *LAUNCHED)
    assert calibration["factor"] == pytest.approx(1.2, rel=2e-3)
    assert (calibration["predicted_s"], calibration["iterations"]["num"], calibration["iterations"]["left_out"]) == (
        pytest.approx(predicted),
        30,
        5,
    )
    assert calibration["configuration"]["no_overlap_p2p_communication"] is True
    assert json.loads(Path(file).read_text()).items() <= calibration.items()
    launch = [*CLUSTER, "--vocab-size", "50257", "--calibration", file, "--format", "json", "--", *TRAINED]
    after = output(capsys, "simulate", *launch)
    assert after["iteration_time_s"] == pytest.approx(calibration["measured_s"])
    assert after["configuration"]["calibration_factor"] == calibration["factor"]
    # In the order in which they were, for all are slower alike.
    plans = [
        ["plan", *CLUSTER, "--vocab-size", "50257", "--schedule", "1f1b", "--format", "json", *more]
        for more in ([], ["--calibration", file])
    ]
    rows = [output(capsys, *plan, "--", *TRAINED)["rows"] for plan in plans]
    for stage, calibrated in zip(*rows, strict=True):
        assert stage["configuration"].items() <= calibrated["configuration"].items()
        assert calibrated["iteration_time_s"] == pytest.approx(calibration["factor"] * stage["iteration_time_s"])


def test_lines_for_several_iterations(predicted: float, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Of lines every 10 the first holds the warm-up; of a batch that grows only the last size counts, and it has to
    be there."""
    path = tmp_path / "run.log"
    path.write_text(log([5 * predicted, *[predicted] * 3], every=10))
    calibration = output(capsys, "calibrate", str(path), *CLUSTER, "--format", "json", *LAUNCHED)
    assert (calibration["iterations"]["num"], calibration["factor"]) == (3, pytest.approx(1, rel=1e-3))
    path.write_text(log([0.3 * predicted] * 10 + [predicted] * 10, batches=[16] * 10 + [32] * 10))
    calibration = output(capsys, "calibrate", str(path), *CLUSTER, "--format", "json", "--warm-up", "2", *LAUNCHED)
    assert (calibration["iterations"]["num"], calibration["factor"]) == (8, pytest.approx(1, rel=1e-3))
    path.write_text(log([predicted] * 10, batches=[16] * 10))
    assert "no iterations of global batch 32, only of [16.0]" in refused(
        capsys, "calibrate", str(path), *CLUSTER, *LAUNCHED
    )


def test_seconds_for_a_configuration(predicted: float, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("calibrate", "--measured", str(1.1 * predicted), *CLUSTER, "--vocab-size", "50257")
    assert output(capsys, *words, "--format", "json", "--", *TRAINED)["factor"] == pytest.approx(1.1)
    assert main([*words, "--", *TRAINED]) == 0
    printed = capsys.readouterr().out
    assert "this cluster takes 10.0 % longer than predicted" in printed
    assert "--output" in printed


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ([1.0] * 6, "1 of 6 measured times are left after 5 iterations of warm-up"),
        ([1.0, 1.3] * 10, "the run is not steady"),
        ([3.0] * 20, "is this the configuration and the device of the run?"),
        ([0.0] * 20, "but must take more than 0"),
        ([0.01] * 20, "what 16 h100-80g can compute"),
    ],
)
def test_unsteady_or_impossible_runs_are_refused(
    seconds: list[float], words: str, predicted: float, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "run.log"
    path.write_text(log([time * predicted for time in seconds]))
    message = refused(capsys, "calibrate", str(path), *CLUSTER, "--output", str(tmp_path / "none.json"), *LAUNCHED)
    assert words in message
    assert str(path) in message
    assert not (tmp_path / "none.json").exists()


def test_a_run_or_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    both = ("--pp", "4", "--gbs", "8", "--model", "gpt3-13b", *CLUSTER)
    assert "give either a run's folder" in refused(capsys, "calibrate", *both)
    assert "give either a run's folder" in refused(capsys, "calibrate", "run.log", "--measured", "3", *both)


def test_a_recorded_run_has_to_be_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(Path(__file__).parents[2] / "data/recorded_run")
    words = ["calibrate", folder, "--cluster", "a100-80g:4", "--vocab-size", "1000", "--warm-up", "0"]
    small = ["--num-layers", "8", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "128", "--bpipe"]
    small += ["--pipeline-model-parallel-size", "4", "--global-batch-size"]
    assert "the run had micro-batches 8, not 5: give the configuration that ran" in refused(
        capsys, *words, "--", *small, "5"
    )
    # It was a CPU, and three iterations.
    assert "the run is not steady" in refused(capsys, *words, "--", *small, "8")


def test_damaged_calibrations_are_refused(predicted: float, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    options = [*CLUSTER, "--vocab-size", "50257"]
    assert main(["calibrate", "--measured", str(1.1 * predicted), *options, "--output", str(file), "--", *TRAINED]) == 0
    capsys.readouterr()
    right = json.loads(file.read_text())
    for changes, words in (
        ({"factor": 1.3}, "give another"),
        ({"factor": "1.1"}, "factor is '1.1'"),
        ({"format": "bpipe-run"}, "bpipe-calibration"),
        ({"device": "a100-80g"}, "the cluster has h100-80g"),
        ({"factor": 3.3, "measured_s": 3 * right["measured_s"]}, "more than a cluster can differ"),
    ):
        file.write_text(json.dumps({**right, **changes}))
        message = refused(capsys, "simulate", *options, "--calibration", str(file), "--", *TRAINED)
        assert words in message
        assert str(file) in message
