"""A whole report, from which table, JSON, page and trace are made, with its answers to what a reader wants to know: what
balancing gained and cost, and which stage is the bottleneck."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bpipe.record import compare as trainings_compare
from bpipe.record.compare import read_training
from bpipe.record.format import SUMMARY, RankSummary, write_program
from bpipe.record.read import read_run, read_value, refuse_two_runs
from bpipe.record.report.compare import Comparison, Difference, StageRow, compare, differences, max_known, shared_cores
from bpipe.record.report.memory import moved_nothing
from bpipe.record.report.replay import replay
from bpipe.record.report.selection import choose
from bpipe.record.report.units import bytes_text, counted, percent_text
from bpipe.schedule.memory import moves_anything, num_transfers

VERSION = 3
# A smaller share of the pipeline time is only what asking for transfers costs.
NOTHING = 0.0005
# A larger share of what a forward keeps is as good as all; `runtime.retention` uses the same of a run.
ENOUGH = 0.9


def answers(comparison: Comparison) -> tuple[str, ...]:
    parts = [_balancing, _results, _bottleneck, _too_large, _staying]
    if comparison.trainings is not None and not comparison.trainings.equal:
        parts = [_results, *(part for part in parts if part is not _results)]
    return tuple(answer for part in parts if (answer := part(comparison)))


def bottleneck(comparison: Comparison) -> StageRow | None:
    """Return the stage nearest to its device's limit or, if limits are not known, the one that holds most."""
    rows = [row for row in comparison.stages if row.held_bytes is not None]
    if rows and all(row.limit_bytes for row in rows):
        return min(rows, key=lambda row: (row.limit_bytes or 0) - (row.held_bytes or 0))
    return max(rows, key=lambda row: row.held_bytes or 0, default=None)


def longest_wait(comparison: Comparison) -> tuple[float, StageRow] | None:
    """Return the longest exposed time and its stage, or None if no rank recorded one."""
    waits = [(row.exposed_s, row) for row in comparison.stages if row.exposed_s is not None]
    return max(waits, key=lambda wait: wait[0], default=None)


def _results(comparison: Comparison) -> str:
    """Return whether the baseline computed the same numbers; empty without one."""
    trainings = comparison.trainings
    if trainings is None:
        return ""
    name = trainings.first.path.resolve().name
    if not trainings.equal:
        return f"Results are NOT identical to those without balancing ({name}): {trainings.mismatches[0]}."
    return (
        f"All losses and gradient norms of {counted(len(trainings.common), 'iteration')} are identical to the last bit "
        f"to those without balancing ({name})."
    )


def _bottleneck(comparison: Comparison) -> str:
    row = bottleneck(comparison)
    if row is None or row.all_measured_bytes is None or row.held_bytes is None:
        return "The memory bottleneck is not known: no rank recorded what it held."
    rank = "" if row.rank is None else f" (rank {row.rank})"
    text = f"Stage {row.stage}{rank} is the memory bottleneck: {bytes_text(row.all_measured_bytes)} of activations"
    if row.bound_bytes is not None:
        over = row.all_measured_bytes - row.bound_bytes
        relation = (
            f"{bytes_text(abs(over))} {'above' if over > 0 else 'below'} its bound of {bytes_text(row.bound_bytes)}"
        )
        text += f" ({relation if over else 'exactly its bound'})"
    if row.weights_bytes is None:
        text += ", weights not recorded"
    else:
        text += f" and {bytes_text(row.weights_bytes)} of weights, gradients and optimizer state"
    if row.limit_bytes:
        free = row.limit_bytes - row.held_bytes
        text += (
            f", together {bytes_text(row.held_bytes)} of {bytes_text(row.limit_bytes)}: {bytes_text(abs(free))} "
            f"{'free' if free >= 0 else 'over'}"
        )
    return f"{text}."


def _balancing(comparison: Comparison) -> str:
    program = comparison.measured.program
    if program.balance is None:
        return _would_buy(comparison)
    if not moves_anything(comparison.measured.schedule):
        sizes = f"{counted(program.num_ranks, 'stage')} and {counted(program.num_microbatches, 'micro-batch', 'es')}"
        return f"With {sizes} there was nothing to balance."
    if _moved_nothing(comparison):
        return (
            "Nothing moved: no storage of the micro-batches is as large as the smallest that moves, or other code holds "
            "them. Memory is as without balancing."
        )
    text = "; ".join(part for part in (_bought(comparison), _cost(comparison)) if part) + "."
    return text[0].upper() + text[1:]


def _moved_nothing(comparison: Comparison) -> bool:
    """Whether ranks should have evicted, and none moved anything."""
    schedule, sizes = comparison.measured.schedule, comparison.prediction.sizes
    evicting = [rank for rank in range(schedule.num_ranks) if num_transfers(schedule, rank).evictions]
    return bool(evicting) and all(
        (size := sizes[rank]) is not None and moved_nothing(schedule, rank, size.moved_bytes) for rank in evicting
    )


def _too_large(comparison: Comparison) -> str:
    """Return what stayed because micro-batches differ in size; empty if everything was evicted as planned."""
    stayed = [
        (timeline.iteration, place, lane.source)
        for timeline in comparison.measured.timelines
        for place, lane in enumerate(timeline.lanes)
        if lane and lane.source.stayed_microbatches
    ]
    if not stayed:
        return ""
    number, place, worst = max(stayed, key=lambda part: part[2].passed_bytes)
    return (
        f"Micro-batches differ in size: {sum(part.stayed_microbatches for _, _, part in stayed)} were too large for "
        f"their host buffers and were not evicted; the bound was exceeded by at most {bytes_text(worst.passed_bytes)}, "
        f"on stage {place} in iteration {number}. The prediction assumes that each is as large as the largest."
    )


