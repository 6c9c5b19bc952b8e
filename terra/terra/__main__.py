"""`python -m terra audit SCRIPT [ARGUMENTS...]`: status 0 if nothing was found, 1 if something was, 2 without a result."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from terra.audit.report import document, text
from terra.audit.run import STEPS, WARM_UP, audit_script


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m terra", description="Inspect the operations that a PyTorch program issues, step by step."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    audit = commands.add_parser(
        "audit",
        help="list what a CUDA graph would freeze, lose or break on",
        description="Run a script until its first optimizer has stepped a few times, and list by source "
        "line what a CUDA graph or torch.compile would freeze, lose or break on. "
        "The script runs as usual; its arguments come last.",
    )
    steps = f"steps to compare (default {STEPS})"
    audit.add_argument("--steps", type=int, default=STEPS, metavar="N", help=steps)
    warm_up = f"steps before them, at least 1 (default {WARM_UP})"
    audit.add_argument("--warm-up", type=int, default=WARM_UP, metavar="N", help=warm_up)
    json_help = "write the findings to this file as JSON ('-': to standard output, instead of the text)"
    audit.add_argument("--json", metavar="FILE", help=json_help)
    audit.add_argument("script", type=Path)
    audit.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    if options.steps < 2 or options.warm_up < 1:
        parser.error(f"--steps {options.steps} --warm-up {options.warm_up}: give at least 2 steps, after at least 1")
    if not options.script.is_file():
        parser.error(f"{options.script} is not a file")
    try:
        result = audit_script(options.script, options.arguments, options.steps, options.warm_up)
    except ValueError as error:
        print(f"terra: {error}", file=sys.stderr)
        return 2
    if options.json == "-":
        print(json.dumps(document(result), indent=1))
    else:
        print(text(result), end="")
        if options.json is not None:
            Path(options.json).write_text(json.dumps(document(result), indent=1) + "\n", encoding="utf-8")
    return 1 if result.findings else 0


if __name__ == "__main__":
    sys.exit(main())
