"""Write a report for the terminal, as text of at most 120 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from bpipe.record.report.compare import StageRow
from bpipe.record.report.output.facts import facts
from bpipe.record.report.report import Report
from bpipe.record.report.units import bytes_text, percent_text, size_unit

WIDTH = 120

_LEGEND = (
    "bound: the most that a stage may hold; exposed: time in which computation waited for transfers; moved: share of what "
    "a forward keeps that an eviction moves"
)

_Cell = Callable[[StageRow], str]


def table(report: Report) -> str:
    comparison = report.comparison
    lines = wrapped("; ".join(f"{label} {value}" for label, value in facts(comparison)), "")
    lines += ["", *_stages(comparison.stages, report.num_pipelines), *wrapped(_LEGEND, "")]
    lines += ["", "largest differences between measurement and prediction:"]
    for number, difference in enumerate(report.differences, 1):
        numbers = f"measured {difference.measured_text}, predicted {difference.predicted_text}"
        lines += wrapped(f"{number}. {difference.what}: {'; '.join([numbers, *difference.beside])}", "   ")
    if not report.differences:
        lines.append("   none of more than half a percent")
    lines.append("")
    for answer in report.answers:
        lines += wrapped(answer, "")
    for note in comparison.measured.notes:
        lines += wrapped(f"note: {note}", "  ")
    return "\n".join(lines) + "\n"


def _stages(rows: Sequence[StageRow], num_pipelines: int) -> list[str]:
    """Return two lines of titles and one per stage, with predictions in brackets after the measured values."""
    sizes = ((row.measured_bytes, row.predicted_bytes, row.bound_bytes, row.without_balancing_bytes) for row in rows)
    unit, name = size_unit(size or 0 for of_row in sizes for size in of_row)

    def size(value: int | None) -> str:
        return "-" if value is None else f"{value / unit:.2f}"

    def peak(row: StageRow) -> str:
        return f"{size(row.measured_bytes)} ({size(row.predicted_bytes)})"

    def exposed(row: StageRow) -> str:
        return f"{_milliseconds(row.exposed_s)} ({_milliseconds(row.predicted_exposed_s)})"

    columns: list[tuple[str, str, _Cell]] = [
        ("", "stage", lambda row: str(row.stage)),
        ("", "rank", lambda row: _or(row.rank)),
        ("held", "micro-b.", lambda row: f"{_or(row.measured_microbatches)} ({row.predicted_microbatches})"),
        (f"activations, {name}", "peak (predicted)", peak),
    ]
    if num_pipelines > 1:
        columns.append(("all", "pipelines", lambda row: size(row.all_measured_bytes)))
    columns += [
        ("", "bound", lambda row: size(row.bound_bytes)),
        ("without", "balancing", lambda row: size(row.without_balancing_bytes)),
        ("weights,", "optimizer", lambda row: "-" if row.weights_bytes is None else bytes_text(row.weights_bytes)),
        ("bubble, %", "(pred.)", lambda row: f"{_percent(row.bubble)} ({_percent(row.predicted_bubble)})"),
        ("exposed, ms", "(pred.)", exposed),
        ("", "moved", lambda row: "-" if row.moved_fraction is None else f"{row.moved_fraction:.2f}"),
        ("evict", "/load", lambda row: f"{_or(row.evictions)}/{_or(row.loads)}"),
        ("", "GB/s", lambda row: "-" if row.bytes_per_s is None else f"{row.bytes_per_s / 1e9:.2f}"),
    ]
    titles = [[top for top, _, _ in columns], [title for _, title, _ in columns]]
    return aligned([*titles, *([cell(row) for _, _, cell in columns] for row in rows)])


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Align every column to the right, as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [" ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _or(value: int | None) -> str:
    return "-" if value is None else str(value)


def _percent(share: float | None) -> str:
    return "-" if share is None else percent_text(share).removesuffix(" %")


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"


def wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
