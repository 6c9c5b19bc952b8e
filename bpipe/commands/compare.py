"""`bpipe compare`: two runs of one training.

In: their reports or logs. Out: a table; status 0 equal, 1 different, 2 not comparable.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

from bpipe.commands.flags import print_json
from bpipe.flag_types import positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("a", metavar="A", help="the --bpipe-report folder of one run, the iterations.jsonl in it, or its log")
    add("b", metavar="B", help="the same of the other run")
    add(
        "--tolerance",
        type=_part,
        default=0.0,
        metavar="R",
        help="how far two numbers may be apart, as a part of the larger (default: 0)",
    )
    add("--common", action="store_true", help="compare the iterations that both runs have, as after a restart")
    add("--balancing", action="store_true", help="A must have run without balancing, and B with it")
    add("--stages", type=positive, metavar="P", help="pipeline stages that must have reported")
    add("--iterations", type=positive, metavar="N", help="iterations that must be there, from 1 to N and no others")
    add("--rows", type=_count, default=5, metavar="N", help="how many iterations to show (default 5)")
    add(
        "--json",
        metavar="FILE",
        help="write there what was found, as JSON ('-': to standard output, in place of the text)",
    )


def run(options: argparse.Namespace) -> int:
    from bpipe.compare.judge import compare
    from bpipe.compare.read import read_training
    from bpipe.compare.show import document, text

    balanced = (False, True) if options.balancing else (None, None)
    one, other = (
        read_training(Path(path), options.stages, options.iterations, is_balanced)
        for path, is_balanced in zip((options.a, options.b), balanced, strict=True)
    )
    found = compare(one, other, options.tolerance, options.common)
    if options.json == "-":
        print_json(document(found))
    else:
        print(text(found, options.rows), end="")
        if options.json is not None:
            _write(Path(options.json), document(found))
    return 0 if found.equal else 1


def _write(path: Path, content: dict[str, Any]) -> None:
    """Whole or not at all: whoever reads it may come at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    unfinished.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    unfinished.replace(path)


def _part(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} must be a number from 0 to below 1, such as 1e-6")
    return number


def _count(text: str) -> int:
    return 0 if text == "0" else positive(text)