def _staying(comparison: Comparison) -> str:
    """Return which stages move only a part of a micro-batch; empty if none does."""
    stages = ", ".join(
        f"stage {row.stage} {percent_text(row.moved_fraction)}"
        for row in comparison.stages
        if row.moved_fraction is not None and row.moved_fraction < ENOUGH
    )
    if not stages:
        return ""
    return (
        f"Less memory is freed than possible: an eviction moves only a part of what a forward keeps for its backward "
        f"({stages}). The run's log names what holds the rest."
    )


def _cost(comparison: Comparison) -> str:
    longest = longest_wait(comparison)
    if longest is None:
        return "what balancing cost was not recorded"
    shared = shared_cores(comparison)
    if shared is not None:
        return f"the time it cost cannot be measured here: {shared}, so transfers take time from computations"
    (exposed_s, row), pipeline_s = longest, comparison.totals.pipeline_s
    share = exposed_s / pipeline_s if pipeline_s else 0.0
    if share < NOTHING:
        return f"balancing cost less than {percent_text(NOTHING)} of an iteration's pipeline time"
    return (
        f"balancing cost {percent_text(share)} of an iteration's pipeline time: stage {row.stage} waited for transfers"
    )


def _bought(comparison: Comparison) -> str:
    """Return what balancing saved; empty if nobody recorded it."""
    before = max_known(row.without_balancing_bytes for row in comparison.stages)
    after = max_known(row.all_measured_bytes for row in comparison.stages)
    if before is None or after is None:
        return ""
    change = f"{percent_text(abs(1 - after / before))} {'less' if after <= before else 'more'}"
    return (
        f"with balancing the fullest stage holds {bytes_text(after)} of activations instead of {bytes_text(before)}, "
        f"{change}"
    )


def _would_buy(comparison: Comparison) -> str:
    after = comparison.prediction.balanced_bytes
    before = max_known(row.all_measured_bytes for row in comparison.stages)
    if after is None or before is None:
        return "Balancing was off."
    if not after:
        stages = counted(comparison.measured.program.num_ranks, "stage")
        return f"Balancing was off, and with {stages} there is nothing to balance."
    return (
        f"Balancing was off: with --bpipe the fullest stage would hold about {bytes_text(max(after))} of activations "
        f"instead of {bytes_text(before)}."
    )


@dataclass(frozen=True, slots=True)
class Report:
    """A report of a recorded run."""

    comparison: Comparison
    differences: tuple[Difference, ...]  # at most three, the largest first
    answers: tuple[str, ...]  # whole sentences

    @property
    def num_pipelines(self) -> int:
        return len({record.pipeline for record in self.comparison.measured.run.ranks})


def report_of(folder: str | Path, baseline: str | Path | None = None) -> Report:
    """Make the report of a folder.

    Args:
        folder: the folder of a run's --bpipe-report.
        baseline: the folder of the same training without balancing.

    Returns:
        The comparison of the run with its prediction, with sentences and differences.

    Raises:
        ValueError: a folder has no record of one run, or the baseline is not such a training.
    """
    measured = choose(read_run(folder))
    trainings, peaks = None, dict[int, int]()
    if baseline is not None:
        peaks = _unbalanced_peaks(Path(baseline), measured.schedule.num_ranks)
        unbalanced, balanced = read_training(Path(baseline)), read_training(Path(folder))
        trainings = trainings_compare.compare(unbalanced, balanced, only_common=True)
    comparison = compare(measured, replay(measured), trainings, peaks)
    return Report(comparison, differences(comparison), answers(comparison))


def _unbalanced_peaks(folder: Path, num_ranks: int) -> dict[int, int]:
    """Return the peak of each stage of a run without balancing. Of replicas of a stage, the largest counts."""
    rows = {path.name: read_value(path, RankSummary, "the file", "a rank's summary") for path in SUMMARY.files(folder)}
    refuse_two_runs(folder, [(name, row.run) for name, row in rows.items()])
    peaks: dict[int, int] = {}
    for name, row in rows.items():
        if row.balanced or row.stage is None:
            raise ValueError(f"{folder / name}: this run was balanced: give the one without balancing as --baseline")
        peaks[row.stage] = max(row.peak_bytes, peaks.get(row.stage, 0))
    if sorted(peaks) != list(range(num_ranks)):
        raise ValueError(
            f"{folder}: has reports of stages {sorted(peaks)}, not of 0 to {num_ranks - 1}; did every rank finish?"
        )
    return peaks


def document(report: Report) -> dict[str, Any]:
    """Return the report as plain values whose keys docs/report.md lists. Keys are added, never renamed."""
    comparison = report.comparison
    measured, info = comparison.measured, comparison.measured.run.info
    flops = {name: getattr(info, name) for name in ("flops_per_iteration", "peak_flops", "peak_source")}
    return {
        "format": "bpipe-report",
        "version": VERSION,
        "pipeline": measured.pipeline,
        "program": write_program(measured.program),
        "iterations": [timeline.iteration for timeline in measured.timelines],
        "warm_up_iteration": measured.warm_up,
        "totals": asdict(comparison.totals) | flops,
        "stages": list(map(asdict, comparison.stages)),
        "differences": [{**asdict(difference), "beside": list(difference.beside)} for difference in report.differences],
        "answers": list(report.answers),
        "verified": measured.run.verified and asdict(measured.run.verified),
        "notes": list(measured.notes),
    }
