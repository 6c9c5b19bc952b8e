"""A whole report: table, JSON, page and trace are made from this value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bpipe.record.read import read_run
from bpipe.record.report.answers import answers
from bpipe.record.report.compare import Comparison, compare
from bpipe.record.report.differences import Difference, differences
from bpipe.record.report.replay import replay
from bpipe.record.report.selection import choose


@dataclass(frozen=True, slots=True)
class Report:
    """A report of a recorded run."""

    comparison: Comparison
    differences: tuple[Difference, ...]  # at most three, the largest first
    answers: tuple[str, ...]  # whole sentences

    @property
    def num_pipelines(self) -> int:
        return len({record.pipeline for record in self.comparison.measured.run.ranks})


def report_of(folder: str | Path, iteration: int | None = None) -> Report:
    """Make the report of a folder.

    Args:
        folder: the folder of a run's --bpipe-report.
        iteration: report only this iteration instead of all.

    Raises:
        ValueError: the folder has no record of one run, or not this iteration.
    """
    measured = choose(read_run(folder), iteration)
    comparison = compare(measured, replay(measured))
    return Report(comparison, differences(comparison), answers(comparison))
