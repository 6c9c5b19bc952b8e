#!/usr/bin/env python3
"""Hold the size of the project: lines of Python of each room, and words of the documentation.

Compares what is there with scripts/size.txt. Exit status 1 if a sum has grown. `--write REASON` writes the table anew;
commit it with what made it grow.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "scripts" / "size.txt"
# By sum, the folders and files of Python whose lines it counts.
SUMS = {
    "product": ("bpipe", "megatron", "scripts", "examples", "pretrain_gpt.py", "setup.py"),
    "terra": ("terra/terra", "terra/bench"),
    "tests": ("tests",),
    "terra-tests": ("terra/tests",),
}
WORDS = "words"
PAGES = ("README.md", "CONTRIBUTING.md", "docs", "examples", "terra/README.md")


def measure() -> dict[str, int]:
    """Return lines of Python by room and by sum, and the words of the documentation."""
    sizes: Counter[str] = Counter()
    for name, tops in SUMS.items():
        for path in (path for top in tops for path in _files(top, ".py")):
            num_lines = len(path.read_text().splitlines())
            sizes[name] += num_lines
            folders = path.relative_to(ROOT).parts[:-1]
            if folders:
                sizes["/".join([*folders, "*"][:2])] += num_lines
    sizes[WORDS] = sum(len(path.read_text().split()) for top in PAGES for path in _files(top, ".md"))
    return dict(sorted(sizes.items()))


def _files(top: str, suffix: str) -> Iterator[Path]:
    path = ROOT / top
    yield from [path] if path.suffix == suffix else path.rglob(f"*{suffix}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", metavar="REASON", help="write the table, with the reason why a sum has grown")
    reason = parser.parse_args().write
    sizes = measure()
    if reason is not None:
        TABLE.write_text(f"# {reason}\n" + "".join(f"{size:7} {room}\n" for room, size in sizes.items()))
        return 0
    rows = (line.split() for line in TABLE.read_text().splitlines() if not line.startswith("#"))
    allowed = {room: int(size) for size, room in rows}
    grown = {name: size for name, size in sizes.items() if size > allowed.get(name, 0)}
    sums = grown.keys() & {*SUMS, WORDS}
    for name, size in grown.items():
        print(f"size: {name} has {size}, {size - allowed.get(name, 0)} more than scripts/size.txt allows")
    if sums:
        print("size: make it smaller, or run scripts/size.py --write REASON and commit the table with the change")
    return 1 if sums else 0


if __name__ == "__main__":
    sys.exit(main())
