"""End a program that cannot start: one error, from rank 0, and the same status, that of argparse, from all ranks.

There are no process groups yet to ask.
"""

import argparse
import difflib
import os
import re
import socket
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

STATUS = 2


def end(reason: object) -> NoReturn:
    """End the run for a reason that is the same on every rank."""
    if _rank() == 0:
        print(f"bpipe: error: {reason}", file=sys.stderr, flush=True)
    sys.exit(STATUS)


def refuse_once(parser: argparse.ArgumentParser) -> None:
    """Let a parser print errors on rank 0 only, with the nearest flags to mistyped ones."""

    def error(message: str) -> NoReturn:
        if _rank() == 0:
            known = [flag for action in parser._actions for flag in action.option_strings]
            unknown = re.findall(r"(?<!\S)--?[^\s=]+", message) if message.startswith("unrecognized arguments:") else []
            for flag in unknown:
                for near in difflib.get_close_matches(flag, known, n=1):
                    message += f"\n  instead of {flag}, did you mean {near}?"
            parser.print_usage(sys.stderr)
            print(f"\n{parser.prog}: error: {message}", file=sys.stderr, flush=True)
        sys.exit(STATUS)

    parser.error = error  # type: ignore[method-assign]


def need_folder(folder: str) -> None:
    """Make the folder of a report, or end the program if nothing can be written into it.

    Nodes may have different file systems, so the first process of each node prints the error.
    """
    try:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        first_node = os.environ.get("GROUP_RANK", os.environ.get("SLURM_NODEID", "0")) == "0"
        if _rank() == 0 or (not first_node and os.environ.get("LOCAL_RANK") == "0"):
            where = "" if first_node else f" on {socket.gethostname()}"
            print(
                f"bpipe: error: --bpipe-report {folder}: {error.strerror or error}{where}", file=sys.stderr, flush=True
            )
        sys.exit(STATUS)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
