"""Write a report as text of at most 120 columns, as JSON values, and what stands at the head of its page."""

import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from bpipe.record.format import write_program
from bpipe.record.report.findings import (
    answers,
    bytes_text,
    counted,
    differences,
    longest_wait,
    percent_text,
    rate_text,
    seconds_text,
    size_unit,
)
from bpipe.record.report.report import Report, StageRow
from bpipe.record.report.selection import Measured
from bpipe.schedule.layout import Vocabulary

WIDTH = 120
# Version of the JSON.
VERSION = 3
# The number of machines that are named.
MOST_HOSTS = 4

_LEGEND = (
    "bound: the most that a stage may hold; exposed: time in which computation waited for transfers; moved: share of what "
    "a forward keeps that an eviction moves"
)

_Cell = Callable[[StageRow], str]


class Figure(NamedTuple):
    """One of the figures at the head of a page, with the small text beneath it."""

    label: str
    value: str
    beside: str


def figures(report: Report) -> list[Figure]:
    """Return the exposed transfers, the time of an iteration and the bubble; peaks are in the answers."""
    totals = report.totals
    pipeline = f"{seconds_text(totals.predicted_pipeline_s)} predicted"
    if totals.step_s is not None:
        pipeline = f"pipeline {seconds_text(totals.pipeline_s)}, {pipeline}"
    return [
        _exposed(report),
        Figure("iteration", seconds_text(totals.step_s or totals.pipeline_s), pipeline),
        Figure("bubble", percent_text(totals.bubble), f"{percent_text(totals.predicted_bubble)} predicted"),
    ]


def _exposed(report: Report) -> Figure:
    longest, label = longest_wait(report), "exposed transfers"
    if longest is None:
        return Figure(label, "not known", "no rank recorded them")
    if not any(stage.evictions for stage in report.stages):
        return Figure(label, "none", "nothing is evicted")
    exposed_s, row = longest
    return Figure(
        label, seconds_text(exposed_s), f"stage {row.stage}, {seconds_text(row.predicted_exposed_s)} predicted"
    )


def facts(report: Report, on_page: bool = False) -> list[tuple[str, str]]:
    """Return label and value of each fact; `on_page` without those in the page's title and figures."""
    measured, basis, totals = report.measured, report.prediction.basis, report.totals
    program, info, verified = measured.program, measured.run.info, measured.run.verified
    chunks = f", {program.num_chunks} chunks" if program.num_chunks > 1 else ""
    parts = f" in {program.slices} slices each" if program.slices > 1 else ""
    pipes, numbers = measured.schedule.layout.num_pipes, [timeline.iteration for timeline in measured.timelines]
    warm_up = "" if measured.warm_up is None else f" ({measured.warm_up} is a warm-up)"
    pool_bytes = measured.run.graph_pool_bytes
    pool = "" if pool_bytes is None else f"; its own memory is {bytes_text(pool_bytes)} on the rank with most"
    # Empty values are left out below.
    pairs = [
        ("run", not on_page and run_name(measured)),
        ("started", info.started or "not known"),
        ("host", not on_page and hosts(measured)),
        (
            "schedule",
            f"{program.schedule}, {counted(program.num_ranks, 'stage')}{chunks}, {program.num_microbatches} "
            f"micro-batches{parts}",
        ),
        # A place in the pipeline has then two stages of a chunk.
        ("pipes", pipes > 1 and f"{pipes}, rows in the order of the first pipe's stages"),
        ("balance", program.balance_name + ", synchronous transfers" * info.synchronous),
        (
            "vocabulary",
            program.vocabulary is not Vocabulary.WHOLE
            and program.vocabulary.value + ", and the embedding" * program.input_shards,
        ),
        ("device", info.device or next((record.device for record in measured.records if record), "not known")),
        *((name.replace("_", "-"), version) for name, version in info.versions),
        ("pipelines", (info.num_pipelines or 1) > 1 and f"{info.num_pipelines}, number {measured.pipeline} is shown"),
        ("iterations" if len(numbers) > 1 else "iteration", ", ".join(map(str, numbers)) + warm_up),
        (
            "CUDA graph",
            info.captured is not None
            and f"replays iterations from {info.captured} on, of which losses and seconds are recorded" + pool,
        ),
    ]
    if not on_page:
        pairs += [
            ("pipeline", f"{seconds_text(totals.pipeline_s)} (predicted {seconds_text(totals.predicted_pipeline_s)})"),
            ("bubble", f"{percent_text(totals.bubble)} (predicted {percent_text(totals.predicted_bubble)})"),
            ("training step", totals.step_s is not None and seconds_text(totals.step_s)),
        ]
    message = "not measurable, so the prediction has none" if basis.message_s is None else seconds_text(basis.message_s)
    if totals.mfu is not None and info.peak_flops is not None:
        peak = f"{info.peak_flops / 1e12:g} TFLOP/s per device ({info.peak_source or 'source not given'})"
        pairs.append(("MFU", f"{percent_text(totals.mfu)} of {peak}"))
    pairs.append(("message between stages", message))
    if basis.bytes_per_s:
        pairs.append(("link", rate_text(min(basis.bytes_per_s.values()))))
    if verified is not None:
        iterations = counted(verified.iterations, "iteration")
        moved = f"{counted(verified.microbatches, 'micro-batch', 'es')}, {bytes_text(verified.nbytes)}"
        pairs.append(("verified", f"{iterations}: everything evicted came back unchanged ({moved})"))
    return [(label, value) for label, value in pairs if value]


