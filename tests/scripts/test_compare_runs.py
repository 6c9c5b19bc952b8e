"""scripts/compare_runs.py on made-up reports: the table, the summary, and every way in which a report can be no good."""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PLAIN_PEAKS = [4, 3, 2, 1]
BALANCED_PEAKS = [3, 3, 3, 2]
EVICTIONS = [5, 0, 0, 0]
UNIT_BYTES = 3 * 2**18
ITERATIONS = 3


@pytest.fixture
def compare_runs(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("compare_runs")


def write_report(folder: Path, balanced: bool, losses: list[float] | None = None) -> Path:
    folder.mkdir()
    peaks = BALANCED_PEAKS if balanced else PLAIN_PEAKS
    for stage, peak in enumerate(peaks):
        moved = EVICTIONS[stage] if balanced else 0
        report = {"rank": stage, "stage": stage, "pipeline": 0, "balanced": balanced, "num_microbatches": 8}
        report |= {"peak_microbatches": peak, "peak_bytes": peak * UNIT_BYTES, "predicted_microbatches": peak}
        report |= {"predicted_bytes": peak * UNIT_BYTES, "evictions": moved, "loads": moved}
        (folder / f"rank_{stage:05d}.json").write_text(json.dumps(report))
    with (folder / "iterations.jsonl").open("w") as stream:
        for iteration, loss in enumerate(losses or [5.5, 4.25, 0.1], start=1):
            record = {"iteration": iteration, "lm loss": loss.hex(), "grad_norm": (0.3).hex(), "skipped": 0}
            stream.write(json.dumps(record) + "\n")
    return folder


@pytest.fixture
def reports(tmp_path: Path) -> tuple[Path, Path]:
    return write_report(tmp_path / "plain", False), write_report(tmp_path / "balanced", True)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_iteration(folder: Path, iteration: int, **changes: Any) -> None:
    path = folder / "iterations.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[iteration - 1] |= changes
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def run(compare_runs: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["compare_runs.py", *map(str, arguments), "--stages", "4", "--iterations", str(ITERATIONS)])
    return compare_runs.main()


def flip_last_bit(value: float) -> float:
    (number,) = struct.unpack("<q", struct.pack("<d", value))
    return struct.unpack("<d", struct.pack("<q", number ^ 1))[0]


def test_table_verdict_and_summary(
    compare_runs: ModuleType,
    reports: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    summary = tmp_path / "new" / "summary.json"
    assert run(compare_runs, monkeypatch, *reports, "--summary", summary) == 0
    assert capsys.readouterr().out.splitlines() == [
        "peak of saved activations on each stage: measured (predicted from the schedule)",
        "            without balancing              with --bpipe            an iteration",
        "stage  micro-batches           MiB  micro-batches           MiB  evictions  loads",
        "    0          4 (4)   3.00 (3.00)          3 (3)   2.25 (2.25)          5      5",
        "    1          3 (3)   2.25 (2.25)          3 (3)   2.25 (2.25)          0      0",
        "    2          2 (2)   1.50 (1.50)          3 (3)   2.25 (2.25)          0      0",
        "    3          1 (1)   0.75 (0.75)          2 (2)   1.50 (1.50)          0      0",
        "loss: 5.500 at iteration 1, 0.100 at iteration 3",
        "identical: losses and gradient norms of all 3 iterations agree to the last bit",
    ]
    content = json.loads(summary.read_text())
    assert {key: content[key] for key in ("identical", "iterations", "first_loss", "last_loss")} == {
        "identical": True,
        "iterations": 3,
        "first_loss": 5.5,
        "last_loss": 0.1,
    }
    peaks = {"peak_microbatches": 4, "peak_bytes": 4 * UNIT_BYTES, "predicted_microbatches": 4, "predicted_bytes": 4 * UNIT_BYTES}
    balanced = {"peak_microbatches": 3, "peak_bytes": 3 * UNIT_BYTES, "predicted_microbatches": 3, "predicted_bytes": 3 * UNIT_BYTES}
    assert content["stages"][0] == {"stage": 0, "plain": peaks, "balanced": balanced | {"evictions": 5, "loads": 5}}
    assert [row["stage"] for row in content["stages"]] == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["lm loss", "grad_norm"])
def test_one_flipped_bit_is_seen(
    compare_runs: ModuleType,
    reports: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    name: str,
) -> None:
    before = float.fromhex(json.loads((reports[1] / "iterations.jsonl").read_text().splitlines()[1])[name])
    edit_iteration(reports[1], 2, **{name: flip_last_bit(before).hex()})
    assert run(compare_runs, monkeypatch, *reports, "--summary", tmp_path / "summary.json") == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("NOT identical: 1 values of 1 iterations differ")
    assert f"{name} of iteration 2" in last
    assert json.loads((tmp_path / "summary.json").read_text())["identical"] is False


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [(0.0, -0.0, False), (math.nan, math.nan, True), (math.inf, -math.inf, False), (None, None, True), (None, 0.0, False)],
)
def test_bits_are_compared_not_values(compare_runs: ModuleType, one: float | None, other: float | None, same: bool) -> None:
    found = compare_runs.differences({1: {"grad_norm": one}}, {1: {"grad_norm": other}})
    assert (not found) == same


