"""`bpipe compare`: compare two runs of one training. The exit status is 0 if they are equal, 1 if not, 2 for errors."""

import json
import os
from dataclasses import replace
from pathlib import Path

from bpipe.commands.terminal import print_json
from bpipe.config.flags import outputs
from bpipe.config.flags.flag import Options, Task, command, group
from bpipe.config.flags.schedules import PIPELINE
from bpipe.config.flags.values import counted

COMMAND = command(
    group(
        "",
        outputs.ONE_RUN,
        outputs.OTHER_RUN,
        outputs.TOLERANCE,
        outputs.COMMON,
        outputs.BALANCING,
        replace(PIPELINE, help="require that this many pipeline ranks reported"),
        outputs.ITERATIONS,
        outputs.rows(5, counted),
        outputs.FORMAT,
        outputs.OUTPUT,
    ),
    Task("compare two runs to the last bit", "bpipe compare runs/stock runs/balanced", "a b tolerance common"),
    Task(
        "compare a balanced run with an unbalanced one",
        "bpipe compare runs/stock runs/balanced --balancing --pp 8",
        "balancing pipeline iterations",
    ),
    Task("print or write the result as JSON", "bpipe compare runs/stock runs/balanced --format json", "format output"),
)


def run(options: Options) -> int:
    from bpipe.record.compare import compare, document, read_training, text

    balanced = (False, True) if options.balancing else (None, None)
    first, second = (
        read_training(Path(path), options.pipeline, options.iterations, is_balanced)
        for path, is_balanced in zip((options.a, options.b), balanced, strict=True)
    )
    comparison = compare(first, second, options.tolerance, options.common)
    if options.format == "json":
        print_json(document(comparison))
    else:
        print(text(comparison, options.rows), end="")
    if options.output is not None:
        path = Path(options.output)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Renamed when complete: another process may read it at any time.
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
        unfinished.write_text(json.dumps(document(comparison), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        unfinished.replace(path)
    return 0 if comparison.equal else 1