def run_name(measured: Measured) -> str:
    """Return the name of the run's folder, which the user chose."""
    return measured.run.folder.resolve().name


def hosts(measured: Measured) -> str:
    """Return the machines that left a record, with the numbers of their ranks if there are several."""
    ranks = Counter(record.host for record in measured.run.ranks)
    if len(ranks) == 1:
        return next(iter(ranks))
    named = [f"{host} ({number} ranks)" for host, number in sorted(ranks.items())]
    return ", ".join(named[:MOST_HOSTS]) + (f" and {len(named) - MOST_HOSTS} more" if len(named) > MOST_HOSTS else "")


def table(report: Report) -> str:
    lines = wrapped("; ".join(f"{label} {value}" for label, value in facts(report)), "")
    lines += ["", *_stages(report.stages, report.num_pipelines), *wrapped(_LEGEND, "")]
    lines += ["", "largest differences between measurement and prediction:"]
    largest = differences(report)
    for number, difference in enumerate(largest, 1):
        numbers = f"measured {difference.text(difference.measured)}, predicted {difference.text(difference.predicted)}"
        lines += wrapped(f"{number}. {difference.what}: {'; '.join([numbers, *difference.beside])}", "   ")
    if not largest:
        lines.append("   none of more than half a percent")
    lines.append("")
    for answer in answers(report):
        lines += wrapped(answer, "")
    for note in report.measured.notes:
        lines += wrapped(f"note: {note}", "  ")
    return "\n".join(lines) + "\n"


def document(report: Report) -> dict[str, Any]:
    """Return the report as plain values whose keys docs/report.md lists. Keys are added, never renamed."""
    measured, info = report.measured, report.measured.run.info
    flops = {name: getattr(info, name) for name in ("flops_per_iteration", "peak_flops", "peak_source")}
    return {
        "format": "bpipe-report",
        "version": VERSION,
        "pipeline": measured.pipeline,
        "program": write_program(measured.program),
        "iterations": [timeline.iteration for timeline in measured.timelines],
        "warm_up_iteration": measured.warm_up,
        "totals": asdict(report.totals) | flops,
        "stages": list(map(asdict, report.stages)),
        "differences": [
            {**asdict(difference), "beside": list(difference.beside)} for difference in differences(report)
        ],
        "answers": list(answers(report)),
        "verified": measured.run.verified and asdict(measured.run.verified),
        "notes": list(measured.notes),
    }


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
