"""Print the results of examples/smoke_8gpu.sh as one table, with a row per run. The exit status is 0 if all are identical.

Usage: smoke_table.py FOLDER

verdicts.tsv has a line per run (layout, run, verdict). If a run was compared, its folder also has its record and the
JSON of `bpipe compare`, with the transport, what its fullest stage held, and its losses.
"""

import json
import sys
from pathlib import Path
from typing import Any

MIB = 2**20
IDENTICAL = "identical"
HEAD = tuple("layout|run|carried by|fullest stage, MiB: stock|with --bpipe|loss, first to last|beside stock".split("|"))


def rows(folder: Path) -> list[tuple[str, ...]]:
    """Return the cells of every run. Raises OSError or ValueError if the folder is not what the script leaves."""
    lines = (line.split("\t") for line in (folder / "verdicts.tsv").read_text().splitlines())
    return [(layout, run, *_measured(folder / layout / run), verdict) for layout, run, verdict in lines]


def _measured(folder: Path) -> tuple[str, str, str, str]:
    try:
        summary, run = (json.loads((folder / name).read_text()) for name in ("summary.json", "run.json"))
    except FileNotFoundError:
        return ("-",) * 4
    carried = sorted({link["transport"] for link in run["links"]})
    # A loss that is not finite is text there.
    loss = f"{float(summary['a']['first_loss']):.4f} to {float(summary['a']['last_loss']):.4f}"
    return ", ".join(carried), _fullest(summary["a"]), _fullest(summary["b"]), loss


def _fullest(run: dict[str, Any]) -> str:
    return f"{max(stage['peak_bytes'] for stage in run['stages']) / MIB:.2f}"


def table(cells: list[tuple[str, ...]]) -> str:
    lines = [HEAD, *cells]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: smoke_table.py FOLDER", file=sys.stderr)
        return 2
    try:
        runs = rows(Path(sys.argv[1]))
    except (OSError, ValueError, KeyError) as error:
        print(f"smoke_table.py: {sys.argv[1]}: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(table(runs))
    wrong = [cells for cells in runs if cells[-1] != IDENTICAL]
    if wrong or not runs:
        named = ", ".join(f"{layout} {run}" for layout, run, *_ in wrong) or "no run at all"
        print(f"NOT as stock Megatron: {named}")
        return 1
    print(f"all {len(runs)} runs train as stock Megatron does, to the last bit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