def test_a_skipped_iteration_is_a_difference(compare_runs: ModuleType, reports: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    edit_iteration(reports[1], 3, skipped=1)
    assert run(compare_runs, monkeypatch, *reports) == 1


def test_a_value_that_only_one_run_has_is_a_difference(
    compare_runs: ModuleType, reports: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_iteration(reports[0], 1, **{"mtp loss": (1.0).hex()})
    assert run(compare_runs, monkeypatch, *reports) == 1


def test_a_missed_prediction_is_noted(
    compare_runs: ModuleType, reports: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(reports[1] / "rank_00002.json", peak_microbatches=4)
    assert run(compare_runs, monkeypatch, *reports) == 0
    assert "stages [2]" in capsys.readouterr().out


def test_replicas_of_a_stage_share_a_row_with_the_highest_numbers(compare_runs: ModuleType, reports: tuple[Path, Path]) -> None:
    replica = json.loads((reports[0] / "rank_00001.json").read_text()) | {"rank": 4, "pipeline": 1, "peak_bytes": 999 * UNIT_BYTES}
    (reports[0] / "rank_00004.json").write_text(json.dumps(replica))
    stages = compare_runs.read_stages(reports[0], 4, False)
    assert stages[1]["peak_bytes"] == 999 * UNIT_BYTES
    assert stages[1]["peak_microbatches"] == 3


def drop_rank(plain: Path, balanced: Path) -> None:
    (balanced / "rank_00003.json").unlink()


def cut_rank(plain: Path, balanced: Path) -> None:
    (plain / "rank_00001.json").write_text('{"stage": 1, "pea')


def drop_key(plain: Path, balanced: Path) -> None:
    (plain / "rank_00001.json").write_text('{"stage": 1}')


def drop_iterations(plain: Path, balanced: Path) -> None:
    (balanced / "iterations.jsonl").unlink()


def cut_iterations(plain: Path, balanced: Path) -> None:
    path = balanced / "iterations.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))


def cut_line(plain: Path, balanced: Path) -> None:
    path = balanced / "iterations.jsonl"
    path.write_text(path.read_text()[:-9])


def add_iteration(plain: Path, balanced: Path) -> None:
    with (plain / "iterations.jsonl").open("a") as stream:
        stream.write('{"iteration": 4, "lm loss": "0x1p+0", "grad_norm": null, "skipped": 0}\n')


def rounded_loss(plain: Path, balanced: Path) -> None:
    edit_iteration(plain, 1, **{"lm loss": 5.5})


def no_loss(plain: Path, balanced: Path) -> None:
    edit_iteration(plain, 1, **{"lm loss": None})


def swap(plain: Path, balanced: Path) -> None:
    plain.rename(plain.with_name("x"))
    balanced.rename(plain)
    plain.with_name("x").rename(balanced)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_rank, "stages [0, 1, 2], expected 0 to 3"),
        (cut_rank, "rank_00001.json: not JSON"),
        (drop_key, "rank_00001.json: no usable 'peak_microbatches'"),
        (drop_iterations, "iterations.jsonl: No such file"),
        (cut_iterations, "iterations [3] are missing"),
        (cut_line, "iterations.jsonl, line 3: not JSON"),
        (add_iteration, "4 iterations where 3 were asked for"),
        (rounded_loss, "line 1: no usable"),
        (no_loss, "line 1: no usable"),
        (swap, "are the two folders swapped?"),
    ],
)
def test_an_unusable_report_says_why(
    compare_runs: ModuleType,
    reports: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    damage: Callable[[Path, Path], None],
    message: str,
) -> None:
    damage(*reports)
    assert run(compare_runs, monkeypatch, *reports, "--summary", tmp_path / "summary.json") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "summary.json").exists()
