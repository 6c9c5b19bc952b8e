"""A whole report: the comparison, the largest differences, the answers.

In: a folder, perhaps an iteration. Out: a `Report`.

The one door for the command and for whoever writes a report down: table, JSON, page and trace all take this value.
"""

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
    """A report: `differences` by size, at most three; `answers` are whole sentences."""

    comparison: Comparison
    differences: tuple[Difference, ...]
    answers: tuple[str, ...]

    @property
    def num_pipelines(self) -> int:
        return len({record.pipeline for record in self.comparison.measured.run.ranks})


def report_of(folder: str | Path, iteration: int | None = None) -> Report:
    """Make the report of a folder.

    Raises ValueError where the folder holds no record of one run, or not this iteration.
    """
    measured = choose(read_run(folder), iteration)
    comparison = compare(measured, replay(measured))
    return Report(comparison, differences(comparison), answers(comparison))
