"""The `bpipe` command: what it prints, what it refuses, and that it starts at once."""

from __future__ import annotations

import io
import json
import os
import pty
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from bpipe.cli import main
from bpipe.ir.document import read_json
from bpipe.ir.grid import read_grid
from bpipe.ir.text import read_csv
from bpipe.program import ProgramConfig, build

EXAMPLE = ["schedule", "--schedule", "1f1b", "--stages", "4", "--microbatches", "8", "--balance", "bpipe"]
SCHEDULE = build(ProgramConfig("1f1b", 4, 8, balance="bpipe"))

GRID = """\
# bpipe schedule=1f1b microbatches=8 stage_to_rank=0,1,2,3 partners=3,2,1,0 bounds=3,3,3,3
slot      0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18 19 20 21
rank 0 C F0 F1 F2 F3  .  .  . B0 F4 B1 F5 B2 F6 B3 F7 B4  . B5  . B6  . B7
       T  .  . E1  .  .  .  . E3 L1  .  . E5 L3  .  .  . L5  .  .  .  .  .
rank 1 C  . F0 F1 F2  .  . B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5  . B6  . B7  .
rank 2 C  .  . F0 F1  . B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6  . B7  .  .
rank 3 C  .  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7  .  .  .
       T  .  . H1  .  .  .  . H3 R1  .  . H5 R3  .  .  . R5  .  .  .  .  .
# peak=3,3,2,3 evictions=3,0,0,0
"""


def test_the_worked_example(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(EXAMPLE) == 0
    assert capfd.readouterr().out == GRID
    assert read_grid(GRID) == SCHEDULE


def test_formats_and_output_files(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*EXAMPLE, "--format", "json"]) == 0
    assert read_json(capfd.readouterr().out) == SCHEDULE
    assert main([*EXAMPLE, "--output", str(tmp_path / "a.csv")]) == 0
    assert read_csv((tmp_path / "a.csv").read_text()) == SCHEDULE
    assert main([*EXAMPLE, "--output", str(tmp_path / "b.txt"), "--format", "csv"]) == 0
    assert (tmp_path / "b.txt").read_text() == (tmp_path / "a.csv").read_text()
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("form", ["grid", "csv", "json"])
def test_a_file_comes_back_as_it_went(form: str, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    assert main([*EXAMPLE, "--format", form, "--output", path]) == 0
    assert main(["schedule", "--input", path, "--format", form]) == 0
    assert capfd.readouterr().out == Path(path).read_text()


def test_standard_input(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(GRID.encode())))
    assert main(["schedule", "--input", "-"]) == 0
    assert capfd.readouterr().out == GRID


def test_a_listing_from_elsewhere_is_aligned_and_balanced(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "listing.csv"
    path.write_text("".join(",".join(str(slot.compute) for slot in row if slot.compute) + "\n" for row in SCHEDULE.ranks))
    assert main(["schedule", "--input", str(path)]) == 2
    assert "stage order: rank 1, slot 0, 1F0: needs 0F0, which rank 0 computes in slot 0" in capfd.readouterr().err
    assert main(["schedule", "--input", str(path), "--align", "--balance", "bpipe", "--format", "json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["bounds"] == [3, 3, 3, 3]
    assert read_json(json.dumps(document)).ranks == SCHEDULE.ranks


def test_bounds_and_partners(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*EXAMPLE, "--bound", "3,3,2,4", "--partners", "3,2,1,0", "--format", "json"]) == 0
    assert json.loads(capfd.readouterr().out)["bounds"] == [3, 3, 2, 4]


REFUSED = {
    "bound too small": ([*EXAMPLE, "--bound", "2"], "smallest bound that ranks 0 and 3 can both keep is 3"),
    "wrong number of bounds": ([*EXAMPLE, "--bound", "3,3"], "2 bounds for 4 stages: give one for all or one for each"),
    "bound without balance": ([*EXAMPLE[:-2], "--bound", "3"], "balance is"),
    "partners one-sided": ([*EXAMPLE, "--partners", "1,2,3,0"], "pair them both ways"),
    "nothing to do": (["schedule", "--schedule", "1f1b"], "--stages, --microbatches missing"),
    "no stages": (
        ["schedule", "--schedule", "1f1b", "--stages", "0", "--microbatches", "1"],
        "num_stages is 0, but there must be at least 1",
    ),
    "too many": (["schedule", "--schedule", "1f1b", "--stages", "9999", "--microbatches", "9999"], "are more than 10000000: ask for fewer"),
    "chunks for 1f1b": ([*EXAMPLE, "--chunks", "2"], r"takes at most 1 chunk a rank"),
    "no chunks for interleaved": (
        ["schedule", "--schedule", "interleaved-1f1b", "--stages", "2", "--microbatches", "2"],
        "at least 2 chunks",
    ),
    "no such file": (["schedule", "--input", "/nowhere/at-all.csv"], "No such file"),
    "input and generate": (["schedule", "--input", "x", "--stages", "3"], "--stages is for generating"),
    "align what is generated": ([*EXAMPLE, "--align"], "--align is for a schedule read with --input"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_is_one_message_with_the_way_out(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    arguments, reason = REFUSED[case]
    assert main(arguments) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("bpipe: error: ")
    assert reason in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    "arguments", [[], ["schedule", "--schedule", "2f2b"], ["schedule", "--bound", "3;3"], ["schedule", "--format", "pdf"]]
)
def test_wrong_usage_exits_with_usage(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: bpipe" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"0F0,0B0\n,1F0,1Q0\n", "line 2, cell 3: '1Q0' is no action"), (b"\xff\xfe0", "byte 0 is no UTF-8 text"), (b"{", "line 1, column 2")],
)
def test_a_broken_file_gets_its_name_and_place(content: bytes, reason: str, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "broken.csv"
    path.write_bytes(content)
    assert main(["schedule", "--input", str(path)]) == 2
    error = capfd.readouterr().err
    assert f"{path}: " in error
    assert reason in error


def test_a_reader_that_stops_early_is_no_error() -> None:
    command = [
        sys.executable,
        "-m",
        "bpipe",
        "schedule",
        "--schedule",
        "1f1b",
        "--stages",
        "16",
        "--microbatches",
        "200",
        "--format",
        "json",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(30) == 0


def test_a_terminal_gets_colours_and_its_width() -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "60", "TERM": "xterm"}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen([sys.executable, "-m", "bpipe", *EXAMPLE], stdout=theirs, env=environment) as process:
        os.close(theirs)
        output = b""
        while True:
            try:
                block = os.read(ours, 4096)
            except OSError:
                break
            if not block:
                break
            output += block
        assert process.wait(30) == 0
    os.close(ours)
    text = output.decode().replace("\r\n", "\n")
    assert "\x1b[34mF0\x1b[0m" in text
    for code in ("31", "32", "33", "34", "35"):
        text = text.replace(f"\x1b[{code}m", "")
    text = text.replace("\x1b[0m", "")
    assert max(len(line) for line in text.split("\n")[1:]) <= 60
    assert read_grid(text) == SCHEDULE


def test_the_command_starts_at_once() -> None:
    """In processor time, because the machine may be busy with something else."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "bpipe", *EXAMPLE], check=True, capture_output=True, timeout=30)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < 0.3
