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


@pytest.mark.parametrize(
    "name", [name for name in COMMANDS if name not in ("report", "compare", "capture", "check-launch")]
)
def test_a_number_that_must_be_positive_is_refused_by_its_flag(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """It once accepted `--pp 0` and complained about num_stages."""
    flags = [flag for flag in command_of(name).flags if flag.read is positive]
    assert flags
    for flag in flags:
        with pytest.raises(SystemExit):
            main([name, flag.name, *["0"] * (flag.count if isinstance(flag.count, int) else 1)])
        assert (
            f"argument {'/'.join(flag.names.split())}: '0' must be a whole number, at least 1" in capfd.readouterr().err
        )
    assert not [flag for flag in command_of(name).flags if flag.read in (int, float)]


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
    "help": ["plan", "--help"],
}


@pytest.mark.parametrize("case", SHORT)
def test_a_reader_that_has_gone_is_no_error(case: str) -> None:
    """Output that fits into one buffer was written only when Python exited, which then printed an error."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as gone:
        ended = subprocess.run(
            [sys.executable, "-m", "bpipe", *SHORT[case]], stdout=gone, stderr=subprocess.PIPE, timeout=30, check=False
        )
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize("redirection", [">&-", ">/dev/full"])
@pytest.mark.parametrize("case", ["schedule", "simulate"])
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


@pytest.mark.parametrize("arguments", ["schedule --input -", "simulate --cluster a100-80g:8 --launch -"])
def test_closed_standard_input(
    arguments: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(arguments.split()) == 2
    assert "standard input is closed" in capfd.readouterr().err


def test_an_interrupted_command_ends_without_a_traceback() -> None:
    # A shell's background jobs ignore interrupts, and so do processes started there.
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
    """It starts at once, without waiting for what other sub-commands, or pictures, import."""
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
