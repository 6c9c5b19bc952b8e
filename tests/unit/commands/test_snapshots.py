"""What commands print, compared with what they printed before: every `$ bpipe ...` line of tests/data/snapshots.

Each line is followed by its standard output, its standard error with a `!` before each line, the exit status if it is
not 0, and the files that it wrote to out/. Long outputs are cut, with a digest of the whole. To add a case, add a `$`
line; `pytest tests/unit/commands/test_snapshots.py --renew-snapshots` writes all outputs again. Commit the difference.
"""

import hashlib
import io
import math
import shlex
import shutil
from pathlib import Path

import pytest

from bpipe.commands import terminal
from tests.support.readers.outcome import run_command
from tests.unit.record.report.recorded import write_run

DATA = Path(__file__).resolve().parents[2] / "data"
SNAPSHOTS = DATA / "snapshots"
MOST_LINES, MOST_COLUMNS = 60, 600
SHOWN_LINES, SHOWN_COLUMNS = 12, 200
SMALL = {"num_stages": 4, "num_microbatches": 4, "iterations": (5, 6)}
RUNS = {
    "small": {**SMALL, "flops": 1e9, "peak_flops": 1e13, "limit_bytes": 2 * 10**9},
    "unbalanced": {**SMALL, "balance": "none"},
    "slow": {"slow": {(6, "2F3"): 0.1}, "probe": 4e9, "speed": 0.4e9, "extra_bytes": {5: 30_000_000}},
    "chunks": {**SMALL, "schedule": "interleaved-1f1b", "num_chunks": 2, "num_microbatches": 8},
    "torn": SMALL,
}


def _cases(file: Path) -> dict[str, str]:
    """Return what follows each line."""
    blocks = file.read_text().split("$ bpipe")[1:]
    return {block.partition("\n")[0].strip(): block.partition("\n")[2] for block in blocks}


CASES = [(file.name, line) for file in sorted(SNAPSHOTS.glob("*.txt")) for line in _cases(file)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("snapshots") / "in"
    shutil.copytree(SNAPSHOTS / "in", folder)
    shutil.copytree(DATA / "recorded_run", folder / "recorded_run")
    for name, changes in RUNS.items():
        write_run(folder / "runs" / name, **changes)
    torn = folder / "runs" / "torn" / "record_00002.jsonl"
    torn.write_text(torn.read_text()[:500])
    return folder


def _shortened(text: str) -> str:
    lines = text.splitlines()
    if len(lines) <= MOST_LINES and max(map(len, lines), default=0) <= MOST_COLUMNS:
        return text if text.endswith("\n") or not text else f"{text}\n[no newline at the end]\n"
    shown = "".join(f"{line[:SHOWN_COLUMNS]}\n" for line in lines[:SHOWN_LINES])
    return f"{shown}[{len(lines)} lines in all, {_digest(text.encode())}]\n"


def _digest(data: bytes) -> str:
    return f"{len(data)} bytes, sha256 {hashlib.sha256(data).hexdigest()[:16]}"


def _printed(line: str) -> str:
    command, _, source = line.partition(" < ")
    with pytest.MonkeyPatch.context() as patch:
        if source:
            patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(Path(source).read_bytes()), "utf-8"))
        status, out, err = run_command(shlex.split(command))
    text = _shortened(out) + "".join(f"! {row}\n" for row in err.splitlines())
    text += f"[status {status}]\n" if status else ""
    written = (path for path in sorted(Path("out").rglob("*")) if path.is_file())
    return text + "".join(f"[wrote {path}: {_digest(path.read_bytes())}]\n" for path in written)


@pytest.mark.parametrize(("name", "line"), CASES, ids=[f"bpipe {line}" for _, line in CASES])
def test_the_command_prints_what_it_printed(
    name: str, line: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "in").symlink_to(inputs)
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    # How often progress is printed depends on the machine.
    monkeypatch.setattr(terminal, "_LINE_EVERY_S", math.inf)
    printed = _printed(line)
    if request.config.getoption("--renew-snapshots"):
        cases = {**_cases(SNAPSHOTS / name), line: printed}
        (SNAPSHOTS / name).write_text("".join(f"$ bpipe {command}\n{text}" for command, text in cases.items()))
    assert printed == _cases(SNAPSHOTS / name)[line]


def test_the_snapshots_stay_small() -> None:
    assert sum(path.stat().st_size for path in SNAPSHOTS.rglob("*") if path.is_file()) < 300_000
