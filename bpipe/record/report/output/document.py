"""Write a report as JSON: plain values whose keys docs/report.md lists. Keys are added, never renamed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bpipe.record.compare.judge import SideBySide
from bpipe.record.report.report import Report

VERSION = 2


def _baseline(trainings: SideBySide) -> dict[str, Any]:
    return {
        "path": str(trainings.first.path),
        "iterations": len(trainings.common),
        "identical": trainings.equal,
    }


def document(report: Report) -> dict[str, Any]:
    comparison = report.comparison
    measured, basis = comparison.measured, comparison.prediction.basis
    info, program = measured.run.info, measured.program
    return {
        "format": "bpipe-report",
        "version": VERSION,
        "run": {
            "started": info.started,
            "world_size": info.world_size,
            "device": info.device,
            "synchronous": info.synchronous,
            **dict(info.versions),
            "num_pipelines": report.num_pipelines if info.num_pipelines is None else info.num_pipelines,
            "pipeline": measured.pipeline,
        },
        "program": {
            "schedule": program.schedule,
            "num_stages": program.num_ranks,
            "num_microbatches": program.num_microbatches,
            "num_chunks": program.num_chunks,
            "balance": program.balance_name,
        },
        "iterations": [timeline.iteration for timeline in measured.shown],
        "warm_up_iteration": measured.warm_up,
        "totals": {
            **asdict(comparison.totals),
            "flops_per_iteration": info.flops_per_iteration,
            "peak_flops": info.peak_flops,
            "peak_source": info.peak_source,
        },
        "stages": [asdict(row) for row in comparison.stages],
        "differences": [{**asdict(difference), "beside": list(difference.beside)} for difference in report.differences],
        "answers": list(report.answers),
        "basis": {
            "seconds": {f"{stage}{kind.value}": value for (stage, kind), value in basis.seconds.items()},
            "bytes_per_s": {str(stage): value for stage, value in basis.bytes_per_s.items()},
            "bytes_source": {str(stage): source for stage, source in basis.bytes_source.items()},
            "message_s": basis.message_s,
            "message_between_s": basis.message_between_s,
            "assumed_stages": list(basis.assumed),
        },
        "baseline": None if comparison.trainings is None else _baseline(comparison.trainings),
        "verified": None if measured.run.verified is None else asdict(measured.run.verified),
        "notes": list(measured.notes),
    }
