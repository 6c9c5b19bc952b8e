"""`bpipe compare` and `bpipe report` on recorded runs."""

import json
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bpipe.cli import main
from tests.unit.record.report.recorded import write_run

LOSSES = [5.5, 4.25, 0.1]
PEAKS = {False: [4, 3, 2, 1], True: [3, 3, 3, 2]}
EVICTIONS = [5, 0, 0, 0]
UNIT_BYTES = 3 * 2**18
UNITS = {"microbatches": 1, "bytes": UNIT_BYTES}


def iterations(folder: Path, losses: list[float] = LOSSES, first: int = 1) -> Path:
    """A report without rows of stages or times."""
    folder.mkdir()
    lines = [
        json.dumps({"iteration": iteration, "lm loss": loss.hex(), "grad_norm": (0.3).hex(), "skipped": 0})
        for iteration, loss in enumerate(losses, start=first)
    ]
    (folder / "iterations.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def report(folder: Path, balanced: bool) -> Path:
    iterations(folder)
    for stage, peak in enumerate(PEAKS[balanced]):
        row = {"rank": stage, "stage": stage, "pipeline": 0, "balanced": balanced, "num_microbatches": 8}
        row |= {"peak_microbatches": peak, "peak_bytes": peak * UNIT_BYTES, "predicted_microbatches": peak}
        row |= {
            "predicted_bytes": peak * UNIT_BYTES,
            **dict.fromkeys(("evictions", "loads"), EVICTIONS[stage] * balanced),
        }
        (folder / f"rank_{stage:05d}.json").write_text(json.dumps(row))
    for iteration, elapsed_s in enumerate([9.0, 1.0, 1.25] if balanced else [8.0, 1.0, 1.0], start=1):
        edit_iteration(folder, iteration, elapsed_s=elapsed_s)
    return folder


def log(path: Path, losses: list[float] = LOSSES, milliseconds: float = 10.0, prefix: str = "") -> Path:
    lines = ["> building the model", "bpipe: placement adjacent"]
    for iteration, loss in enumerate(losses, start=1):
        lines.append(
            f"{prefix} [2026-01-01 00:00:00.0] iteration {iteration:8d}/{len(losses):8d} | consumed samples: "
            f"{32 * iteration:12d} | elapsed time per iteration (ms): {milliseconds * iteration:.1f} | throughput per "
            f"GPU (TFLOP/s/GPU): {milliseconds:.1f} | learning rate: 6.000000E-04 | global batch size:    32 | lm "
            f"loss: {loss:.6E} | loss scale: 1.0 | grad norm: 8.632 | number of skipped iterations:   0 | number of "
            "nan iterations:   0 |"
        )
    path.write_text("\n".join(lines) + "\n")
    return path


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_iteration(folder: Path, iteration: int, **changes: Any) -> None:
    path = folder / "iterations.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[iteration - 1] |= changes
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def compare(*arguments: object) -> int:
    return main(["compare", *map(str, arguments)])


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return report(tmp_path / "plain", False), report(tmp_path / "balanced", True)


# Reports and logs: what was computed.


def test_the_first_flipped_bit_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = [5.5, math.nextafter(4.25, 5), 0.2]
    assert compare(iterations(tmp_path / "one"), iterations(tmp_path / "other", changed)) == 1
    *rows, losses, largest, smaller, last = capsys.readouterr().out.splitlines()
    assert largest == (
        "difference of 0.5, lm loss of iteration 3: 0.1 (0x1.999999999999ap-4) in A, 0.2 (0x1.999999999999ap-3) in B"
    )
    assert smaller.startswith("difference of 2.09e-16, lm loss of iteration 2: 4.25 ")
    assert rows[-1].split()[:3] == ["2", "0x1.1000000000000p+2", "0x1.1000000000001p+2"], (
        "shown as far as the first difference"
    )
    assert losses == "loss: A 5.500 at iteration 1, 0.100 at iteration 3; B 5.500 at iteration 1, 0.200 at iteration 3"
    assert last == (
        "NOT identical: lm loss of iteration 2: 4.25 (0x1.1000000000000p+2) in A, 4.250000000000001 "
        "(0x1.1000000000001p+2) in B; 1 more differ after it"
    )


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [(0.0, -0.0, 1), (math.nan, math.nan, 0), (math.inf, -math.inf, 1), (None, None, 0), (None, 0.0, 1)],
)
def test_bits_are_compared_not_values(tmp_path: Path, first: float | None, second: float | None, status: int) -> None:
    folders = [iterations(tmp_path / name) for name in ("one", "other")]
    for folder, value in zip(folders, (first, second), strict=True):
        edit_iteration(folder, 1, grad_norm=None if value is None else value.hex())
    assert compare(*folders) == status


