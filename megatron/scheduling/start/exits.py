"""End a program that cannot start: one error, from one rank, and the same status from all.

In: the reason, or the parser that refuses. Out: SystemExit with the status that argparse has for what the user did.
What all ranks see alike only rank 0 says; the others leave without a word. There are no process groups yet to ask.
Knows no flag and no Megatron.
"""

from __future__ import annotations

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
    """End the run for a reason that every rank sees alike."""
    if _rank() == 0:
        print(f"bpipe: error: {reason}", file=sys.stderr, flush=True)
    sys.exit(STATUS)


def refuse_once(parser: argparse.ArgumentParser) -> None:
    """Let this parser refuse with one usage and one error in the whole world, and the flag that a mistyped one is
    nearest to."""

    def error(message: str) -> NoReturn:
        if _rank() == 0:
            parser.print_usage(sys.stderr)
            print(f"\n{parser.prog}: error: {message}{_nearest(parser, message)}", file=sys.stderr, flush=True)
        sys.exit(STATUS)

    parser.error = error  # type: ignore[method-assign]


def _nearest(parser: argparse.ArgumentParser, message: str) -> str:
    if not message.startswith("unrecognized arguments:"):
        return ""
    known = [flag for action in parser._actions for flag in action.option_strings]
    found = []
    for flag in re.findall(r"(?<!\S)--?[^\s=]+", message):
        found += [f"instead of {flag}, did you mean {near}?" for near in difflib.get_close_matches(flag, known, n=1)]
    return "".join(f"\n  {line}" for line in found)


def need_folder(folder: str) -> None:
    """End the program where nothing can be written into the folder of a report, which is made where it is not there.

    Every node may see another file system: the first node's first process speaks for it, as does every other node's for
    its own.
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
