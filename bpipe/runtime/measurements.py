"""What one rank measured, as rows of the record."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from bpipe.build import ScheduleConfig
from bpipe.record.format import Iteration, RankSummary
from bpipe.record.report.memory import own_peak, peak_of_rule
from bpipe.runtime.checksums import Certificate
from bpipe.runtime.engine import Engine
from bpipe.runtime.meter import Meter
from bpipe.runtime.recorder import Recorder
from bpipe.runtime.sizing import Unmoved
from bpipe.schedule.action import Kind
from bpipe.schedule.memory import Memory


def iteration_of(
    engine: Engine, meter: Meter, recorder: Recorder, program: ScheduleConfig, number: int, begin_s: float
) -> Iteration:
    """Return an iteration without `device_peak_bytes`. Waits for the device.

    `begin_s`: unix time on this rank's clock.
    """
    sizing = engine.sizing
    if sizing is not None and not sizing.differing:
        sizing = None
    # If sizes differ, the size of a host buffer is not that of what came into it.
    hosted = engine.hosted_bytes if sizing is None else {}
    exact = (None, None) if sizing is None else (meter.each_bytes, sizing.moved_each)
    rows, elapsed_s = recorder.rows(meter.saved_bytes, {**hosted, **engine.moved_bytes}, *exact)
    stayed, shares = Unmoved() if sizing is None else sizing.stayed, engine.shares
    return Iteration(
        iteration=number,
        program=program,
        begin_s=begin_s,
        elapsed_s=elapsed_s,
        saved_bytes=meter.saved_bytes,
        moved_bytes=engine.moved_bytes,
        after_input_bytes=meter.after_input_bytes,
        shard_bytes=meter.shard_bytes,
        kept_bytes={stage: share.kept_bytes for stage, share in shares.items()},
        kept_counted_by=next((share.counted_by for share in shares.values()), None),
        received_bytes=meter.received_bytes,
        host_bytes=engine.host_bytes,
        own_bytes=engine.own_memory[1],
        stayed_microbatches=stayed.microbatches,
        stayed_bytes=stayed.nbytes,
        passed_microbatches=stayed.passed_microbatches,
        passed_bytes=stayed.passed_bytes,
        rows=rows,
    )


@dataclass
class DifferingSums:
    """Sums over all iterations of one rank whose micro-batches differ in size."""

    stayed_microbatches: int = 0
    stayed_bytes: int = 0
    passed_microbatches: int = 0
    """The most by which the bound was exceeded at once."""

    passed_bytes: int = 0
    times_grown: int = 0
    """Iterations after which host buffers grew."""

    largest_bytes: Mapping[int, int] = field(default_factory=dict)
    """By stage, the largest micro-batch."""

    def add(self, engine: Engine) -> None:
        """Add an iteration."""
        sizing = engine.sizing
        if sizing is None or not sizing.differing:
            return
        stayed = sizing.stayed
        self.stayed_microbatches += stayed.microbatches
        self.stayed_bytes += stayed.nbytes
        self.passed_microbatches = max(self.passed_microbatches, stayed.passed_microbatches)
        self.passed_bytes = max(self.passed_bytes, stayed.passed_bytes)
        self.times_grown = sizing.num_grown
        self.largest_bytes = dict(sizing.most_bytes)


@dataclass(frozen=True, kw_only=True)
class KeptBySlices:
    """Bytes kept of micro-batches cut into slices."""

    peak_bytes: int
    predicted_bytes: int
    memory: Memory
    """The rule for slices that differ."""


def summary_of(
    engine: Engine,
    meter: Meter,
    place: int,
    *,
    rank: int,
    pipeline: int,
    balanced: bool,
    peaks: Sequence[tuple[int, int]],
    differing: DifferingSums,
    certificate: Certificate,
    slices: KeptBySlices | None = None,
) -> RankSummary:
    """Return what a rank measured and what its schedule predicts for micro-batches of this size.

    `place` is its position in the pipeline. `peaks` are micro-batches and bytes of each iteration; the first does not
    count if there are others, because what micro-batches share is known only after two of them. Host buffers are
    preallocated, so a rank holds all of them from the first HOST on: the prediction is the most that its own
    micro-batches occupy in any slot, and its buffers.
    """
    schedule, saved, moved = engine.schedule, meter.saved_bytes, engine.moved_bytes
    # As in the meter, a micro-batch of which less than half has left is still here.
    leaves = {
        stage: int(moved.get(stage, nbytes) > 0 and 2 * moved.get(stage, nbytes) >= nbytes)
        for stage, nbytes in saved.items()
    }
    # Evictions and loads of a stage of which nothing can move do not count.
    transfers = Counter(
        action.kind for slot in schedule.ranks[place] for action in slot.transfers if moved.get(action.stage)
    )
    counted = list(peaks[1:] or peaks)
    if slices is None:
        sizes = (meter.received_bytes, meter.after_input_bytes, meter.shard_bytes)
        predicted_bytes = own_peak(schedule, place, saved, moved, *sizes)
    else:
        predicted_bytes = peak_of_rule(schedule, place, slices.memory, meter.received_bytes)
    own_buffers, own_bytes = engine.own_memory
    return RankSummary(
        rank=rank,
        stage=place,
        pipeline=pipeline,
        balanced=balanced,
        num_microbatches=schedule.num_whole_microbatches,
        peak_microbatches=max(peak[0] for peak in counted),
        peak_bytes=max(peak[1] for peak in counted),
        predicted_microbatches=own_peak(schedule, place, dict.fromkeys(saved, 1), leaves, 0, {})
        + engine.num_host_buffers,
        predicted_bytes=engine.host_bytes + predicted_bytes,
        evictions=transfers[Kind.EVICT],
        loads=transfers[Kind.LOAD],
        own_buffers=own_buffers,
        own_bytes=own_bytes,
        moved_fraction=min((share.fraction for share in engine.shares.values()), default=None),
        **asdict(differing),
        keys_bytes=0 if slices is None else slices.peak_bytes,
        predicted_keys_bytes=0 if slices is None else slices.predicted_bytes,
        verified_iterations=certificate.iterations,
        verified_microbatches=certificate.microbatches,
        verified_storages=certificate.storages,
        verified_bytes=certificate.nbytes,
    )
