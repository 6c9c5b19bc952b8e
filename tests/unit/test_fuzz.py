"""A few damaged inputs of every reader; `scripts/validation/fuzz_readers.py` has thousands."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from validation import fuzz_readers


@pytest.mark.parametrize("name", fuzz_readers.READERS)
def test_damaged_inputs_are_refused_or_rightly_taken(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = fuzz_readers.fuzz(name, 40, 1, tmp_path / "kept")
    assert found["failed"] == 0, capfd.readouterr().err
    assert found["refused"] > 10, "not everything is taken"


@pytest.mark.parametrize("name", fuzz_readers.READERS)
def test_sound_inputs_are_taken(name: str, tmp_path: Path) -> None:
    """The judges, too, take what nobody damaged."""
    reader, path = fuzz_readers.READERS[name], tmp_path / "input"
    if name == "record":
        path.mkdir()
    for text in reader.texts(path):
        # Some draws ask for what a sound schedule with transfers refuses, too: to be aligned or balanced once more.
        assert any(reader.judge(path, text, random.Random(draw)) for draw in range(8)), text


def test_a_judge_that_is_deceived_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a checker that takes everything, and messages that nobody holds to anything, the judges object."""
    from bpipe.check import rules
    from bpipe.formats import messages

    monkeypatch.setattr(rules, "RULES", ())
    monkeypatch.setattr(messages._Walk, "take", lambda *_: None)
    monkeypatch.setattr(messages, "_check_order", lambda *_: None)
    monkeypatch.setattr(messages, "_check_progress", lambda *_: None)
    for name in ("csv", "grid", "json", "runtime"):
        assert fuzz_readers.fuzz(name, 300, 1, tmp_path / "kept")["failed"] > 0, name
