"""Say of a run that ended early what its stages held, what they would have needed, and what would have fitted.

In: a `Held`. Out: text.

A stage needs what it has besides activations (its optimizer's state too, which an Adam allocates only at its first
step), the schedule's peak of micro-batches of the measured size, with what a shard of the vocabulary holds of those
between its passes, and what else its device had allocated at the time. Where a stage was not reached its micro-batches
are taken to be as large as the largest that was seen, and that is said. Shards are equally large.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.record.format import Held, MemoryMark, RankHeld
from bpipe.record.report.memory import own_peak
from bpipe.record.report.units import bytes_text, counted
from bpipe.schedule.host_buffers import num_buffers_for
from bpipe.schedule.layout import Vocabulary
from bpipe.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class StageNeed:
    """One stage at its fullest, in bytes; None where it is not known.

    `other_bytes`: what was allocated besides all that is named here.

    `shard_bytes`: what its shard of the vocabulary holds of a micro-batch between its passes, which is nothing of
    `microbatch_bytes`.
    """

    stage: int
    rank: int
    microbatch_bytes: int
    microbatches_held: int
    held_bytes: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    logits_bytes: int
    shard_bytes: int
    other_bytes: int | None
    peak_microbatches: int
    need_bytes: int
    limit_bytes: int | None

    @property
    def fits(self) -> bool | None:
        return None if self.limit_bytes is None else self.need_bytes <= self.limit_bytes


@dataclass(frozen=True, slots=True)
class ShortageRemedy:
    """A way the run could have been made: the most any stage needs, and whether that fits."""

    name: str
    stage: int
    need_bytes: int
    fits: bool | None


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Of one micro-batch: what every stage saves, and what a rank's shard of the vocabulary holds between its
    passes."""

    saved_bytes: Mapping[int, int]
    shard_bytes: int

    def parted(self, parts: int) -> _Sizes:
        """Of one that is a part of it."""
        return _Sizes({stage: size // parts for stage, size in self.saved_bytes.items()}, self.shard_bytes // parts)


@dataclass(frozen=True, slots=True)
class Shortage:
    program: ScheduleConfig
    iteration: int
    stages: tuple[StageNeed, ...]
    ways: tuple[ShortageRemedy, ...]
    answers: tuple[str, ...]
    notes: tuple[str, ...]


def shortage_of(held: Held) -> Shortage:
    """Return the shortage of the first pipeline in which a rank failed, or else the first.

    Raises ValueError where no forward was made.
    """
    known = [rank for rank in held.ranks if any(mark.program is not None and mark.saved_bytes for mark in rank.marks)]
    if not known:
        raise ValueError(f"{held.folder}: the run ended before any stage had run a forward: {_ending(held)}")
    failed = _failed(held)
    pipeline = failed.pipeline if failed is not None and failed in known else min(rank.pipeline for rank in known)
    # One that ran no forward hosts for others all the same.
    ranks = {rank.place: rank for rank in held.ranks if rank.pipeline == pipeline}
    program, iteration = _last_program(ranks.values())
    schedule = build(program)
    sizes, assumed = _sizes(ranks, schedule)
    stages = tuple(_need(rank, schedule, sizes) for _, rank in sorted(ranks.items()) if rank in known)
    ways = _ways(program, ranks, sizes)
    logits_known = program.vocabulary is Vocabulary.WHOLE or bool(sizes.shard_bytes)
    return Shortage(
        program, iteration, stages, ways, _answers(held, failed, stages, ways), tuple(_notes(assumed, logits_known))
    )


def _last_program(ranks: Iterable[RankHeld]) -> tuple[ScheduleConfig, int]:
    """What ran last, and in which iteration."""
    programs = [(mark.program, mark.iteration) for rank in ranks for mark in rank.marks if mark.program is not None]
    return max(programs, key=lambda one: one[1])


def _notes(assumed: Sequence[int], logits_known: bool) -> Iterator[str]:
    if assumed:
        yield (
            f"no forward ran on stage {', '.join(map(str, assumed))}: micro-batches there are assumed to be as large "
            f"as the largest seen"
        )
    if not logits_known:
        yield "no rank had computed its shard of the output layer: the logits that each rank will hold are not counted"


def _failed(held: Held) -> RankHeld | None:
    """Return the rank that failed first: by the ranks' own account, or else one that had no memory left."""
    if held.failure is not None:
        return next((rank for rank in held.ranks if rank.rank == held.failure.rank), None)
    return next((rank for rank in held.ranks if rank.end is not None and rank.end.out_of_memory), None)


def _sizes(ranks: Mapping[int, RankHeld], schedule: Schedule) -> tuple[_Sizes, list[int]]:
    """What a micro-batch holds, and the stages of which it had to be assumed."""
    sizes: dict[int, int] = {}
    for rank in ranks.values():
        for mark in rank.marks:
            for stage, size in mark.saved_bytes.items():
                sizes[stage] = max(size, sizes.get(stage, 0))
    missing = [stage for stage in range(schedule.num_stages) if stage not in sizes]
    sizes |= dict.fromkeys(missing, max(sizes.values()))
    return _Sizes(sizes, max(mark.shard_bytes for rank in ranks.values() for mark in rank.marks)), missing


def _other_bytes(rank: RankHeld) -> int | None:
    """Return the most the device had allocated besides what is named."""
    found = [
        mark.allocated_bytes - rank.weights_bytes - rank.gradients_bytes - rank.optimizer_bytes - mark.activations_bytes
        for mark in rank.marks
        if mark.allocated_bytes is not None and mark.iteration == rank.marks[0].iteration
    ]
    return max(0, *found) if found else None


def _activations(rank: RankHeld, schedule: Schedule, sizes: _Sizes, parts: int = 1) -> tuple[int, int]:
    """Return the micro-batches and bytes at the stage's fullest; a host buffer is as large as the largest that its rank
    may send there.

    The micro-batches that ran are in `parts`.
    """
    own = {stage: sizes.saved_bytes[stage] for stage in schedule.layout.stages_of(rank.place)}
    ones = dict.fromkeys(own, 1)
    buffers = num_buffers_for(schedule, rank.place)
    hosted = sum(
        count * max(sizes.saved_bytes[stage] for stage in schedule.layout.stages_of(guest))
        for guest, count in buffers.items()
    )
    received = max((mark.received_bytes for mark in rank.marks), default=0)
    ran = [mark.after_input_bytes for mark in rank.marks]
    between = {stage: max(one.get(stage, 0) for one in ran) // parts for stage in set().union(*ran)}
    num_bytes = own_peak(schedule, rank.place, own, own, received, between, sizes.shard_bytes) + hosted
    return own_peak(schedule, rank.place, ones, ones, 0, {}) + sum(buffers.values()), num_bytes


def _need(rank: RankHeld, schedule: Schedule, sizes: _Sizes) -> StageNeed:
    mark = _fullest(rank)
    count, activations = _activations(rank, schedule, sizes)
    other = _other_bytes(rank)
    return StageNeed(
        stage=rank.place,
        rank=rank.rank,
        microbatch_bytes=max(sizes.saved_bytes[stage] for stage in schedule.layout.stages_of(rank.place)),
        microbatches_held=len(mark.microbatches),
        held_bytes=mark.activations_bytes,
        weights_bytes=rank.weights_bytes,
        gradients_bytes=rank.gradients_bytes,
        optimizer_bytes=rank.optimizer_bytes + (rank.optimizer_to_come_bytes or 0),
        logits_bytes=max(one.logits_bytes for one in rank.marks),
        shard_bytes=sizes.shard_bytes,
        other_bytes=other,
        peak_microbatches=count,
        need_bytes=rank.besides_bytes + activations + (other or 0),
        limit_bytes=rank.limit_bytes,
    )


def _fullest(rank: RankHeld) -> MemoryMark:
    """When memory ran out, or else when it held most."""
    out = next((mark for mark in rank.marks if mark.out_of_memory), None)
    return out or max(rank.marks, key=lambda mark: mark.activations_bytes)


def _ways(program: ScheduleConfig, ranks: Mapping[int, RankHeld], sizes: _Sizes) -> tuple[ShortageRemedy, ...]:
    """As it was; balanced; with half the micro-batch; with both."""
    ways = [_way("as it was run", program, ranks, sizes, 1)]
    balanced = _balanced(program) if program.balance is None else None
    if balanced is not None:
        ways.append(_way("with --bpipe", balanced, ranks, sizes, 1))
    batch = next((rank.micro_batch for rank in ranks.values() if rank.micro_batch), None)
    if batch is not None and batch % 2 == 0:
        halved = replace(program, num_microbatches=2 * program.num_microbatches)
        flag = f"--micro-batch-size {batch // 2}"
        ways.append(_way(f"with {flag}", halved, ranks, sizes, 2))
        both = _balanced(halved) if program.balance is None else None
        if both is not None:
            ways.append(_way(f"with {flag} and --bpipe", both, ranks, sizes, 2))
    return tuple(ways)


def _balanced(program: ScheduleConfig) -> ScheduleConfig | None:
    """None where balancing would move nothing."""
    config = replace(program, balance=BalanceConfig())
    return config if any(slot.transfers for row in build(config).ranks for slot in row) else None


def _way(
    name: str, program: ScheduleConfig, ranks: Mapping[int, RankHeld], sizes: _Sizes, parts: int
) -> ShortageRemedy:
    """Return the stage that comes nearest to its limit.

    Of a micro-batch in `parts`, activations and what else was allocated shrink alike.
    """
    schedule = build(program)
    smaller = sizes.parted(parts)
    needs = []
    for rank in ranks.values():
        need = rank.besides_bytes + _activations(rank, schedule, smaller, parts)[1] + (_other_bytes(rank) or 0) // parts
        needs.append((need - (rank.limit_bytes or 0), need, rank))
    _, need, rank = max(needs, key=lambda one: one[:2])
    return ShortageRemedy(name, rank.place, need, None if rank.limit_bytes is None else need <= rank.limit_bytes)


def _ending(held: Held) -> str:
    """Who failed first and of what, as far as anybody wrote it down."""
    failed = _failed(held)
    place = "" if failed is None else f" (stage {failed.place} of pipeline {failed.pipeline}, {failed.host})"
    if held.failure is not None:
        return f"rank {held.failure.rank}{place} failed first: {held.failure.cause}"
    if failed is not None and failed.end is not None:
        return f"rank {failed.rank}{place} ran out of memory: {failed.end.error}"
    without = [str(rank.rank) for rank in held.ranks if rank.end is None]
    with_error = next((rank for rank in held.ranks if rank.end is not None), None)
    if with_error is not None and with_error.end is not None:
        silent = f"; ranks {', '.join(without[:8])} recorded no error: were they killed?" if without else ""
        return f"rank {with_error.rank} ended with {with_error.end.error}{silent}"
    return "no error was recorded: the run is still going, or it was killed"


def _answers(
    held: Held, failed: RankHeld | None, stages: tuple[StageNeed, ...], ways: tuple[ShortageRemedy, ...]
) -> tuple[str, ...]:
    end = _ending(held)
    answers = [f"{end[0].upper()}{end[1:]}".rstrip(".") + "."]
    stage = next((one for one in stages if failed is not None and one.rank == failed.rank), None)
    if stage is not None:
        answers.append(_what_it_held(held, stage))
    fitting = [way.name for way in ways if way.fits]
    if any(way.fits is None for way in ways):
        answers.append("Which of these fits is not known: no limit of the device was recorded.")
    elif fitting:
        answers.append(f"What fits: {'; '.join(fitting)}.")
    else:
        answers.append(
            "None of these fits: recompute more, or split the model further. `bpipe plan` compares such configurations."
        )
    return tuple(answers)


def _what_it_held(held: Held, stage: StageNeed) -> str:
    mark = _fullest(next(rank for rank in held.ranks if rank.rank == stage.rank))
    when = "outside the loop" if mark.action is None else f"{'after' if mark.error is None else 'during'} {mark.action}"
    there = counted(stage.microbatches_held, "micro-batch", "es")
    text = (
        f"Stage {stage.stage} held {bytes_text(stage.held_bytes)} of activations ({there} of "
        f"{bytes_text(stage.microbatch_bytes)} each) {when}, iteration {mark.iteration}; by the schedule it "
        f"has to hold up to {stage.peak_microbatches}. Its weights take {bytes_text(stage.weights_bytes)}, gradients "
        f"{bytes_text(stage.gradients_bytes)} and optimizer state {bytes_text(stage.optimizer_bytes)}"
    )
    if stage.logits_bytes:
        text += f". {bytes_text(stage.logits_bytes)} of each micro-batch are logits, which balancing does not divide"
    if stage.shard_bytes:
        text += (
            f". Its shard of the output layer holds {bytes_text(stage.shard_bytes)} of a micro-batch between its passes"
        )
    return f"{text}."
