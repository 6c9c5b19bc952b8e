"""What the stages of a run that ended early held, what they would have needed, and what would have fitted.

A stage needs its memory besides activations (with the optimizer's state, which an Adam allocates only in its first
step), the schedule's peak of micro-batches of the measured size, what a shard of the vocabulary holds between its
passes, and what else its device had allocated. Micro-batches on a stage that ran no forward are assumed to be as large
as the largest that was seen. Shards are equally large.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.record.format import Held, MemoryMark, RankHeld
from bpipe.record.report.findings import bytes_text, counted
from bpipe.record.report.memory import own_peak
from bpipe.record.report.output.table import aligned, wrapped
from bpipe.schedule.host_buffers import num_buffers_for
from bpipe.schedule.layout import Vocabulary
from bpipe.schedule.memory import moves_anything
from bpipe.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class StageNeed:
    """One stage at its fullest, in bytes; None if not known."""

    rank: RankHeld
    fullest: MemoryMark
    microbatch_bytes: int
    logits_bytes: int
    shard_bytes: int  # of one micro-batch, in its shard of the vocabulary between its passes; not in `microbatch_bytes`
    other_bytes: int | None  # allocated besides all that is named here
    peak_microbatches: int
    need_bytes: int


@dataclass(frozen=True, slots=True)
class ShortageRemedy:
    """A way to run: the largest need of any stage, and whether that fits."""

    name: str
    stage: int
    need_bytes: int
    fits: bool | None


@dataclass(frozen=True, slots=True)
class Shortage:
    program: ScheduleConfig
    iteration: int
    stages: tuple[StageNeed, ...]
    ways: tuple[ShortageRemedy, ...]
    answers: tuple[str, ...]
    notes: tuple[str, ...]


def shortage_of(held: Held) -> Shortage:
    """Return the shortage of the first pipeline in which a rank failed, or else of the first.

    Raises ValueError if no forward was run.
    """
    begun = [rank for rank in held.ranks if any(mark.program is not None and mark.saved_bytes for mark in rank.marks)]
    if not begun:
        raise ValueError(f"{held.folder}: the run ended before any stage had run a forward: {_ending(held)}")
    failed = _failed(held)
    pipeline = failed.pipeline if failed is not None and failed in begun else min(rank.pipeline for rank in begun)
    # A rank that ran no forward hosts for others all the same.
    ranks = sorted((rank for rank in held.ranks if rank.pipeline == pipeline), key=lambda rank: rank.place)
    programs = [(mark.program, mark.iteration) for rank in ranks for mark in rank.marks if mark.program]
    program, iteration = max(programs, key=lambda pair: pair[1])
    schedule = build(program)
    marks = [mark for rank in ranks for mark in rank.marks]
    saved: dict[int, int] = {}
    for mark in marks:
        saved |= {stage: max(size, saved.get(stage, 0)) for stage, size in mark.saved_bytes.items()}
    assumed = [stage for stage in range(schedule.num_stages) if stage not in saved]
    saved |= dict.fromkeys(assumed, max(saved.values()))
    shard_bytes = max(mark.shard_bytes for mark in marks)
    stages = tuple(_need(rank, schedule, saved, shard_bytes) for rank in ranks if rank in begun)
    ways = [_way("as it was run", schedule, ranks, saved, shard_bytes)]
    balanced = build(replace(program, balance=BalanceConfig())) if program.balance is None else None
    if balanced is not None and moves_anything(balanced):
        ways.append(_way("with --bpipe", balanced, ranks, saved, shard_bytes))
    notes = []
    if assumed:
        notes.append(
            f"no forward ran on stage {', '.join(map(str, assumed))}: micro-batches there are assumed to be as large as "
            "the largest seen"
        )
    if program.vocabulary is not Vocabulary.WHOLE and not shard_bytes:
        notes.append(
            "no rank had computed its shard of the output layer: the logits that each rank will hold are not counted"
        )
    return Shortage(program, iteration, stages, tuple(ways), _answers(held, failed, stages, ways), tuple(notes))


def _failed(held: Held) -> RankHeld | None:
    """Return the rank that failed first, as recorded, or else one that ran out of memory."""
    if held.failure is not None:
        return next((rank for rank in held.ranks if rank.rank == held.failure.rank), None)
    return next((rank for rank in held.ranks if rank.end is not None and rank.end.out_of_memory), None)


def _other_bytes(rank: RankHeld) -> int | None:
    """Return the most the device had allocated besides state and activations."""
    state = rank.weights_bytes + rank.gradients_bytes + rank.optimizer_bytes
    others = [
        mark.allocated_bytes - state - mark.activations_bytes
        for mark in rank.marks
        if mark.allocated_bytes is not None and mark.iteration == rank.marks[0].iteration
    ]
    return max(0, *others) if others else None


def _fullest(rank: RankHeld, schedule: Schedule, saved: Mapping[int, int], shard_bytes: int) -> tuple[int, int]:
    """Return the micro-batches at the stage's fullest, and all bytes that it then needs.

    A host buffer is as large as the largest micro-batch that its guest may send there.
    """
    own = {stage: saved[stage] for stage in schedule.layout.stages_of(rank.place)}
    ones = dict.fromkeys(own, 1)
    buffers = num_buffers_for(schedule, rank.place)
    hosted = sum(
        count * max(saved[stage] for stage in schedule.layout.stages_of(guest)) for guest, count in buffers.items()
    )
    received = max((mark.received_bytes for mark in rank.marks), default=0)
    marked = [mark.after_input_bytes for mark in rank.marks]
    between = {stage: max(of_mark.get(stage, 0) for of_mark in marked) for stage in set().union(*marked)}
    activations = own_peak(schedule, rank.place, own, own, received, between, shard_bytes) + hosted
    count = own_peak(schedule, rank.place, ones, ones, 0, {}) + sum(buffers.values())
    return count, rank.besides_bytes + activations + (_other_bytes(rank) or 0)


def _need(rank: RankHeld, schedule: Schedule, saved: Mapping[int, int], shard_bytes: int) -> StageNeed:
    count, need_bytes = _fullest(rank, schedule, saved, shard_bytes)
    # The mark at which memory ran out, or else the largest.
    out = next((mark for mark in rank.marks if mark.out_of_memory), None)
    return StageNeed(
        rank,
        out or max(rank.marks, key=lambda mark: mark.activations_bytes),
        microbatch_bytes=max(saved[stage] for stage in schedule.layout.stages_of(rank.place)),
        logits_bytes=max(mark.logits_bytes for mark in rank.marks),
        shard_bytes=shard_bytes,
        other_bytes=_other_bytes(rank),
        peak_microbatches=count,
        need_bytes=need_bytes,
    )


def _way(
    name: str, schedule: Schedule, ranks: Sequence[RankHeld], saved: Mapping[int, int], shard_bytes: int
) -> ShortageRemedy:
    """Return the need of the stage that is nearest to its limit."""
    needs = [(_fullest(rank, schedule, saved, shard_bytes)[1], rank) for rank in ranks]
    need, rank = max(needs, key=lambda entry: (entry[0] - (entry[1].limit_bytes or 0), entry[0]))
    return ShortageRemedy(name, rank.place, need, None if rank.limit_bytes is None else need <= rank.limit_bytes)


def _ending(held: Held) -> str:
    """Return who failed first and why, as far as it was recorded."""
    failed = _failed(held)
    place = "" if failed is None else f" (stage {failed.place} of pipeline {failed.pipeline}, {failed.host})"
    if held.failure is not None:
        return f"rank {held.failure.rank}{place} failed first: {held.failure.cause}"
    if failed is not None and failed.end is not None:
        return f"rank {failed.rank}{place} ran out of memory: {failed.end.error}"
    ended = [(rank.rank, rank.end.error) for rank in held.ranks if rank.end is not None]
    without = [str(rank.rank) for rank in held.ranks if rank.end is None]
    if not ended:
        return "no error was recorded: the run is still going, or it was killed"
    silent = f"; ranks {', '.join(without[:8])} recorded no error: were they killed?" if without else ""
    return f"rank {ended[0][0]} ended with {ended[0][1]}{silent}"


def _answers(
    held: Held, failed: RankHeld | None, stages: Sequence[StageNeed], ways: Sequence[ShortageRemedy]
) -> tuple[str, ...]:
    end = _ending(held)
    answers = [f"{end[0].upper()}{end[1:]}".rstrip(".") + "."]
    if failed is not None:
        answers += [_held_text(stage) for stage in stages if stage.rank is failed]
    fitting = [way.name for way in ways if way.fits]
    if any(way.fits is None for way in ways):
        answers.append("Which of these fits is not known: no limit of the device was recorded.")
    elif fitting:
        answers.append(f"What fits: {'; '.join(fitting)}.")
    else:
        answers.append(
            "None of these fits: recompute more, or split the model further. `bpipe fit` compares such changes."
        )
    return tuple(answers)


def _held_text(stage: StageNeed) -> str:
    rank, mark = stage.rank, stage.fullest
    when = "outside the loop" if mark.action is None else f"{'after' if mark.error is None else 'during'} {mark.action}"
    microbatches = counted(len(mark.microbatches), "micro-batch", "es")
    text = (
        f"Stage {rank.place} held {bytes_text(mark.activations_bytes)} of activations ({microbatches} of "
        f"{bytes_text(stage.microbatch_bytes)} each) {when}, iteration {mark.iteration}; by the schedule it "
        f"has to hold up to {stage.peak_microbatches}. Its weights take {bytes_text(rank.weights_bytes)}, gradients "
        f"{bytes_text(rank.gradients_bytes)} and optimizer state {bytes_text(rank.whole_optimizer_bytes)}"
    )
    if stage.logits_bytes:
        text += f". {bytes_text(stage.logits_bytes)} of each micro-batch are logits, which balancing does not divide"
    if stage.shard_bytes:
        text += (
            f". Its shard of the output layer holds {bytes_text(stage.shard_bytes)} of a micro-batch between its passes"
        )
    return f"{text}."


def text(held: Held) -> str:
    """Return the shortage as text of at most 120 columns."""
    shortage = shortage_of(held)
    program = shortage.program
    vocabulary = ""
    if program.vocabulary is not Vocabulary.WHOLE:
        vocabulary = f"; vocabulary {program.vocabulary.value}{', and the embedding' * program.input_shards}"
    sizes = f"{counted(program.num_ranks, 'stage')}, {counted(program.num_microbatches, 'micro-batch', 'es')}"
    head = (
        f"{program.schedule}, {sizes}; balance {program.balance_name}{vocabulary}; memory held up to iteration "
        f"{shortage.iteration}"
    )
    fits = {True: "fits", False: "does not fit", None: "limit not known"}
    lines = [*wrapped(head, ""), "", *_table(shortage.stages)]
    lines += ["", "needed at the fullest point, with micro-batches of these sizes:"]
    lines += [
        f"  {way.name}: {bytes_text(way.need_bytes)} on stage {way.stage}, {fits[way.fits]}" for way in shortage.ways
    ]
    lines.append("")
    for answer in shortage.answers:
        lines += wrapped(answer, "")
    for note in shortage.notes:
        lines += wrapped(f"note: {note}", "  ")
    return "\n".join(lines) + "\n"


def _table(stages: tuple[StageNeed, ...]) -> list[str]:
    def size(nbytes: int | None) -> str:
        return "-" if nbytes is None else bytes_text(nbytes)

    # If the output layer is in shards no stage has logits.
    above, below = ("shard,", "S to T") if any(row.shard_bytes for row in stages) else ("of which", "logits")
    columns: list[tuple[str, str, Callable[[StageNeed], str]]] = [
        ("", "stage", lambda row: str(row.rank.place)),
        ("", "rank", lambda row: str(row.rank.rank)),
        ("held", "micro-b.", lambda row: f"{len(row.fullest.microbatches)} of {row.peak_microbatches}"),
        ("activa-", "tions", lambda row: size(row.fullest.activations_bytes)),
        ("one micro-", "batch", lambda row: size(row.microbatch_bytes)),
        (above, below, lambda row: size(row.shard_bytes or row.logits_bytes or None)),
        ("", "weights", lambda row: size(row.rank.weights_bytes)),
        ("", "gradients", lambda row: size(row.rank.gradients_bytes)),
        ("", "optimizer", lambda row: size(row.rank.whole_optimizer_bytes)),
        ("", "other", lambda row: size(row.other_bytes)),
        ("device's", "limit", lambda row: size(row.rank.limit_bytes)),
        ("", "needs", lambda row: size(row.need_bytes)),
    ]
    titles = [[top for top, _, _ in columns], [title for _, title, _ in columns]]
    return aligned([*titles, *([cell(row) for _, _, cell in columns] for row in stages)])
