"""What a report says in words, with quantities rounded for a person: answers to what a reader wants to know, and where
measurement and prediction differ most.

At most three differences are listed, of different kinds: an iteration's pipeline time, a forward, a backward, exposed
transfer time, and a peak. The size of a difference in time is its share of the predicted pipeline time, where a
computation counts as often as it runs; that of a difference in bytes is its share of the predicted peak.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median

from bpipe.record.report.memory import moved_nothing
from bpipe.record.report.report import Report, StageRow, max_known, shared_cores
from bpipe.record.report.selection import lanes_of, warm_up_ratios
from bpipe.schedule.action import Action
from bpipe.schedule.memory import moves_anything, num_transfers

# A smaller share of the pipeline time is only what asking for transfers costs.
NOTHING = 0.0005
# A larger share of what a forward keeps is as good as all; `runtime.retention` uses the same of a run.
ENOUGH = 0.9


def answers(report: Report) -> tuple[str, ...]:
    parts = [_balancing, _results, _bottleneck, _too_large, _staying]
    if report.trainings is not None and not report.trainings.equal:
        parts = [_results, *(part for part in parts if part is not _results)]
    return tuple(answer for part in parts if (answer := part(report)))


def bottleneck(report: Report) -> StageRow | None:
    """Return the stage nearest to its device's limit or, if limits are not known, the one that holds most."""
    rows = [row for row in report.stages if row.held_bytes is not None]
    if rows and all(row.limit_bytes for row in rows):
        return min(rows, key=lambda row: (row.limit_bytes or 0) - (row.held_bytes or 0))
    return max(rows, key=lambda row: row.held_bytes or 0, default=None)


def longest_wait(report: Report) -> tuple[float, StageRow] | None:
    """Return the longest exposed time and its stage, or None if no rank recorded one."""
    waits = [(row.exposed_s, row) for row in report.stages if row.exposed_s is not None]
    return max(waits, key=lambda wait: wait[0], default=None)


def _results(report: Report) -> str:
    """Return whether the baseline computed the same numbers; empty without one."""
    trainings = report.trainings
    if trainings is None:
        return ""
    name = trainings.first.path.resolve().name
    if not trainings.equal:
        return f"Results are NOT identical to those without balancing ({name}): {trainings.mismatches[0]}."
    return (
        f"All losses and gradient norms of {counted(len(trainings.common), 'iteration')} are identical to the last bit "
        f"to those without balancing ({name})."
    )


def _bottleneck(report: Report) -> str:
    row = bottleneck(report)
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


def _balancing(report: Report) -> str:
    program = report.measured.program
    if program.balance is None:
        return _would_buy(report)
    if not moves_anything(report.measured.schedule):
        sizes = f"{counted(program.num_ranks, 'stage')} and {counted(program.num_microbatches, 'micro-batch', 'es')}"
        return f"With {sizes} there was nothing to balance."
    if _moved_nothing(report):
        return (
            "Nothing moved: no storage of the micro-batches is as large as the smallest that moves, or other code holds "
            "them. Memory is as without balancing."
        )
    text = "; ".join(part for part in (_bought(report), _cost(report)) if part) + "."
    return text[0].upper() + text[1:]


def _moved_nothing(report: Report) -> bool:
    """Whether ranks should have evicted, and none moved anything."""
    schedule, sizes = report.measured.schedule, report.prediction.sizes
    evicting = [rank for rank in range(schedule.num_ranks) if num_transfers(schedule, rank).evictions]
    return bool(evicting) and all(
        (size := sizes[rank]) is not None and moved_nothing(schedule, rank, size.moved_bytes) for rank in evicting
    )


