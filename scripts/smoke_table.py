"""Print the results of examples/smoke_8gpu.sh as one table, with a row per run. The exit status is 0 if all are identical.

Usage: smoke_table.py FOLDER

verdicts.tsv has a line per run (layout, run, verdict). The records of runs that ended well have the transport, what
each stage held, and the losses.
"""

import json
import sys
from pathlib import Path

MIB = 2**20
IDENTICAL = "identical"
HEAD = tuple("layout|run|carried by|fullest stage, MiB: stock|with --bpipe|loss, first to last|beside stock".split("|"))


def rows(folder: Path) -> list[tuple[str, ...]]:
    """Return the cells of every run. Raises OSError or ValueError if the folder is not what the script leaves."""
    lines = (line.split("\t") for line in (folder / "verdicts.tsv").read_text().splitlines())
    return [(layout, run, *_measured(folder / layout / run), verdict) for layout, run, verdict in lines]


def _measured(folder: Path) -> tuple[str, str, str, str]:
    """Return the transport, what the fullest stage held in the stock run and in this one, and the losses."""
    stock = folder.with_name("stock")
    try:
        run = json.loads((folder / "run.json").read_text())
        steps = list(map(json.loads, (folder / "iterations.jsonl").read_text().splitlines()))
        peaks = [[json.loads(file.read_text()) for file in path.glob("rank_*.json")] for path in (stock, folder)]
    except FileNotFoundError:
        return ("-",) * 4
    if not all(peaks) or not steps:
        return ("-",) * 4
    carried = ", ".join(sorted({link["transport"] for link in run["links"]}))
    stock_held, held = (f"{max(rank['peak_bytes'] for rank in ranks) / MIB:.2f}" for ranks in peaks)
    first, last = (float.fromhex(steps[place]["lm loss"]) for place in (0, -1))
    return carried, stock_held, held, f"{first:.4f} to {last:.4f}"


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