@pytest.mark.parametrize("change", [{"skipped": 1}, {"mtp loss": (1.0).hex()}, {"mtp loss": None}])
def test_a_skipped_iteration_and_a_value_of_one_run_alone_are_differences(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    first, second = iterations(tmp_path / "one"), iterations(tmp_path / "other")
    edit_iteration(first, 3, **change)
    assert compare(first, second) == 1


@pytest.mark.parametrize(
    ("loss", "status"),
    [(4.25, 0), (4.25 * (1 + 9e-4), 0), (4.25 * (1 - 2e-3), 1), (math.nan, 1), (math.inf, 1), (-4.25, 1)],
)
def test_with_a_tolerance_numbers_may_be_apart(
    tmp_path: Path, loss: float, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        compare(iterations(tmp_path / "one"), iterations(tmp_path / "other", [5.5, loss, 0.1]), "--tolerance", "1e-3")
        == status
    )
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("NOT equal within 0.001: lm loss of iteration 2" if status else "equal within 0.001: ")
    assert "identical" not in last


def test_reports_of_torchs_pipelining_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They have one number, another one than Megatron's, and were refused."""
    for name, loss in (("one", 0.5), ("other", 0.25)):
        line = {"iteration": 1, "loss": loss.hex(), "elapsed_s": 1.0}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(line) + "\n")
    assert compare(tmp_path / "one.jsonl", tmp_path / "other.jsonl") == 1
    assert "NOT identical: loss of iteration 1: 0.5 " in capsys.readouterr().out


def test_logs_are_compared_without_their_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = log(tmp_path / "one.log"), log(tmp_path / "other.log", milliseconds=99.0, prefix="31: ")
    assert compare(first, second) == 0
    *_, times, ratio, last = capsys.readouterr().out.splitlines()
    assert last.startswith("no difference in 3 iterations, but Megatron rounds the numbers in its logs")
    assert "identical" not in last
    assert times.endswith(": A 0.02 (0.01 to 0.03), B 0.198 (0.099 to 0.297)")
    assert ratio.endswith(": 9.9 (9.9 to 9.9)")


def test_a_restarted_run_is_compared_where_both_have_iterations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, restarted = iterations(tmp_path / "whole"), iterations(tmp_path / "restarted", LOSSES[1:], first=2)
    assert compare(whole, restarted) == 2
    assert "1 iteration only in one run: A has 3 (1 to 3), B has 2 (2 to 3); " in capsys.readouterr().err
    assert compare(whole, restarted, "--common") == 0
    printed = capsys.readouterr().out.splitlines()
    assert "note: 1 iteration only in one run, not compared" in printed
    assert printed[-1] == "identical: all numbers of 2 iterations agree to the last bit"


def test_an_iteration_that_was_run_again_counts_as_it_was_last(tmp_path: Path) -> None:
    first, second = iterations(tmp_path / "one"), iterations(tmp_path / "other", [5.5, 9.0])
    again = (first / "iterations.jsonl").read_text().splitlines(keepends=True)[1:]
    with (second / "iterations.jsonl").open("a") as stream:
        stream.writelines(again)
    assert compare(first, second) == 0


def test_what_cannot_be_compared_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = iterations(tmp_path / "good")
    (tmp_path / "no.log").write_bytes(b"nothing was trained \xff\n")
    (tmp_path / "torn.log").write_text(" iteration 1/ 3 | lm loss: 1.0 | grad n iteration 2/ 3 | lm loss: 1.0 |\n")
    (tmp_path / "empty").mkdir()
    refused = {
        tmp_path / "missing": "missing: No such file or directory",
        tmp_path / "no.log": "no iteration in it; is it a log of Megatron",
        tmp_path / "torn.log": "line 1: not one of Megatron's iteration lines, or two of them in one",
        tmp_path / "empty": "iterations.jsonl: No such file or directory",
        log(tmp_path / "good.log"): "good.log is a log, whose numbers are rounded",
        iterations(tmp_path / "later", first=9): "no iteration in common: A has 3 (1 to 3), B has 3 (9 to 11)",
    }
    for path, message in refused.items():
        assert compare(good, path) == 2
        assert message in capsys.readouterr().err


