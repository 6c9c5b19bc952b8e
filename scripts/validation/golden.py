#!/usr/bin/env python
"""Prove that a change of the code changes nothing that is printed.

In: two checkouts. Out: every difference, a table; status 1 if any.

Usage: scripts/validation/golden.py BEFORE [AFTER] [--only schedule,report] [--limit N]

Hundreds of configurations of every command, refused ones among them, in every format: standard output, standard error,
exit status and written files, byte for byte. Each side runs in one process of its own, both at once, on the same files,
which BEFORE's code has written. Both sides are only asked for `bpipe.cli.main` and flags that BEFORE knows. Times
nothing: two sides may take different times and be equal.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from validation.golden_cases import Case, all_cases, spread

COMMANDS = ("usage", "schedule", "read", "simulate", "plan", "estimate", "report")
SIDES = ("before", "after")
HERE = Path(__file__).resolve().parent
# How many lines of a difference are shown, and how much of each.
MOST_LINES, MOST_COLUMNS = 3, 160

# By command and configuration: the digest of every output.
Found = dict[tuple[str, str], dict[str, str]]


def _environment(checkout: Path) -> dict[str, str]:
    """The same for both, save where the code lies. A terminal's width changes --help."""
    named = {
        name: value
        for name, value in os.environ.items()
        if name in ("PATH", "HOME", "LD_LIBRARY_PATH", "TMPDIR", "MPLCONFIGDIR")
    }
    fixed = {
        "COLUMNS": "80",
        "LC_ALL": "C.UTF-8",
        "MPLBACKEND": "Agg",
        "NO_COLOR": "1",
        "PYTHONHASHSEED": "0",
        "TZ": "UTC",
    }
    # Nothing is written into a checkout.
    return {**named, **fixed, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}


