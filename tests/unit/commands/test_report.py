"""`bpipe report`: what it prints and writes, what it refuses, that it is quick, and that the commands of its page
run."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bpipe.cli import main
from tests.unit.record.report.recorded import write_run

DOCS = Path(__file__).resolve().parents[3] / "docs" / "report.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", warm_up=5)


def test_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "schedule 1f1b, 8 stages, 16 micro-batches; balance bpipe; device cpu; torch 2.15.0; " in text
    assert "0 0 5 (5) 53.91 (53.91) 53.91 83.95 28.6 MiB" in text
    assert "1. iteration 5, pipeline time: measured 1.04 s, predicted 690 ms; the first recorded iteration" in text
    assert "Stage 0 (rank 0) is the memory bottleneck" in text


def test_json_of_one_iteration(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder), "--iteration", "7", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["iterations"], found["warm_up_iteration"], found["differences"]) == ([7], 5, [])
    assert found["totals"]["pipeline_s"] == pytest.approx(found["totals"]["predicted_pipeline_s"])
    assert len(found["stages"]) == 8


def test_a_page_and_a_trace(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, trace = tmp_path / "report.html", tmp_path / "trace.json"
    assert main(["report", str(folder), "--html", str(page), "--trace", str(trace)]) == 0
    assert "is the memory bottleneck" in page.read_text()
    assert "forward-compute" in trace.read_text()
    assert "is the memory bottleneck" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is not a folder: give the one that was the run's --bpipe-report"),
        (["run", "--iteration", "9"], "run: iteration 9 is not recorded; recorded are 5, 6, 7"),
        (["run", "--trace", "no/such/folder/trace.json"], "there is no folder no/such/folder: create it"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    folder: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder.parent)
    assert main(["report", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_it_loads_nothing_heavy(folder: Path) -> None:
    program = (
        "import sys; import bpipe.cli as cli; status = cli.main(['report', sys.argv[1]]); "
        "sys.exit(' '.join({'torch', 'megatron', 'matplotlib', 'numpy'} & set(sys.modules)) or status)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, timeout=30, check=False
    )
    assert ended.returncode == 0, ended.stderr


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
