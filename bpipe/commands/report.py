"""`bpipe report`: a recorded run and its prediction, on request with a page and a trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bpipe.commands.terminal import print_json
from bpipe.config.flags import outputs
from bpipe.config.flags.flag import Options, Task, command, group

if TYPE_CHECKING:
    from bpipe.record.format import Held


COMMAND = command(
    group("", outputs.FOLDER, outputs.BASELINE, outputs.FORMAT, outputs.HTML, outputs.TRACE),
    Task("show what a run held and where it waited", "bpipe report runs/first", "folder format"),
    Task("write a page and a timeline", "bpipe report runs/first --html report.html --trace trace.json", "html trace"),
    Task(
        "set a balanced run next to the same training without balancing",
        "bpipe report runs/balanced --baseline runs/stock --html report.html",
        "baseline",
    ),
)


def run(options: Options) -> None:
    from bpipe.record.read import has_iterations, read_held
    from bpipe.record.report.report import report_of

    held = read_held(options.folder)
    if held is not None and not has_iterations(options.folder):
        _shortage(options, held)
        return
    report = report_of(options.folder, options.baseline)
    if options.html is not None:
        from bpipe.record.report.output.page import render, view

        # Encode before the file is opened: an error here must not leave an empty page.
        Path(options.html).write_bytes(render(view(report)).encode("utf-8", "backslashreplace"))
    if options.trace is not None:
        from bpipe.record.report.output.trace import write_trace

        Path(options.trace).write_text(write_trace(report.measured), encoding="utf-8")
    if options.format == "json":
        from bpipe.record.report.output.table import document

        print_json(document(report))
    else:
        from bpipe.record.report.output.table import table

        print(table(report), end="")
        if held is not None and held.failure is not None:
            from bpipe.record.report.shortage import text

            print(f"\n{text(held)}", end="")


def _shortage(options: Options, held: Held) -> None:
    """Print what a run held that ended before it recorded an iteration, and what would have fitted."""
    from bpipe.record.report.shortage import text

    given = [f"--{flag}" for flag in ("baseline", "html", "trace") if getattr(options, flag) is not None]
    given += ["--format json"] * (options.format == "json")
    if given:
        raise ValueError(f"{given[0]}: {options.folder} has no recorded iteration; only a table shows what was held")
    print(text(held), end="")
