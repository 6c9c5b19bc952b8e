"""What takes long says so on a terminal, and leaves nothing there."""

from __future__ import annotations

import io
import sys
import time

import pytest

from bpipe.commands.terminal import progress_of


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_takes_long_says_so_and_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress_of("simulate", 0.01, 0.01):
        time.sleep(0.2)
    said = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert said.startswith("\rsimulate: 0 s ")
    assert said.count("simulate") > 2
    assert said.endswith("\r\x1b[K")


def test_what_is_quick_or_read_by_program_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, begins_s in ((Terminal(), 60.0), (io.StringIO(), 0.0)):
        monkeypatch.setattr(sys, "stderr", stream)
        with progress_of("simulate", begins_s, 0.01):
            time.sleep(0.05)
        assert stream.getvalue() == ""


def test_an_error_leaves_the_terminal_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        with progress_of("fit", 0.01, 0.01):
            time.sleep(0.1)
            raise ValueError("none")

    monkeypatch.setattr(sys, "stderr", Terminal())
    with pytest.raises(ValueError, match="none"):
        fail()
    assert sys.stderr.getvalue().endswith("\r\x1b[K")  # type: ignore[attr-defined]
