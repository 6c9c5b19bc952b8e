"""scripts/size.py fails if a sum grows, until the table says why."""

import sys
from pathlib import Path

import pytest

from scripts import size


def test_a_sum_may_only_fall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = tmp_path / "bpipe" / "schedule" / "a.py"
    module.parent.mkdir(parents=True)
    module.write_text("one\ntwo\n")
    monkeypatch.setattr(size, "ROOT", tmp_path)
    monkeypatch.setattr(size, "TABLE", tmp_path / "size.txt")
    monkeypatch.setattr(size, "PAGES", ())
    monkeypatch.setattr(size, "SUMS", {"product": ("bpipe",)})

    def status(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["size.py", *arguments])
        return size.main()

    assert status("--write", "the beginning") == 0
    assert size.TABLE.read_text() == "# the beginning\n      2 bpipe/schedule\n      2 product\n      0 words\n"
    assert status() == 0
    module.write_text("one\ntwo\nthree\n")
    assert status() == 1
    assert "product has 3, 1 more than" in capsys.readouterr().out
    (tmp_path / "bpipe" / "lower").mkdir()
    module.rename(tmp_path / "bpipe" / "lower" / "a.py")
    (tmp_path / "bpipe" / "lower" / "a.py").write_text("one\n")
    assert status() == 0, "a room may grow while the sum falls"
