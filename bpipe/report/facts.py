"""Say what a report is about and its totals, as label and value. In: a `Comparison`. Out: pairs of text, for table and page."""

from __future__ import annotations

from bpipe.report.compare import Comparison
from bpipe.report.measured import Measured
from bpipe.report.units import percent_text, rate_text, seconds_text


def facts(comparison: Comparison) -> list[tuple[str, str]]:
    measured, totals, basis = comparison.measured, comparison.totals, comparison.prediction.basis
    program, info = measured.program, measured.run.info
    chunks = f", {program.num_chunks} chunks" if program.num_chunks > 1 else ""
    device = info.device or next((record.device for record in measured.records if record is not None), "not known")
    found = [
        ("schedule", f"{program.schedule}, {program.num_stages} stages{chunks}, {program.num_microbatches} micro-batches"),
        ("balance", program.balance + (", synchronous transfers" if info.synchronous else "")),
        ("device", device),
    ]
    if info.num_pipelines is not None and info.num_pipelines > 1:
        found.append(("pipelines", f"{info.num_pipelines}, shown is {measured.pipeline}"))
    found.append(_iterations(measured))
    found.append(("pipeline", f"{seconds_text(totals.pipeline_s)} (predicted {seconds_text(totals.predicted_pipeline_s)})"))
    found.append(("bubble", f"{percent_text(totals.bubble)} (predicted {percent_text(totals.predicted_bubble)})"))
    if totals.step_s is not None:
        found.append(("training step", seconds_text(totals.step_s)))
    found.append(("MFU", _mfu(comparison)))
    found.append(("message", "not measurable, predicted without" if basis.message_s is None else seconds_text(basis.message_s)))
    if basis.bytes_per_s:
        sources = {basis.bytes_source[stage] for stage in basis.bytes_per_s}
        slowest = min(basis.bytes_per_s.values())
        found.append(("link", f"{rate_text(slowest)} ({', '.join(sorted(sources))})"))
    return found


def _iterations(measured: Measured) -> tuple[str, str]:
    shown = [timeline.iteration for timeline in measured.shown]
    if len(shown) == 1:
        return "iteration", str(shown[0])
    warm_up = f" ({measured.warm_up} warmed up)" if measured.warm_up in shown else ""
    return "iterations", ", ".join(map(str, shown)) + warm_up


def _mfu(comparison: Comparison) -> str:
    info, totals = comparison.measured.run.info, comparison.totals
    if totals.mfu is not None and info.peak_flops is not None:
        return f"{percent_text(totals.mfu)} of {info.peak_flops / 1e12:g} TFLOP/s a device ({info.peak_source or 'source not said'})"
    missing = [
        name
        for name, value in (
            ("the device's peak (--bpipe-peak-tflops)", info.peak_flops),
            ("the FLOPs of an iteration", info.flops_per_iteration),
            ("the number of ranks", info.world_size),
            ("the time of a step", totals.step_s),
        )
        if not value
    ]
    return f"not known, missing: {', '.join(missing)}"
