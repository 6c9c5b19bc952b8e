"""scripts/validation/golden.py on checkouts whose command is a few lines: equal sides, and every kind of output that
differs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PLAIN = """\
import sys
from pathlib import Path
def main(arguments):
    print("made", len(arguments), "at", Path(__file__).parents[1], "in", Path.cwd())
    if "--output" in arguments:
        Path(arguments[arguments.index("--output") + 1]).write_bytes(bytes([255, 0]))
    print("careful", file=sys.stderr)
    return 0
"""


def checkout(folder: Path, command: str) -> Path:
    (folder / "bpipe").mkdir(parents=True)
    (folder / "bpipe" / "__init__.py").touch()
    (folder / "bpipe" / "cli.py").write_text(command)
    return folder


def compare(scripts: Path, tmp_path: Path, after: str, before: str = PLAIN) -> subprocess.CompletedProcess[str]:
    sides = [str(checkout(tmp_path / name, command)) for name, command in (("old", before), ("new", after))]
    script = str(scripts / "validation" / "golden.py")
    command = [sys.executable, script, *sides, "--only", "schedule", "--limit", "3"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_equal_sides_are_equal_wherever_they_lie(scripts: Path, tmp_path: Path) -> None:
    ended = compare(scripts, tmp_path, PLAIN)
    assert (ended.returncode, ended.stderr) == (0, "")
    name, configurations, _, equal, different = ended.stdout.splitlines()[-1].split()
    assert (name, configurations, equal, different) == ("all", "3", "3", "0")
    assert "DIFFERENT" not in ended.stdout


@pytest.mark.parametrize(
    ("old", "new", "shown"),
    [
        (
            '"made"',
            '"built"',
            ["grid stdout:", "-    1 'made 11 at CHECKOUT in WORK", "+    1 'built 11 at CHECKOUT in WORK"],
        ),
        ('"careful"', '"beware"', ["grid stderr:", "-    1 'careful", "+    1 'beware"]),
        (
            '    print("careful"',
            '    print("new")\n    print("careful"',
            ["+    2 'new\\n'", "0 lines before, 1 after"],
        ),
        ("return 0", "return 2", ["grid status:", "-    1 '0'", "+    1 '2'"]),
        ("return 0", "raise TypeError('x')", ["-    1 '0'", "+    1 'raised TypeError: x'"]),
        ("[255, 0]", "[255, 1]", ["out/schedule.csv:", "2 bytes before, 2 after, no text"]),
        (
            "+ 1]).write",
            "+ 1] + '.gz').write",
            ["out/schedule.csv:", "only before", "out/schedule.csv.gz:", "only after"],
        ),
    ],
)
def test_every_difference_is_shown_and_counted(
    scripts: Path, tmp_path: Path, old: str, new: str, shown: list[str]
) -> None:
    ended = compare(scripts, tmp_path, PLAIN.replace(old, new))
    assert (ended.returncode, ended.stderr) == (1, "")
    assert "DIFFERENT schedule: bpipe schedule --schedule 1f1b" in ended.stdout
    for text in shown:
        assert text in ended.stdout
    assert int(ended.stdout.split()[-1]) >= 1


def test_a_side_that_cannot_run_is_no_equal_side(scripts: Path, tmp_path: Path) -> None:
    broken = "import bpipe.nothing\n"
    ended = compare(scripts, tmp_path, broken, broken)
    assert ended.returncode == 1
    assert "the side before ended with status 1" in ended.stderr
    assert "No module named 'bpipe.nothing'" in ended.stderr


def test_a_folder_without_the_code_is_refused(scripts: Path, tmp_path: Path) -> None:
    script = str(scripts / "validation" / "golden.py")
    ended = subprocess.run(
        [sys.executable, script, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert "is no checkout" in ended.stderr
