"""The `bpipe` command: what it prints, what it refuses, and that it starts at once."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import bpipe
from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.cli import COMMANDS, command_of, main
from bpipe.config.flags.values import positive
from bpipe.schedule.files.text import read_csv

EXAMPLE = ["schedule", "--schedule", "1f1b", "--pp", "4", "--microbatches", "8", "--balance", "bpipe"]
SCHEDULE = build(ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig()))

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


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "# bpipe schedule=x microbatches=1 stage_to_rank=0\n0F5,0B5\n",
            "0F5 cannot be placed: there are only stages 0 to 0, micro-batches 0 to 0",
        ),
        ("# bpipe schedule=x microbatches=1 stage_to_rank=0\n3F0,0B0\n", "3F0 cannot be placed"),
        (
            "# bpipe schedule=x microbatches=999999999 stage_to_rank=0\n0F0,0B0\n",
            "1 stages of 999999999 micro-batches are more than its computations",
        ),
    ],
)
def test_what_cannot_be_aligned_is_one_line(
    text: str, reason: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The first was a traceback, the last took all memory."""
    path = tmp_path / "listing.csv"
    path.write_text(text)
    assert main(["schedule", "--input", str(path), "--align"]) == 2
    captured = capfd.readouterr()
    assert captured.err.startswith(f"bpipe: error: {path}: {reason}")
    assert captured.err.count("\n") == 1


