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


def iterations(folder: Path, losses: list[float] = LOSSES, first: int = 1) -> Path:
    """Write a report without times."""
    folder.mkdir()
    lines = [
        json.dumps({"iteration": iteration, "lm loss": loss.hex(), "grad_norm": (0.3).hex(), "skipped": 0})
        for iteration, loss in enumerate(losses, start=first)
    ]
    (folder / "iterations.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def report(folder: Path, balanced: bool) -> Path:
    iterations(folder)
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
    losses, largest, smaller, last = capsys.readouterr().out.splitlines()[2:]
    assert largest == (
        "difference of 0.5, lm loss of iteration 3: 0.1 (0x1.999999999999ap-4) in A, 0.2 (0x1.999999999999ap-3) in B"
    )
    assert smaller.startswith("difference of 2.09e-16, lm loss of iteration 2: 4.25 ")
    assert losses == "loss of A: 5.500 at iteration 1, 0.100 at iteration 3"
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
    """They have one number, with another name than Megatron's, and were refused."""
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


# Reports of whole runs: times, too.


def test_times_and_verdict(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(*pair) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "loss of A: 5.500 at iteration 1, 0.100 at iteration 3",
        "seconds per iteration, median (quartiles): A 1 (1 to 8), B 1.25 (1 to 9)",
        "B's time divided by A's, median (quartiles): 1.12 (1 to 1.25)",
        "identical: all numbers of 3 iterations agree to the last bit",
    ]


def test_a_loss_that_is_not_finite_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(*(iterations(tmp_path / name, [5.0, math.nan]) for name in ("one", "other"))) == 0
    assert "nan at iteration 2" in capsys.readouterr().out


ROWS = "iterations.jsonl"


def rows(change: Callable[[str], str], of_balanced: bool = True) -> Callable[[Path, Path], object]:
    """Return a function that changes the text of a run's iterations."""

    def damage(plain: Path, balanced: Path) -> None:
        path = (balanced if of_balanced else plain) / ROWS
        path.write_text(change(path.read_text()))

    return damage


def number(text: object) -> Callable[[Path, Path], object]:
    return lambda plain, balanced: edit_iteration(plain, 1, **{"lm loss": text})


FOURTH = json.dumps({"iteration": 4, "lm loss": "0x0.0p+0", "grad_norm": None, "skipped": 0}) + "\n"
DAMAGED: dict[str, Callable[[Path, Path], object]] = {
    "iterations.jsonl: No such file or directory; did the run finish?": lambda plain, balanced: (
        balanced / ROWS
    ).unlink(),
    "1 iteration only in one run: A has 3 (1 to 3), B has 2 (1 to 2)": rows(
        lambda text: "\n".join(text.split("\n")[:2]) + "\n"
    ),
    "iterations.jsonl: its last line is torn: was the run cut off?": rows(lambda text: text[:-9]),
    "1 iteration only in one run: A has 4 (1 to 4), B has 3 (1 to 3)": rows(
        lambda text: text + FOURTH, of_balanced=False
    ),
    "lm loss is 5.5, not a number as float.hex writes it": number(5.5),
    "lm loss is 0x1.0p+5000, which is too large": number("0x1.0p+5000"),
}


@pytest.mark.parametrize("message", DAMAGED)
def test_an_unusable_report_says_why(pair: tuple[Path, Path], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    DAMAGED[message](*pair)
    assert compare(*pair) == 2
    assert message in capsys.readouterr().err


DOCS = Path(__file__).resolve().parents[3] / "docs" / "report.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", warm_up=5)


def test_json_of_a_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder), "--format", "json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["iterations"], result["warm_up_iteration"]) == ([5, 6, 7], 5)
    assert [difference["kind"] for difference in result["differences"]] == ["iteration"]
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
    # Runs with a baseline are in tests/unit/record/report/test_output.py.
    lines = [line for line in lines if line.startswith("bpipe ") and "--baseline" not in line]
    assert len(lines) == 3
    for line in lines:
        command, *arguments = shlex.split(line)
        assert command == "bpipe"
        assert main(arguments) == 0
    assert (tmp_path / "report.html").exists()
    assert (tmp_path / "trace.json").exists()


def test_the_page_shows_what_a_recorded_run_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(DOCS.parents[1] / "tests" / "data" / "recorded_run")]) == 0
    printed = capsys.readouterr().out
    blocks = re.findall(r"^```\n(.*?)^```", DOCS.read_text(), re.DOTALL | re.MULTILINE)
    (table,) = [block for block in blocks if "held activations" in block]
    (difference,) = [block for block in blocks if "measured" in block]
    assert table in printed
    assert difference in printed
