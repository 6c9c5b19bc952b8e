"""What the stages of a run that ended early held, what they would have needed, and what would have fitted.

A stage needs its memory besides activations (with the optimizer's state, which an Adam allocates only in its first
step), the schedule's peak of micro-batches of the measured size, what a shard of the vocabulary holds between its
passes, and what else its device had allocated. Micro-batches on a stage that ran no forward are assumed to be as large
as the largest that was seen. Shards are equally large.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.record.format import Held, MemoryMark, RankHeld
from bpipe.record.report.memory import own_peak
from bpipe.record.report.output.table import aligned, wrapped
from bpipe.record.report.units import bytes_text, counted
from bpipe.schedule.host_buffers import num_buffers_for
from bpipe.schedule.layout import Vocabulary
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
class _Sizes:
    """Sizes of one micro-batch: saved by stage, and in a rank's shard of the vocabulary between its passes."""

    saved_bytes: Mapping[int, int]
    shard_bytes: int


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
    ranks = {rank.place: rank for rank in held.ranks if rank.pipeline == pipeline}
    programs = [(mark.program, mark.iteration) for rank in ranks.values() for mark in rank.marks if mark.program]
    program, iteration = max(programs, key=lambda pair: pair[1])
    schedule = build(program)
    sizes, assumed = _sizes(ranks, schedule)
    stages = tuple(_need(rank, schedule, sizes) for _, rank in sorted(ranks.items()) if rank in begun)
    ways = _ways(program, ranks, sizes)
    notes = []
    if assumed:
        notes.append(
            f"no forward ran on stage {', '.join(map(str, assumed))}: micro-batches there are assumed to be as large as "
            "the largest seen"
        )
    if program.vocabulary is not Vocabulary.WHOLE and not sizes.shard_bytes:
        notes.append(
            "no rank had computed its shard of the output layer: the logits that each rank will hold are not counted"
        )
    return Shortage(program, iteration, stages, ways, _answers(held, failed, stages, ways), tuple(notes))


def _failed(held: Held) -> RankHeld | None:
    """Return the rank that failed first, as recorded, or else one that ran out of memory."""
    if held.failure is not None:
        return next((rank for rank in held.ranks if rank.rank == held.failure.rank), None)
    return next((rank for rank in held.ranks if rank.end is not None and rank.end.out_of_memory), None)


def _sizes(ranks: Mapping[int, RankHeld], schedule: Schedule) -> tuple[_Sizes, list[int]]:
    """Return the sizes of a micro-batch, and the stages whose size is assumed."""
    marks = [mark for rank in ranks.values() for mark in rank.marks]
    sizes: dict[int, int] = {}
    for mark in marks:
        for stage, size in mark.saved_bytes.items():
            sizes[stage] = max(size, sizes.get(stage, 0))
    missing = [stage for stage in range(schedule.num_stages) if stage not in sizes]
    sizes |= dict.fromkeys(missing, max(sizes.values()))
    return _Sizes(sizes, max(mark.shard_bytes for mark in marks)), missing


def _other_bytes(rank: RankHeld) -> int | None:
    """Return the most the device had allocated besides state and activations."""
    state = rank.weights_bytes + rank.gradients_bytes + rank.optimizer_bytes
    others = [
        mark.allocated_bytes - state - mark.activations_bytes
        for mark in rank.marks
        if mark.allocated_bytes is not None and mark.iteration == rank.marks[0].iteration
    ]
    return max(0, *others) if others else None


def _activations(rank: RankHeld, schedule: Schedule, sizes: _Sizes, parts: int = 1) -> tuple[int, int]:
    """Return the micro-batches and bytes at the stage's fullest, if the micro-batches that ran are split in `parts`.

    A host buffer is as large as the largest micro-batch that its guest may send there.
    """
    own = {stage: sizes.saved_bytes[stage] for stage in schedule.layout.stages_of(rank.place)}
    ones = dict.fromkeys(own, 1)
    buffers = num_buffers_for(schedule, rank.place)
    hosted = sum(
        count * max(sizes.saved_bytes[stage] for stage in schedule.layout.stages_of(guest))
        for guest, count in buffers.items()
    )
    received = max((mark.received_bytes for mark in rank.marks), default=0)
    marked = [mark.after_input_bytes for mark in rank.marks]
    between = {stage: max(of_mark.get(stage, 0) for of_mark in marked) // parts for stage in set().union(*marked)}
    num_bytes = own_peak(schedule, rank.place, own, own, received, between, sizes.shard_bytes) + hosted
    return own_peak(schedule, rank.place, ones, ones, 0, {}) + sum(buffers.values()), num_bytes


def _need(rank: RankHeld, schedule: Schedule, sizes: _Sizes) -> StageNeed:
    count, activations = _activations(rank, schedule, sizes)
    other = _other_bytes(rank)
    return StageNeed(
        rank,
        _fullest(rank),
        microbatch_bytes=max(sizes.saved_bytes[stage] for stage in schedule.layout.stages_of(rank.place)),
        logits_bytes=max(mark.logits_bytes for mark in rank.marks),
        shard_bytes=sizes.shard_bytes,
        other_bytes=other,
        peak_microbatches=count,
        need_bytes=rank.besides_bytes + activations + (other or 0),
    )


def _fullest(rank: RankHeld) -> MemoryMark:
    """Return the mark at which memory ran out, or else the largest."""
    out = next((mark for mark in rank.marks if mark.out_of_memory), None)
    return out or max(rank.marks, key=lambda mark: mark.activations_bytes)


def _ways(program: ScheduleConfig, ranks: Mapping[int, RankHeld], sizes: _Sizes) -> tuple[ShortageRemedy, ...]:
    """As it was; balanced; with half the micro-batch; with both."""
    ways = [("as it was run", program, 1), ("with --bpipe", _balanced(program), 1)]
    batch = next((rank.micro_batch for rank in ranks.values() if rank.micro_batch), None)
    if batch is not None and batch % 2 == 0:
        halved = replace(program, num_microbatches=2 * program.num_microbatches)
        with_flag = f"with --micro-batch-size {batch // 2}"
        ways += [(with_flag, halved, 2), (f"{with_flag} and --bpipe", _balanced(halved), 2)]
    return tuple(_way(name, config, ranks, sizes, parts) for name, config, parts in ways if config is not None)


def _balanced(program: ScheduleConfig) -> ScheduleConfig | None:
    """Return the program balanced; None if it is already, or balancing would move nothing."""
    config = replace(program, balance=BalanceConfig())
    moves = program.balance is None and any(slot.transfers for row in build(config).ranks for slot in row)
    return config if moves else None


def _way(
    name: str, program: ScheduleConfig, ranks: Mapping[int, RankHeld], sizes: _Sizes, parts: int
) -> ShortageRemedy:
    """Return the need of the stage that is nearest to its limit, if micro-batches are split in `parts`.

    What else was allocated shrinks like activations.
    """
    schedule = build(program)
    saved = {stage: size // parts for stage, size in sizes.saved_bytes.items()}
    smaller = _Sizes(saved, sizes.shard_bytes // parts)
    needs = []
    for rank in ranks.values():
        need = rank.besides_bytes + _activations(rank, schedule, smaller, parts)[1] + (_other_bytes(rank) or 0) // parts
        needs.append((need - (rank.limit_bytes or 0), need, rank))
    _, need, rank = max(needs, key=lambda entry: entry[:2])
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
    held: Held, failed: RankHeld | None, stages: tuple[StageNeed, ...], ways: tuple[ShortageRemedy, ...]
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
            "None of these fits: recompute more, or split the model further. `bpipe plan` compares such configurations."
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