REFUSED = {
    "bound too small": ([*EXAMPLE, "--bound", "2"], "smallest bound found that ranks 0 and 3 can both keep is 3"),
    "wrong number of bounds": ([*EXAMPLE, "--bound", "3,3"], "2 bounds for 4 stages: give one for all or one for each"),
    "bound without balance": ([*EXAMPLE[:-2], "--bound", "3"], "--bound says how to balance: give --balance bpipe"),
    "partners without balance": ([*EXAMPLE[:-2], "--partners", "3,2,1,0"], "--partners says how to balance: give"),
    "a pool without balance": ([*EXAMPLE[:-2], "--hosts", "pool"], "--hosts says how to balance: give --balance"),
    "a pool with partners": ([*EXAMPLE, "--hosts", "pool", "--partners", "3,2,1,0"], "but hosts is 'pool'"),
    "a pool without room": ([*EXAMPLE, "--hosts", "pool", "--bound", "2"], "keeps for all ranks is 3 micro-batches"),
    "partners one-sided": ([*EXAMPLE, "--partners", "1,2,3,0"], "pair them both ways"),
    "nothing to do": (["schedule", "--schedule", "1f1b"], "--pp, --microbatches missing"),
    "too many": (
        ["schedule", "--schedule", "1f1b", "--pp", "9999", "--microbatches", "9999"],
        "are more than 10000000: use fewer",
    ),
    "chunks for 1f1b": ([*EXAMPLE, "--vp", "2"], "takes at most 1 chunk per rank, not 2"),
    "a format that is not written": ([*EXAMPLE, "--output", "x.pdf"], ".pdf cannot be written, only grid, csv, json"),
    "one chunk for interleaved": (
        ["schedule", "--schedule", "interleaved-1f1b", "--pp", "2", "--microbatches", "2", "--vp", "1"],
        "at least 2 chunks",
    ),
    "no such file": (["schedule", "--input", "/nowhere/at-all.csv"], "there is no folder /nowhere: create it, or"),
    "input and generate": (["schedule", "--input", "x", "--pp", "3"], "--pp is for generating"),
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


ESTIMATE = ["estimate", "--gbs", "8", "--pp", "2", "--mbs", "1", "2", "--stage-mfu", "30", "40"]
MISUSED = {
    "command": (["simulte"], "unknown command 'simulte', did you mean 'simulate'?"),
    "schedule": (["schedule", "--schedule", "1fb1"], "--schedule: unknown choice '1fb1', did you mean '1f1b'?"),
    "nothing near": (["schedule", "--balance", "zzz"], "argument --balance: unknown choice 'zzz': choose from none"),
    "flag": ([*EXAMPLE, "--microbatchs", "4"], "unknown flag --microbatchs, did you mean '--microbatches'?"),
    # argparse alone would say that a flag is missing.
    "flag that is needed": (["estimate", "--global-bach-size=8"], "did you mean '--global-batch-size'?"),
    "no list": (["schedule", "--bound", "3;3"], "argument --bound: '3;3' is neither a number nor a list"),
    "format": (["schedule", "--format", "pdf"], "argument --format: unknown choice 'pdf'"),
    "no stages": (["schedule", "--pp", "0"], "--pp: '0' must be a whole number, at least 1"),
    "no number": (["schedule", "--microbatches", "many"], "argument --microbatches: 'many' must be a whole number"),
    "no batch": ([*ESTIMATE, "--gbs", "0"], "argument --global-batch-size/--gbs: '0' must be"),
    "no time": ([*ESTIMATE, "--stage-seconds", "1", "0"], "argument --stage-seconds: '0' must be a number of seconds"),
    "endless time": ([*ESTIMATE, "--stage-seconds", "inf", "1"], "argument --stage-seconds: 'inf' must be"),
    "more than floats hold": ([*ESTIMATE, "--gbs", "1" + 39 * "0"], "at most 1000000000000"),
}


@pytest.mark.parametrize("case", MISUSED)
def test_what_was_mistyped_is_named_in_one_line(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    arguments, reason = MISUSED[case]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert reason in captured.err


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("report", "capture", "check-launch")])
def test_a_number_that_must_be_positive_is_refused_by_its_flag(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """It once took `--pp 0` and complained of num_stages, and `estimate --gbs 0` gained 1.333x."""
    flags = [flag for flag in command_of(name).flags if flag.read is positive]
    assert flags
    for flag in flags:
        with pytest.raises(SystemExit):
            main([name, flag.name, *["0"] * (flag.count if isinstance(flag.count, int) else 1)])
        assert (
            f"argument {'/'.join(flag.names.split())}: '0' must be a whole number, at least 1" in capfd.readouterr().err
        )
    assert not [flag for flag in command_of(name).flags if flag.read in (int, float) and flag.field != "stage_mfu"]


def test_alone_it_shows_its_help(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capfd.readouterr().out.startswith("usage: bpipe ")


def test_the_version(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capfd.readouterr().out == f"bpipe {bpipe.__version__}\n"


def test_output_files_say_their_format(tmp_path: Path) -> None:
    starts = {"a.txt": b"# bpipe", "a": b"# bpipe", "a.CSV": b"# bpipe", "a.svg": b"<svg", "a.JSON": b"{"}
    for name, start in starts.items():
        assert main([*EXAMPLE, "--output", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes().startswith(start)
    assert main([*EXAMPLE, "--output", str(tmp_path / "x.pdf")]) == 2
    assert not (tmp_path / "x.pdf").exists()
    assert main([*EXAMPLE, "--output", str(tmp_path / "x.pdf"), "--format", "csv"]) == 0


SHORT = {
    "schedule": EXAMPLE,
    "simulate": ["simulate", "--model", "gpt3-13b", "--cluster", "a100-80g:4", "--pp", "4", "--gbs", "8"],
    "estimate": ESTIMATE,
    "help": ["plan", "--help"],
}


@pytest.mark.parametrize("case", SHORT)
def test_a_reader_that_has_gone_is_no_error(case: str) -> None:
    """What fits into one buffer was only written, and complained of, while Python ended."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as gone:
        ended = subprocess.run(
            [sys.executable, "-m", "bpipe", *SHORT[case]], stdout=gone, stderr=subprocess.PIPE, timeout=30, check=False
        )
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize("redirection", [">&-", ">/dev/full"])
@pytest.mark.parametrize("case", ["schedule", "estimate"])
def test_output_that_takes_nothing_is_one_line(case: str, redirection: str) -> None:
    command = shlex.join([sys.executable, "-m", "bpipe", *SHORT[case]])
    ended = subprocess.run(
        ["sh", "-c", f"{command} {redirection}"], capture_output=True, text=True, timeout=30, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("bpipe: error: ")
    assert ended.stderr.count("\n") == 1


def test_a_file_is_written_without_standard_output(tmp_path: Path) -> None:
    command = shlex.join([sys.executable, "-m", "bpipe", *EXAMPLE, "--output", str(tmp_path / "a.csv")])
    ended = subprocess.run(["sh", "-c", f"{command} >&-"], capture_output=True, timeout=30, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert read_csv((tmp_path / "a.csv").read_text()) == SCHEDULE


def test_closed_standard_input(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["schedule", "--input", "-"]) == 2
    assert "standard input is closed" in capfd.readouterr().err


def test_an_interrupted_command_ends_without_a_traceback() -> None:
    # In a job of the background a shell has interrupts ignored, and who is started there inherits that.
    program = (
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); runpy.run_module('bpipe')"
    )
    command = [sys.executable, "-c", program, "schedule", "--input", "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        # More than a pipe holds: once it is written, the command is reading.
        process.stdin.write(b"," * (1 << 20))
        process.stdin.flush()
        process.send_signal(signal.SIGINT)
        process.stdin.close()
        assert process.stderr is not None
        assert process.stderr.read() == b"bpipe: interrupted\n"
        assert process.wait(30) == 130


def test_the_command_loads_only_what_it_needs() -> None:
    """So that it starts at once: nobody waits for what other sub-commands, or pictures, import."""
    program = (
        "import sys; from bpipe.cli import main; status = main(sys.argv[1:]); "
        "print(*(name for name in sys.modules if name.split('.')[0] in ('torch', 'megatron', 'matplotlib', 'numpy') "
        "or name.startswith(('bpipe.plan', 'bpipe.predict', 'bpipe.record.report', 'bpipe.simulate', 'bpipe.draw'))), "
        "file=sys.stderr); "
        "sys.exit(status)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, *EXAMPLE], capture_output=True, text=True, timeout=30, check=True
    )
    assert ended.stderr.split() == []