def _too_large(report: Report) -> str:
    """Return what stayed because micro-batches differ in size; empty if everything was evicted as planned."""
    stayed = [
        (timeline.iteration, place, lane.source)
        for timeline in report.measured.timelines
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


def _staying(report: Report) -> str:
    """Return which stages move only a part of a micro-batch; empty if none does."""
    stages = ", ".join(
        f"stage {row.stage} {percent_text(row.moved_fraction)}"
        for row in report.stages
        if row.moved_fraction is not None and row.moved_fraction < ENOUGH
    )
    if not stages:
        return ""
    return (
        f"Less memory is freed than possible: an eviction moves only a part of what a forward keeps for its backward "
        f"({stages}). The run's log names what holds the rest."
    )


def _cost(report: Report) -> str:
    longest = longest_wait(report)
    if longest is None:
        return "what balancing cost was not recorded"
    shared = shared_cores(report)
    if shared is not None:
        return f"the time it cost cannot be measured here: {shared}, so transfers take time from computations"
    (exposed_s, row), pipeline_s = longest, report.totals.pipeline_s
    share = exposed_s / pipeline_s if pipeline_s else 0.0
    if share < NOTHING:
        return f"balancing cost less than {percent_text(NOTHING)} of an iteration's pipeline time"
    return (
        f"balancing cost {percent_text(share)} of an iteration's pipeline time: stage {row.stage} waited for transfers"
    )


def _bought(report: Report) -> str:
    """Return what balancing saved; empty if nobody recorded it."""
    before = max_known(row.without_balancing_bytes for row in report.stages)
    after = max_known(row.all_measured_bytes for row in report.stages)
    if before is None or after is None:
        return ""
    change = f"{percent_text(abs(1 - after / before))} {'less' if after <= before else 'more'}"
    return (
        f"with balancing the fullest stage holds {bytes_text(after)} of activations instead of {bytes_text(before)}, "
        f"{change}"
    )


def _would_buy(report: Report) -> str:
    after = report.prediction.balanced_bytes
    before = max_known(row.all_measured_bytes for row in report.stages)
    if after is None or before is None:
        return "Balancing was off."
    if not after:
        stages = counted(report.measured.program.num_ranks, "stage")
        return f"Balancing was off, and with {stages} there is nothing to balance."
    return (
        f"Balancing was off: with --bpipe the fullest stage would hold about {bytes_text(max(after))} of activations "
        f"instead of {bytes_text(before)}."
    )


_MAX_DIFFERENCES = 3
# Smaller differences are not worth a reader's time.
_SMALLEST_SHARE = 0.005


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference of measured and predicted."""

    kind: str
    stage: int | None  # None for a whole iteration
    what: str
    measured: float
    predicted: float
    unit: str  # "s" or "bytes"
    share: float  # its size
    beside: tuple[str, ...]  # facts that were measured beside it
    iteration: int | None = None  # None for the median of all

    def text(self, value: float) -> str:
        return seconds_text(value) if self.unit == "s" else bytes_text(value)


def differences(report: Report) -> tuple[Difference, ...]:
    """Return the largest difference of each kind, the largest ones first."""
    largest: dict[str, Difference] = {}
    for candidate in (*_differing_times(report), *_differing_peaks(report)):
        other = largest.get(candidate.kind)
        if candidate.share >= _SMALLEST_SHARE and (other is None or candidate.share > other.share):
            largest[candidate.kind] = candidate
    return tuple(sorted(largest.values(), key=lambda difference: -difference.share)[:_MAX_DIFFERENCES])


def _differing_times(report: Report) -> Iterator[Difference]:
    measured, span_s, cores = report.measured, report.totals.predicted_pipeline_s, shared_cores(report)
    crowded, layout = [] if cores is None else [cores], measured.schedule.layout

    def difference(
        kind: str,
        stage: int | None,
        what: str,
        seconds: float,
        predicted_s: float,
        beside: Sequence[str],
        times: int = 1,
        iteration: int | None = None,
    ) -> Difference:
        share = abs(seconds - predicted_s) * times / span_s if span_s else 0.0
        return Difference(kind, stage, what, seconds, predicted_s, "s", share, tuple(beside), iteration)

    for timeline in measured.timelines:
        number, beside = timeline.iteration, crowded
        if number == measured.warm_up:
            ratio = median(warm_up_ratios(measured.timelines))
            slow = f"the first recorded iteration, whose stages computed {ratio:.2f} times as long as later"
            beside = [slow, *crowded]
        what = f"iteration {number}, pipeline time"
        yield difference("iteration", None, what, timeline.span_s, span_s, beside, iteration=number)
    for (stage, kind), predicted_s in report.prediction.basis.seconds.items():
        replicas = layout.replicas(stage)
        places = (layout.rank_of_action(Action(stage, kind, pipe)) for pipe in range(layout.num_pipes))
        for place in dict.fromkeys(places):
            lanes = [(timeline.iteration, lane) for timeline, lane in lanes_of(measured.steady, place)]
            iterations = [(number, rows) for number, lane in lanes if (rows := lane.computations_of(stage, kind))]
            if not iterations:
                continue
            samples = [(row.seconds, row.action, number) for number, rows in iterations for row in rows]
            slowest_s, action, number = max(samples, key=lambda sample: sample[0])
            slowest = f"the slowest of {len(samples)}, {action} in iteration {number}, took {seconds_text(slowest_s)}"
            # The mean of an iteration, of which the median: rare slow ones make a difference.
            seconds = median(mean(row.seconds for row in rows) for _, rows in iterations)
            pipe = f" of pipe {replicas.index(place)}" if len(replicas) > 1 else ""
            name, times = kind.name.lower(), len(iterations[0][1])
            what = f"stage {stage}{pipe}, {name.replace('_', ' ')} (mean)"
            yield difference(name, stage, what, seconds, predicted_s, [slowest, *crowded], times)
    for row in report.stages:
        if row.exposed_s is not None:
            what = f"stage {row.stage}, exposed transfer time"
            yield difference("exposed", row.stage, what, row.exposed_s, row.predicted_exposed_s, [])


def _differing_peaks(report: Report) -> Iterator[Difference]:
    for row in report.stages:
        if row.measured_bytes is None or not row.predicted_bytes:
            continue
        share = abs(row.measured_bytes - row.predicted_bytes) / row.predicted_bytes
        lanes = [lane for _, lane in lanes_of(report.measured.steady, row.stage)]
        sizes = {computation.bytes for lane in lanes for computation in lane.computations if computation.bytes}
        beside = [f"{row.measured_microbatches} micro-batches at once, {row.predicted_microbatches} in the schedule"]
        if lanes and len(lanes[0].source.saved_bytes) == 1 and len(sizes) > 1:
            beside.append(f"micro-batches of {bytes_text(min(sizes))} to {bytes_text(max(sizes))}")
        left = max(((lane.computations[-1].left_bytes or 0) - lane.source.host_bytes for lane in lanes), default=0)
        if left > 0:
            beside.append(f"{bytes_text(left)} of saved activations still in memory after the last backward")
        what, peaks = f"stage {row.stage}, peak of activations", (row.measured_bytes, row.predicted_bytes)
        yield Difference("peak", row.stage, what, *peaks, "bytes", share, tuple(beside))


_SIZES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def bytes_text(num_bytes: float) -> str:
    """Write bytes as 53.8 MiB; from 10 GiB on in GiB."""
    unit, name = size_unit([num_bytes])
    return f"{num_bytes / unit:.1f} {name}" if unit > 1 else f"{num_bytes:.0f} B"


def size_unit(sizes: Iterable[float]) -> tuple[int, str]:
    """Return the unit in which the largest of these sizes is readable, for a whole column."""
    largest = max((abs(size) for size in sizes), default=0)
    return next(((unit, name) for unit, name in _SIZES if largest >= unit), (1, "B"))


def seconds_text(seconds: float) -> str:
    """Write seconds as 12.3 ms."""
    if not seconds:
        return "0 s"
    unit, name = next(((unit, name) for unit, name in _TIMES if abs(seconds) >= unit), _TIMES[-1])
    return f"{seconds / unit:.3g} {name}" if abs(seconds / unit) < 1000 else f"{seconds / unit:.0f} {name}"


def rate_text(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"


def counted(number: int, what: str, many: str = "s") -> str:
    """Write a number with its noun: 1 stage, 8 stages."""
    return f"{number} {what}{many * (number != 1)}"


def percent_text(share: float) -> str:
    return f"{100 * share:.1f} %"
