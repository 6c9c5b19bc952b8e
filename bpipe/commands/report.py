"""`bpipe report`: a recorded run beside its prediction. In: its folder. Out: a table or JSON; on request a page and a trace."""

from __future__ import annotations

import argparse
from pathlib import Path

from bpipe.commands.flags import print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", metavar="DIR", help="what the run was given as --bpipe-report")
    add("--iteration", type=int, metavar="N", help="only this one (default: all that are recorded, times being their median)")
    add("--format", choices=("table", "json"), default="table")
    add("--html", metavar="FILE", help="write a page to look at: timeline, memory and differences in one file")
    add("--trace", metavar="FILE", help="write the measured iterations as Chrome trace JSON, for ui.perfetto.dev")


def run(options: argparse.Namespace) -> None:
    from bpipe.report.report import report_of

    report = report_of(options.folder, options.iteration)
    if options.html is not None:
        from bpipe.report.page import render
        from bpipe.report.view import view

        Path(options.html).write_text(render(view(report)), encoding="utf-8")
    if options.trace is not None:
        from bpipe.report.trace import write_trace

        Path(options.trace).write_text(write_trace(report.comparison.measured), encoding="utf-8")
    if options.format == "json":
        from bpipe.report.document import document

        print_json(document(report))
    else:
        from bpipe.report.table import table

        print(table(report), end="")
