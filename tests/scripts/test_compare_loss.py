"""scripts/compare_loss.py on made-up reports and logs: which bit it names, what it leaves out, and when it refuses."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

LOSSES = [5.5, 4.25, 0.1]


@pytest.fixture
def compare_loss(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("compare_loss")


@pytest.fixture
def run(compare_loss: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    def call(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["compare_loss.py", *map(str, arguments)])
        return int(compare_loss.main())

    return call


def report(folder: Path, losses: list[float] = LOSSES, first: int = 1) -> Path:
    folder.mkdir()
    lines = [
        json.dumps({"iteration": iteration, "lm loss": loss.hex(), "grad_norm": (0.3).hex(), "skipped": 0})
        for iteration, loss in enumerate(losses, start=first)
    ]
    (folder / "iterations.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def log(path: Path, losses: list[float] = LOSSES, milliseconds: float = 10.0, prefix: str = "") -> Path:
    lines = ["> building the model", "bpipe: placement adjacent"]
    for iteration, loss in enumerate(losses, start=1):
        lines.append(
            f"{prefix} [2026-01-01 00:00:00.0] iteration {iteration:8d}/{len(losses):8d} | consumed samples: {32 * iteration:12d} |"
            f" elapsed time per iteration (ms): {milliseconds * iteration:.1f} | throughput per GPU (TFLOP/s/GPU): {milliseconds:.1f} |"
            f" learning rate: 6.000000E-04 | global batch size:    32 | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: 8.632 |"
            " number of skipped iterations:   0 | number of nan iterations:   0 |"
        )
    path.write_text("\n".join(lines) + "\n")
    return path


def test_equal_reports_are_shown_side_by_side(run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = report(tmp_path / "one"), report(tmp_path / "other")
    assert run(one, other, "--rows", 2) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"A: {one}",
        f"B: {other}",
        "                                lm loss                                            grad_norm",
        "iteration                         A                         B                         A                         B",
        "        2      0x1.1000000000000p+2      0x1.1000000000000p+2      0x1.3333333333333p-2      0x1.3333333333333p-2",
        "        3      0x1.999999999999ap-4      0x1.999999999999ap-4      0x1.3333333333333p-2      0x1.3333333333333p-2",
        "identical: all numbers of 3 iterations agree to the last bit",
    ]


def test_the_first_flipped_bit_is_named(run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = [5.5, math.nextafter(4.25, 5), 0.2]
    assert run(report(tmp_path / "one"), report(tmp_path / "other", changed)) == 1
    *rows, last = capsys.readouterr().out.splitlines()
    assert rows[-1].split()[:3] == ["2", "0x1.1000000000000p+2", "0x1.1000000000001p+2"], "shown as far as the first difference"
    assert last == (
        "NOT identical: lm loss of iteration 2: 4.25 (0x1.1000000000000p+2) in A, 4.250000000000001 (0x1.1000000000001p+2) in B; "
        "1 more differ in what follows"
    )


@pytest.mark.parametrize(("one", "other", "status"), [(0.0, -0.0, 1), (math.nan, math.nan, 0), (math.inf, -math.inf, 1)])
def test_bits_are_compared_not_values(run: Callable[..., int], tmp_path: Path, one: float, other: float, status: int) -> None:
    assert run(report(tmp_path / "one", [one]), report(tmp_path / "other", [other])) == status


def test_a_file_of_iterations_is_a_report(run: Callable[..., int], tmp_path: Path) -> None:
    assert run(report(tmp_path / "one") / "iterations.jsonl", report(tmp_path / "other")) == 0


def test_logs_are_compared_without_their_times(run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = log(tmp_path / "one.log"), log(tmp_path / "other.log", milliseconds=99.0, prefix="31: ")
    assert run(one, other) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("no difference in 3 iterations as far as logs tell, which Megatron rounds")
    assert "identical" not in last


def test_logs_that_differ_fail(run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(log(tmp_path / "one.log"), log(tmp_path / "other.log", [5.5, 4.25, 0.1001])) == 1
    assert "lm loss of iteration 3: 0.1 (" in capsys.readouterr().out


def test_a_restarted_run_is_compared_where_both_have_iterations(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, restarted = report(tmp_path / "whole"), report(tmp_path / "restarted", LOSSES[1:], first=2)
    assert run(whole, restarted) == 2
    assert "1 iterations are in one run only (3 from 1 to 3 and 2 from 2 to 3)" in capsys.readouterr().err
    assert run(whole, restarted, "--common") == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-2:] == [
        "note: 1 iterations are in one run only and were not compared",
        "identical: all numbers of 2 iterations agree to the last bit",
    ]


def test_a_difference_counts_even_where_iterations_are_missing(run: Callable[..., int], tmp_path: Path) -> None:
    assert run(report(tmp_path / "one"), report(tmp_path / "other", [5.0])) == 1


def test_an_iteration_that_was_run_again_counts_as_it_was_last(run: Callable[..., int], tmp_path: Path) -> None:
    one, other = report(tmp_path / "one"), report(tmp_path / "other", [5.5, 9.0])
    again = (one / "iterations.jsonl").read_text().splitlines(keepends=True)[1:]
    with (other / "iterations.jsonl").open("a") as stream:
        stream.writelines(again)
    assert run(one, other) == 0


def test_what_cannot_be_compared_says_why(run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = report(tmp_path / "good")
    (tmp_path / "no.log").write_bytes(b"nothing was trained \xff\n")
    (tmp_path / "torn.log").write_text(" iteration 1/ 3 | lm loss: 1.0 | grad n iteration 2/ 3 | lm loss: 1.0 |\n")
    (tmp_path / "empty").mkdir()
    refused = {
        tmp_path / "missing": "missing: No such file or directory",
        tmp_path / "no.log": "no iteration in it; is this a log of Megatron",
        tmp_path / "torn.log": "line 1: not one of Megatron's iteration lines, or two in one",
        tmp_path / "empty": "iterations.jsonl: No such file or directory",
        log(tmp_path / "good.log"): "good.log is a log, whose numbers are rounded",
        report(tmp_path / "later", first=9): "no iteration in common: 3 from 1 to 3 and 3 from 9 to 11",
    }
    for path, message in refused.items():
        assert run(good, path) == 2
        assert message in capsys.readouterr().err