# Reports of whole runs: peaks and times beside it.

WANTED = ("--balancing", "--pp", 4, "--iterations", 3)


def test_table_times_and_verdict(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(*pair, *WANTED, "--rows", 0) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "peak of saved activations on each stage: measured (predicted from the schedule)",
        "          A, without balancing            B, with --bpipe         per iteration",
        "stage  micro-batches           MiB  micro-batches           MiB  evictions  loads",
        "    0          4 (4)   3.00 (3.00)          3 (3)   2.25 (2.25)          5      5",
        "    1          3 (3)   2.25 (2.25)          3 (3)   2.25 (2.25)          0      0",
        "    2          2 (2)   1.50 (1.50)          3 (3)   2.25 (2.25)          0      0",
        "    3          1 (1)   0.75 (0.75)          2 (2)   1.50 (1.50)          0      0",
        "loss: 5.500 at iteration 1, 0.100 at iteration 3",
        "seconds per iteration, median (quartiles): A 1 (1 to 8), B 1.25 (1 to 9)",
        "B's time divided by A's, median (quartiles): 1.12 (1 to 1.25)",
        "identical: all numbers of 3 iterations agree to the last bit",
    ]


def test_json_says_the_same(pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "summary.json"
    edit_iteration(pair[1], 3, grad_norm=math.nan.hex())
    assert compare(*pair, "--output", file) == 1
    assert capsys.readouterr().out
    assert compare(*pair, "--format", "json") == 1
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads(file.read_text())
    expected = {"equal": False, "exact": True, "tolerance": 0.0, "iterations": 3, "in_one_only": 0}
    assert expected.items() <= result.items()
    assert result["differences"] == [{"iteration": 3, "name": "grad_norm", "a": 0.3, "b": "nan"}]
    assert result["iteration_s_ratio"] == {"median": 1.125, "low": 1.0, "high": 1.25}
    a, b = result["a"], result["b"]
    assert (a["balanced"], b["balanced"], a["first_loss"], b["last_loss"]) == (False, True, 5.5, 0.1)
    assert a["iteration_s"] == {"median": 1.0, "low": 1.0, "high": 8.0}
    peaks = {f"{kind}_{unit}": 3 * size for kind in ("peak", "predicted") for unit, size in UNITS.items()}
    assert b["stages"][0] == {"stage": 0, **peaks, "evictions": 5, "loads": 5}
    assert [row["stage"] for row in a["stages"]] == [0, 1, 2, 3]


def test_a_missed_prediction_is_noted(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    edit(pair[1] / "rank_00002.json", peak_microbatches=4)
    assert compare(*pair) == 0
    assert "note: in B, the measured peak of stages [2] is not the predicted one" in capsys.readouterr().out


def test_a_loss_that_is_not_finite_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(*(iterations(tmp_path / name, [5.0, math.nan]) for name in ("one", "other"))) == 0
    assert "note: the loss is not finite" in capsys.readouterr().out


def test_replicas_of_a_stage_share_a_row_with_the_highest_numbers(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    replica = json.loads((pair[0] / "rank_00001.json").read_text())
    replica |= {"rank": 4, "pipeline": 1, "peak_bytes": 999 * UNIT_BYTES}
    (pair[0] / "rank_00004.json").write_text(json.dumps(replica))
    assert compare(*pair, *WANTED, "--format", "json") == 0
    row = json.loads(capsys.readouterr().out)["a"]["stages"][1]
    assert (row["peak_bytes"], row["peak_microbatches"]) == (999 * UNIT_BYTES, 3)


def test_pipelines_of_other_lengths_have_gaps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = report(tmp_path / "one", False), report(tmp_path / "other", True)
    (second / "rank_00003.json").unlink()
    assert compare(first, second) == 0
    assert (
        "    3          1 (1)   0.75 (0.75)              -             -          -      -" in capsys.readouterr().out
    )


def mix_runs(plain: Path, balanced: Path) -> None:
    (plain / "rank_00000.json").unlink()
    (balanced / "rank_00003.json").rename(plain / "rank_00003.json")


ROWS = "iterations.jsonl"


def rows(change: Callable[[str], str], of_balanced: bool = True) -> Callable[[Path, Path], object]:
    """Change the text of a run's iterations."""

    def damage(plain: Path, balanced: Path) -> None:
        path = (balanced if of_balanced else plain) / ROWS
        path.write_text(change(path.read_text()))

    return damage


def number(text: object) -> Callable[[Path, Path], object]:
    return lambda plain, balanced: edit_iteration(plain, 1, **{"lm loss": text})


FOURTH = json.dumps({"iteration": 4, "lm loss": "0x0.0p+0", "grad_norm": None, "skipped": 0}) + "\n"
DAMAGED: dict[str, Callable[[Path, Path], object]] = {
    "has reports of stages [0, 1, 2], not of 0 to 3": lambda plain, balanced: (balanced / "rank_00003.json").unlink(),
    "rank_00001.json: not the measurements of a rank (line 1": lambda plain, balanced: (
        plain / "rank_00001.json"
    ).write_text('{"stage": 1, "pea'),
    "rank_00001.json: 'balanced' is missing: was the run cut off?": lambda plain, balanced: (
        plain / "rank_00001.json"
    ).write_text('{"rank": 1, "stage": 1, "peak_bytes": 7}'),
    "rank_00003.json: this run was balanced; are the two folders swapped?": mix_runs,
    "iterations.jsonl: No such file or directory; did the run finish?": lambda plain, balanced: (
        balanced / ROWS
    ).unlink(),
    "2 iterations instead of 3; iterations [3] are missing": rows(lambda text: "\n".join(text.split("\n")[:2]) + "\n"),
    "iterations.jsonl: its last line is torn: was the run cut off?": rows(lambda text: text[:-9]),
    "4 iterations instead of 3; there are more": rows(lambda text: text + FOURTH, of_balanced=False),
    "lm loss is 5.5, not a number as float.hex writes it": number(5.5),
    "lm loss is 0x1.0p+5000, which is too large": number("0x1.0p+5000"),
}


@pytest.mark.parametrize("message", DAMAGED)
def test_an_unusable_report_says_why(
    pair: tuple[Path, Path], tmp_path: Path, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    DAMAGED[message](*pair)
    assert compare(*pair, *WANTED, "--output", tmp_path / "summary.json") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("flag", ["--balancing", "--pp=4"])
def test_what_only_a_report_can_show_is_not_taken_from_a_log(
    tmp_path: Path, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(log(tmp_path / "one.log"), log(tmp_path / "other.log"), flag) == 2
    assert "one.log: " in capsys.readouterr().err


DOCS = Path(__file__).resolve().parents[3] / "docs" / "report.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", warm_up=5)


def test_json_of_one_iteration(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder), "--iteration", "7", "--format", "json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["iterations"], result["warm_up_iteration"], result["differences"]) == ([7], 5, [])
    assert result["totals"]["pipeline_s"] == pytest.approx(result["totals"]["predicted_pipeline_s"])
    assert len(result["stages"]) == 8


def test_a_page_and_a_trace(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, trace = tmp_path / "report.html", tmp_path / "trace.json"
    assert main(["report", str(folder), "--html", str(page), "--trace", str(trace)]) == 0
    assert "is the memory bottleneck" in page.read_text()
    assert "forward-compute" in trace.read_text()
    assert "is the memory bottleneck" in capsys.readouterr().out


def test_every_command_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "runs" / "balanced")
    monkeypatch.chdir(tmp_path)
    lines = [line for block in re.findall(r"```\n(.*?)```", DOCS.read_text(), re.DOTALL) for line in block.splitlines()]
    # Runs with a baseline are in tests/unit/record/report/test_written.py.
    lines = [line for line in lines if line.startswith("bpipe ") and "--baseline" not in line]
    assert len(lines) == 3
    for line in lines:
        command, *arguments = shlex.split(line)
        assert command == "bpipe"
        assert main(arguments) == 0
    assert (tmp_path / "report.html").exists()
    assert (tmp_path / "trace.json").exists()


def test_the_page_shows_what_a_recorded_run_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """Its samples of the table and of a difference are those of a run that really took place."""
    assert main(["report", str(DOCS.parents[1] / "tests" / "data" / "recorded_run")]) == 0
    printed = capsys.readouterr().out
    blocks = re.findall(r"^```\n(.*?)^```", DOCS.read_text(), re.DOTALL | re.MULTILINE)
    (table,) = [block for block in blocks if "held activations" in block]
    (difference,) = [block for block in blocks if "measured" in block]
    assert table in printed
    assert difference in printed
