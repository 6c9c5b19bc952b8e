"""A whole report: table, JSON, page and trace are made from this value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bpipe.record.compare import judge
from bpipe.record.compare.read import read_training
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


def report_of(folder: str | Path, iteration: int | None = None, baseline: str | Path | None = None) -> Report:
    """Make the report of a folder.

    Args:
        folder: the folder of a run's --bpipe-report.
        iteration: report only this iteration instead of all.
        baseline: the folder of the same training without balancing.

    Returns:
        The comparison of the run with its prediction, with sentences and differences.

    Raises:
        ValueError: a folder has no record of one run, or not this iteration, or the baseline is not such a training.
    """
    measured = choose(read_run(folder), iteration)
    trainings = None
    if baseline is not None:
        unbalanced = read_training(Path(baseline), num_ranks=measured.schedule.num_ranks, balanced=False)
        trainings = judge.compare(unbalanced, read_training(Path(folder)), only_common=True)
    comparison = compare(measured, replay(measured), trainings)
    return Report(comparison, differences(comparison), answers(comparison))
