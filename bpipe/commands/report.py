"""`bpipe report`: a recorded run beside its prediction.

In: its folder. Out: a table or JSON; on request a page and a trace.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from bpipe.commands.flags import print_json

if TYPE_CHECKING:
    from bpipe.record.format import Held


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", metavar="DIR", help="what the run was given as --bpipe-report")
    add(
        "--iteration",
        type=int,
        metavar="N",
        help="only this one (default: all that are recorded, times being their median)",
    )
    add("--format", choices=("table", "json"), default="table")
    add("--html", metavar="FILE", help="write a page to look at: timeline, memory and differences in one file")
    add("--trace", metavar="FILE", help="write the measured iterations as Chrome trace JSON, for ui.perfetto.dev")


def run(options: argparse.Namespace) -> None:
    from bpipe.record.read import has_iterations, read_held
    from bpipe.report.report import report_of

    held = read_held(options.folder)
    if held is not None and not has_iterations(options.folder):
        _shortage(options, held)
        return
    report = report_of(options.folder, options.iteration)
    if options.html is not None:
        from bpipe.report.out.page import render
        from bpipe.report.out.view import view

        # Encoded before anything is written: what cannot be would leave an empty page.
        Path(options.html).write_bytes(render(view(report)).encode("utf-8", "backslashreplace"))
    if options.trace is not None:
        from bpipe.report.out.trace import write_trace

        Path(options.trace).write_text(write_trace(report.comparison.measured), encoding="utf-8")
    if options.format == "json":
        from bpipe.report.out.document import document

        print_json(document(report))
    else:
        from bpipe.report.out.table import table

        print(table(report), end="")
        if held is not None and held.failure is not None:
            from bpipe.report.out.shortage_text import text

            print(f"\n{text(held)}", end="")


def _shortage(options: argparse.Namespace, held: Held) -> None:
    """Of a run that ended before it recorded an iteration: what was held, and what would have fitted."""
    from bpipe.report.out.shortage_text import document, text

    for flag in ("html", "trace", "iteration"):
        if getattr(options, flag) is not None:
            raise ValueError(
                f"--{flag}: {options.folder} has no recorded iteration; the table and --format json say what was held"
            )
    if options.format == "json":
        print_json(document(held))
    else:
        print(text(held), end="")
