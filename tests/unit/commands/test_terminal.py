"""Tables and progress: numbers are never broken or cut off, and colour codes go to terminals only."""

import io
import re
import shlex
import sys
import time

import pytest

from bpipe.commands.terminal import WIDTH, Flags, progress_of, table, tell


class Stream(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: is_terminal  # type: ignore[method-assign]


def printed(monkeypatch: pytest.MonkeyPatch, is_terminal: bool = False, columns: int = 80, **environment: str) -> str:
    stream = Stream(is_terminal)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"COLUMNS": str(columns), "TERM": "xterm", **environment}.items():
        monkeypatch.setenv(name, value)
    rows = [("1", "9.250", "3.8 to 4.44", "", "a long text " * 20), ("12", "10,123", "", "", "b")]
    tell(table(("", "seconds", "range s", "nothing", "text"), rows, ["red", ""]))
    return stream.getvalue()


def test_numbers_are_aligned_and_whole_on_any_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_terminal, columns in ((False, 10), (True, 200), (True, 60), (True, 20)):
        text = re.sub(r"\x1b\[[\d;]*m", "", printed(monkeypatch, is_terminal, columns))
        lines = text.splitlines()
        assert "nothing" not in lines[0]
        assert lines[1].startswith(" 1    9.250  3.8 to 4.44  a")
        assert lines[-1].startswith("12   10,123               b")
        assert max(map(len, lines)) <= (max(columns, 56) if is_terminal else WIDTH)
        assert "".join(text.split()).count("alongtext") == 20


def test_colours_are_for_terminals_that_may_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[31m" in printed(monkeypatch, True)
    for is_terminal, environment in (
        (False, {"FORCE_COLOR": "1"}),
        (True, {"NO_COLOR": "1"}),
        (True, {"TERM": "dumb"}),
    ):
        assert "\x1b" not in printed(monkeypatch, is_terminal, **environment)


def test_words_stay_whole(capsys: pytest.CaptureFixture[str]) -> None:
    tell("   " + "some-word value " * 20)
    wrapped = capsys.readouterr().out.splitlines()
    assert len(wrapped) == 3
    assert all(line.startswith("   ") and len(line) <= WIDTH for line in wrapped)


@pytest.mark.parametrize("before", ["   ", "stock: ", "1. the launch with "])
def test_a_shell_reads_broken_flags_as_one_line(before: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines of 330 columns hid where one row ended and the next began."""
    flags = " ".join(f"--flag-{number} 'a value' b" for number in range(20))
    tell(Flags(before + flags))
    out = capsys.readouterr().out
    assert len(out.splitlines()) > 2
    assert all(len(line) <= WIDTH for line in out.splitlines())
    # A shell drops a backslash with the end of its line.
    assert shlex.split(out.removeprefix(before).replace("\\\n", "")) == shlex.split(flags)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_is_for_terminals_and_leaves_nothing(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with progress_of("plan") as progress:
        progress("memory", 1, 4)
    assert ("memory" in stream.getvalue() and "25%" in stream.getvalue()) is is_terminal
    assert stream.getvalue().endswith("\x1b[2K") is is_terminal


def test_in_a_pipe_progress_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, clock = Stream(False), iter((0.0, 4.0, 5.1, 5.1, 6.0))
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with progress_of("plan") as progress:
        for done in (1, 2, 3):
            progress("memory", done, 4)
    assert stream.getvalue() == "plan: memory, 2 of 4\n"