def _start(program: str, folder: Path, checkout: Path, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE / program), *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=folder, env=_environment(checkout), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def _finish(what: str, process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate()
    if process.returncode:
        sys.exit(f"golden: {what} ended with status {process.returncode}:\n{errors[-3000:]}")


def _prepare(folder: Path, before: Path, commands: Sequence[str]) -> Path:
    """Return the files that both sides read."""
    folder.mkdir()
    wanted = [flag for command, flag in (("read", "--schedules"), ("report", "--runs")) if command in commands]
    _finish("writing the files that are read", _start("golden_inputs.py", folder, before, before, *wanted))
    return folder / "in"


def _run(place: Path, checkouts: Sequence[Path], files: Path, cases: Sequence[Case]) -> list[Found]:
    """Run both sides at once, each in a folder of its own with one name: what it prints may tell it."""
    (place / "cases.json").write_text(json.dumps(cases))
    started = []
    for side, checkout in zip(SIDES, checkouts, strict=True):
        work = place / side / "work"
        shutil.copytree(files, work / "in")
        results = place / side / "results.jsonl"
        started.append(
            (side, results, _start("golden_side.py", work, checkout, checkout, place / "cases.json", results))
        )
    for side, _, process in started:
        _finish(f"the side {side}", process)
    return [_found(results) for _, results, _ in started]


def _found(results: Path) -> Found:
    found: Found = {}
    with results.open() as lines:
        for line in lines:
            command, name, output, digest = json.loads(line)
            found.setdefault((command, name), {})[output] = digest
    return found


def _difference(first: bytes | None, second: bytes | None) -> Iterable[str]:
    """Return the first lines that differ, around the place where they do."""
    if first is None or second is None:
        yield f"only {SIDES[first is None]}"
        return
    try:
        texts = [content.decode().splitlines(keepends=True) for content in (first, second)]
    except UnicodeDecodeError:
        yield f"{len(first)} bytes before, {len(second)} after, no text"
        return
    start = _alike(*texts)
    end = min(_alike(*(text[::-1] for text in texts)), min(map(len, texts)) - start)
    olds, news = (text[start : len(text) - end] for text in texts)
    if len(olds) != len(news):
        # Lines came or went, and nothing says which belong together.
        yield from (f"-{number:5} {line[:MOST_COLUMNS]!r}" for number, line in enumerate(olds[:MOST_LINES], start + 1))
        yield from (f"+{number:5} {line[:MOST_COLUMNS]!r}" for number, line in enumerate(news[:MOST_LINES], start + 1))
        yield f"{len(olds)} lines before, {len(news)} after"
        return
    pairs = [
        (number, pair) for number, pair in enumerate(zip(olds, news, strict=True), start + 1) if pair[0] != pair[1]
    ]
    for number, pair in pairs[:MOST_LINES]:
        column = max(0, _alike(*pair) - MOST_COLUMNS // 2)
        for mark, line in zip("-+", pair, strict=True):
            yield f"{mark}{number:5} {'...' if column else ''}{line[column : column + MOST_COLUMNS]!r}"
    if len(pairs) > MOST_LINES:
        yield f"{len(pairs)} lines differ"


def _alike(first: Sequence[str], second: Sequence[str]) -> int:
    """Return how many lines, or letters, are the same from the beginning on."""
    return next(
        (place for place, (old, new) in enumerate(zip(first, second, strict=False)) if old != new),
        min(len(first), len(second)),
    )


def _compare(place: Path, cases: Sequence[Case], sides: Sequence[Found]) -> Counter[str]:
    """Print every difference; count the configurations that differ by command."""
    different: Counter[str] = Counter()
    for command, name, _ in cases:
        before, after = (side[command, name] for side in sides)
        names = [output for output in {**before, **after} if before.get(output) != after.get(output)]
        different[command] += bool(names)
        if names:
            print(f"\nDIFFERENT {command}: bpipe {name}")
        for output in names:
            digests = before.get(output), after.get(output)
            contents = [
                None if digest is None else (place / side / "outputs" / digest).read_bytes()
                for side, digest in zip(SIDES, digests, strict=True)
            ]
            print(f"  {output}:")
            for line in _difference(*contents):
                print(f"    {line}")
    return different


def _table(cases: Sequence[Case], different: Counter[str], sides: Sequence[Found]) -> Iterable[str]:
    titles = ("command", "configurations", "outputs", "equal", "different")
    yield "  ".join(titles)
    counts = Counter(case.command for case in cases)
    outputs: Counter[str] = Counter()
    for (command, _), found in sides[0].items():
        outputs[command] += len(found)
    for name in (*(command for command in COMMANDS if counts[command]), "all"):
        total, made, wrong = (count.total() if name == "all" else count[name] for count in (counts, outputs, different))
        cells = (name.ljust(len(titles[0])), *map(str, (total, made, total - wrong, wrong)))
        yield "  ".join(cell.rjust(len(title)) for cell, title in zip(cells, titles, strict=True))


def _commands(text: str) -> list[str]:
    names = text.split(",")
    wrong = sorted(set(names) - set(COMMANDS))
    if wrong:
        raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: there are {', '.join(COMMANDS)}")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("before", type=Path, metavar="BEFORE", help="a checkout")
    parser.add_argument(
        "after", type=Path, metavar="AFTER", nargs="?", default=HERE.parents[1], help="another (default: this one)"
    )
    parser.add_argument(
        "--only", type=_commands, default=list(COMMANDS), metavar="NAME,...", help=f"of {', '.join(COMMANDS)}"
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="at most N configurations of each command, evenly over all"
    )
    options = parser.parse_args()
    checkouts = [options.before.resolve(), options.after.resolve()]
    for checkout in checkouts:
        if not (checkout / "bpipe").is_dir():
            parser.error(f"{checkout} is no checkout: it has no folder bpipe")
    with tempfile.TemporaryDirectory(prefix="golden_") as temporary:
        place = Path(temporary)
        files = _prepare(place / "inputs", checkouts[0], options.only)
        cases = spread((case for case in all_cases(files) if case.command in options.only), options.limit)
        sides = _run(place, checkouts, files, cases)
        different = _compare(place, cases, sides)
    print(*_table(cases, different, sides), sep="\n")
    return 1 if different.total() else 0


if __name__ == "__main__":
    sys.exit(main())
