"""What a user types and names wrongly: each is one message that names it and says what to do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bpipe.cli import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from-script", "none.sh"], "none.sh: there is no such file: look at the name"),
        (["--from-script", "no/such.sh"], "no/such.sh: there is no folder no: make it, or look at the name"),
        (["--from-script", "."], ".: this is a folder: name a file"),
        (["--from-script", "latin.sh"], "latin.sh: byte 6 is no UTF-8 text: name the script itself, or convert it"),
        (["--from-script", "/dev/zero"], "/dev/zero: line 1: a zero byte: this is no script"),
        (["--from-script", "-"], "--from-script -: standard input is closed: pipe the script into it, or name a file"),
        (["--model", "gpt3-13b", "--pipeline", "8", "--global-batch", "8", "--trace", "no/a.json"], "no/a.json: there is no folder no"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_what_to_do(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once a number of the operating system, a codec's words, or a traceback."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", None)
    (tmp_path / "latin.sh").write_bytes(b"# Ma\xdfe\n".replace(b"Ma", b"Maas"))
    assert main(["simulate", "--cluster", "a100-80g:8", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--tp", "2"], "unknown flag --tp (see"),
        (["simulate", "--html", "x"], "unknown flag --html (see"),
        (["plan", "--nodes", "4"], "unknown flag --nodes (see"),
        (["report", "--htm", "x"], "unknown flag --htm, did you mean '--html'?"),
        (["simulate", "--tensr", "2"], "unknown flag --tensr, did you mean '--tensor'?"),
        (["simulate", "--cluster", "h100-80g:128", "--model", "gpt3-13b", *["--pipeline", "8", "--global-batch", "128"]], "h100-80g:16x8"),
        (
            [
                "simulate",
                "--cluster",
                "h100-80g:8",
                "--model",
                "gpt3-13b",
                *["--pipeline", "8", "--global-batch", "8", "--memory", "81920"],
            ],
            "'81920' is more than the 4096 GiB of any device: it is in GiB, so 81920 MiB are 80",
        ),
        (
            ["estimate", *["--global-batch", "128", "--pipeline", "8", "--micro-batch", "1", "2", "--stage-mfu", "0.378", "0.476"]],
            "--stage-mfu 0.378 is less than 1 %: it is in percent, so give 37.8",
        ),
    ],
)
def test_what_was_meant_is_said_and_nothing_absurd(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--tp` was once to be `--set`, and `--html` `--help`; units and a node of 128 devices were taken as they stood."""
    try:
        status = main(arguments)
    except SystemExit as ended:
        status = int(ended.code or 0)
    assert status == 2
    assert message in capsys.readouterr().err


def test_a_node_of_many_devices_can_be_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--cluster", "h100-80g:1x32", "--model", "gpt3-13b", *["--pipeline", "8", "--global-batch", "32"]]) == 0
