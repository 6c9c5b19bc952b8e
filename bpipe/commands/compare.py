"""`bpipe compare`: two runs of one training.

In: their reports or logs. Out: a table; status 0 equal, 1 different, 2 not comparable.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from bpipe.commands.shared import print_json
from bpipe.config.flags import outputs
from bpipe.config.flags.flag import Command, Group, Options, Task
from bpipe.config.flags.schedules import PIPELINE
from bpipe.config.flags.values import whole

COMMAND = Command(
    (
        Group(
            "",
            (
                outputs.ONE_RUN,
                outputs.OTHER_RUN,
                outputs.TOLERANCE,
                outputs.COMMON,
                outputs.BALANCING,
                replace(PIPELINE, help="require that this many pipeline ranks reported"),
                outputs.ITERATIONS,
                outputs.rows(5, whole),
                outputs.FORMAT,
                outputs.OUTPUT,
            ),
        ),
    ),
    (
        Task(
            "compare two runs to the last bit",
            "bpipe compare runs/stock runs/balanced",
            ("a", "b", "tolerance", "common"),
        ),
        Task(
            "compare a balanced run with an unbalanced one",
            "bpipe compare runs/stock runs/balanced --balancing --pp 8",
            ("balancing", "pipeline", "iterations"),
        ),
        Task(
            "print or write the result as JSON",
            "bpipe compare runs/stock runs/balanced --format json",
            ("format", "output"),
        ),
    ),
)


def run(options: Options) -> int:
    from bpipe.record.compare.judge import compare
    from bpipe.record.compare.read import read_training
    from bpipe.record.compare.show import document, text

    balanced = (False, True) if options.balancing else (None, None)
    one, other = (
        read_training(Path(path), options.pipeline, options.iterations, is_balanced)
        for path, is_balanced in zip((options.a, options.b), balanced, strict=True)
    )
    found = compare(one, other, options.tolerance, options.common)
    if options.format == "json":
        print_json(document(found))
    else:
        print(text(found, options.rows), end="")
    if options.output is not None:
        _write(Path(options.output), document(found))
    return 0 if found.equal else 1


def _write(path: Path, content: dict[str, Any]) -> None:
    """Whole or not at all: whoever reads it may come at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    unfinished.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    unfinished.replace(path)
