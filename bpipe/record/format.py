"""Say what a run writes down of itself: every file, key and column, once.

In: nothing. Out: a class a kind of line. Reads no file.

    DIR/run.json              RunInfo: what is the same for all ranks; rank 0, whole, once
    DIR/record_00003.jsonl    RankHeader, then an Iteration a line, each written at once: a killed run leaves whole lines
    DIR/memory_00003.jsonl    MemoryHeader, then a MemoryMark whenever more was held than ever before, and for the error that ended the run
    DIR/iterations.jsonl      TrainingStep: the last rank, a line a step with its exact loss and gradient norm
    DIR/rank_00003.json       RankSummary: peaks over all iterations, measured and predicted; of a rank that ended well
    DIR/failure.json          FirstFailure: of a run that failed, the rank that did first, and what of

A field with its rule is the key that `write` writes and `read` reads; a column of the rows is a field of `Row`. So
whoever adds one adds it here and where it is filled. Keys are added and never renamed; what was added later has a
default, so that older records are still read. `run` is one name in all files of a run.

A *place* is a rank's position in its pipeline, 0 to p-1; with data or tensor parallelism there are several pipelines.
Times of a row are seconds from its iteration's `begin_s`, which is unix time on rank 0's clock.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from bpipe.record.keys import (
    Flag,
    Rule,
    Text,
    by_name,
    each,
    keys_of,
    line,
    number,
    whole,
)
from bpipe.record.program import Program
from bpipe.schedule.action import Action
from bpipe.schedule.files.text import read_action
from bpipe.values import LARGEST, LARGEST_BYTES, a_number, a_text, a_whole, an_object

VERSION = 1

# Transports whose copies tell when they really ended.
ONE_SIDED = frozenset(("peer", "host"))
# A wait shorter than this found the transfer over: it is what asking costs.
SHORTEST_WAIT_S = 5e-5
# A host sets its clock to rank 0's to well below this.
CLOCK_ERROR_S = 1.0
# Two marks of one stream.
_TIMER_ERROR_S = 1e-3
# More ranks than any machine has: what is listed rank by rank must not grow with a damaged number.
MOST_RANKS = 1_000_000


@dataclass(frozen=True, slots=True)
class PerRank:
    """Files of one kind, one per rank."""

    stem: str
    suffix: str

    def path(self, folder: Path, rank: int) -> Path:
        return folder / f"{self.stem}_{rank:05d}{self.suffix}"

    def rank(self, path: Path) -> int | None:
        """Return the rank whose file it is, by its name; None for another kind of file."""
        match = re.fullmatch(rf"{self.stem}_([0-9]+){re.escape(self.suffix)}", path.name)
        return None if match is None else int(match.group(1))

    def files(self, folder: Path) -> list[Path]:
        """Return the files that are there, in the order of their names."""
        return sorted(file for file in folder.iterdir() if self.rank(file) is not None) if folder.is_dir() else []


RUN, STEPS, FAILURE = "run.json", "iterations.jsonl", "failure.json"
RECORD, MEMORY, SUMMARY = PerRank("record", ".jsonl"), PerRank("memory", ".jsonl"), PerRank("rank", ".json")

# What a value of a file may be.


def _by_stage(found: Any, name: str) -> dict[int, int]:
    sizes = an_object(found, name)
    if not all(re.fullmatch("[0-9]{1,9}", stage) for stage in sizes):
        raise ValueError(f"{name} has {next(iter(sizes))!r:.40}: its keys must be stages")
    return {int(stage): a_whole(size, f"{name} of stage {stage}", 0, LARGEST_BYTES) for stage, size in sizes.items()}


def _microbatch(found: Any, _: str) -> tuple[int, int, int]:
    if not isinstance(found, list) or len(found) != 3:
        raise ValueError(f"{str(found)[:40]} is not a stage, a micro-batch and bytes")
    stage, microbatch, num_bytes = found
    return (
        a_whole(stage, "a stage"),
        a_whole(microbatch, "a micro-batch"),
        a_whole(num_bytes, "its bytes", 0, LARGEST_BYTES),
    )


_read_action = lru_cache(maxsize=1 << 18)(read_action)

Rank = Annotated[int, whole(0, MOST_RANKS)]
Ranks = Annotated[int, whole(1, MOST_RANKS)]
Whole = Annotated[int, whole(0, LARGEST)]
Bytes = Annotated[int, whole()]
BytesByStage = Annotated[Mapping[int, int], Rule(_by_stage)]
Seconds = Annotated[float, number()]
_link_ranks = each(whole(0, MOST_RANKS), "a rank of a link")
LinkRanks = Annotated[
    frozenset[int], Rule(lambda value, _: frozenset(_link_ranks.read(value, "ranks of a link")), sorted)
]
SpeedByName = Annotated[Mapping[str, float], by_name(number(1, 1e18), "{key} of a link")]
ReasonByName = Annotated[Mapping[str, str], by_name(Rule(a_text), "why {key} was refused")]
# What a row's columns may be.
Start = Annotated[float, number(-CLOCK_ERROR_S)]
End = Annotated[float, number(-LARGEST)]
Wait = Annotated[float, Rule(lambda value, name: max(0.0, a_number(value, name, -_TIMER_ERROR_S)))]
HostTime = Annotated[float, Rule(lambda value, _: a_number(value, "host time", -CLOCK_ERROR_S))]
ActionText = Annotated[Action, Rule(lambda value, _: _read_action(a_text(value, "an action")), str)]


class Row(NamedTuple):
    """One action of one rank.

    `wait_s`: how long computation stood still for this transfer; `live_bytes`: the most held meanwhile, `left_bytes`:
    what was held at its end; `slot`: the number of the host buffer.
    """

    action: ActionText
    start_s: Start
    end_s: End
    wait_s: Wait = 0.0
    host_start_s: HostTime | None = None
    host_end_s: HostTime | None = None
    bytes: Bytes | None = None
    slot: Whole | None = None
    live_bytes: Bytes | None = None
    left_bytes: Bytes | None = None

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


COLUMNS = keys_of(Row)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """Speed of a pair's link when it was probed at the start, by transport, and why others were refused."""

    ranks: LinkRanks
    transport: Text | None = None
    bytes_per_s: SpeedByName
    refused: ReasonByName = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Facts of the whole run. `flops_per_iteration` are those of all ranks, `peak_flops` one device's per second.

    `synchronous`: it waited for every transfer where it started it.
    """

    FORMAT: ClassVar[str] = "bpipe-run"

    run: Text | None = None
    started: Text | None = None
    world_size: Ranks | None = None
    num_pipelines: Ranks | None = None
    balanced: Flag = False
    synchronous: Flag = False
    device: Text | None = None
    torch: Text | None = None
    megatron_core: Text | None = None
    megatron_core_path: Text | None = None
    flops_per_iteration: Annotated[float, number(0, 1e40)] | None = None
    peak_flops: Annotated[float, number(1, 1e20)] | None = None
    peak_source: Text | None = None
    links: Annotated[tuple[LinkSpeed, ...], each(line(LinkSpeed, "a link"))] = ()

    @property
    def versions(self) -> tuple[tuple[str, str], ...]:
        """Versions of what ran, as far as they are known."""
        named = {
            "torch": self.torch,
            "megatron_core": self.megatron_core,
            "megatron_core_path": self.megatron_core_path,
        }
        return tuple((name, version) for name, version in named.items() if version)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHeader:
    """Header of a rank's record. `partner` is a rank of the world, like `rank`. `cores` are those it may use on `host`.

    Ranks of one machine that share fewer cores than they are slow each other down, which no prediction knows.
    """

    FORMAT: ClassVar[str] = "bpipe-record"

    run: Text | None = None
    rank: Rank
    pipeline: Rank
    place: Rank
    host: Text = ""
    device: Text = ""
    cores: Ranks | None = None
    transport: Text | None = None
    partner: Rank | None = None
    weights_bytes: Bytes | None = None
    limit_bytes: Bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One rank's part of one iteration. `saved_bytes`, `moved_bytes` and `kept_bytes` are of one micro-batch, by stage.

    `after_input_bytes` too: what is held between the halves of a backward, of stages whose backwards have any.
    `shard_bytes`: what a shard of the vocabulary holds of one micro-batch between its passes, S and T. `host_bytes`: of
    its host buffers for others, on its device; `own_bytes`: of those for itself in its node's memory. `kept_bytes`: all
    that a forward keeps for its backward, of stages that leave, as the run counted it in its first iteration. Where
    micro-batches differ in size these are of the largest. Such as were to leave and found too little room have
    `stayed`, and by so many at once and so many bytes the bound was `passed` at most.
    """

    iteration: Whole
    program: Program
    begin_s: Seconds
    elapsed_s: Seconds
    saved_bytes: BytesByStage
    moved_bytes: BytesByStage = field(default_factory=dict)
    after_input_bytes: BytesByStage = field(default_factory=dict)
    kept_bytes: BytesByStage = field(default_factory=dict)
    kept_counted_by: Text | None = None
    shard_bytes: Bytes = 0
    received_bytes: Bytes = 0
    host_bytes: Bytes = 0
    own_bytes: Bytes = 0
    stayed_microbatches: Whole = 0
    stayed_bytes: Bytes = 0
    passed_microbatches: Whole = 0
    passed_bytes: Bytes = 0
    device_peak_bytes: Bytes | None = None
    # In the file these are two keys: the columns' names, and the rows' values.
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord(RankHeader):
    """One rank and its iterations, by number."""

    iterations: Mapping[int, Iteration]

    def ended(self, row: Row) -> bool:
        """Return whether the row's end is the transfer's own.

        A two-sided transport only says that it had ended when somebody asked.

        Then the end is its own where the one who asked had to wait for it.
        """
        return self.transport in ONE_SIDED or row.wait_s > SHORTEST_WAIT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """One step of the training. `numbers`: each loss and the gradient norm, to the bit; None where there was none."""

    iteration: Whole
    numbers: Mapping[str, float | None] = field(default_factory=dict)
    skipped: Whole | None = None
    elapsed_s: Seconds | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """One rank over all of its iterations.

    Bytes of activations and of the host buffers for the partner; transfers are per iteration.

    `host_memory_buffers`, `own_bytes`: the host buffers in its own node's memory, of which its device has nothing.
    `moved_fraction` is the smallest of its stages': what of a forward's activations leaves with its micro-batch. Where
    micro-batches differ in size: how many of all iterations `stayed` because they found too little room, and their
    bytes; by how much at most the bound was `passed` at once; the largest by stage that was to leave, `largest_bytes`,
    as a host buffer takes it; and how often rooms grew. `keys_bytes`: of micro-batches cut into slices, the keys,
    values and their gradients that it kept beside all this. `verified_*`: iterations in which everything that left the
    rank was checked and came back as it left, and how much that was.
    """

    run: Text | None = None
    rank: Rank
    stage: Rank | None = None
    pipeline: Rank | None = None
    balanced: Flag | None = None
    num_microbatches: Whole | None = None
    peak_microbatches: Whole | None = None
    peak_bytes: Bytes
    predicted_microbatches: Whole | None = None
    predicted_bytes: Bytes | None = None
    evictions: Whole | None = None
    loads: Whole | None = None
    own_buffers: Whole = 0
    own_bytes: Bytes = 0
    moved_fraction: Annotated[float, number(0, 1)] | None = None
    stayed_microbatches: Whole = 0
    stayed_bytes: Bytes = 0
    passed_microbatches: Whole = 0
    passed_bytes: Bytes = 0
    largest_bytes: BytesByStage = field(default_factory=dict)
    times_grown: Whole = 0
    keys_bytes: Bytes = 0
    predicted_keys_bytes: Bytes = 0
    verified_iterations: Whole = 0
    verified_microbatches: Whole = 0
    verified_storages: Whole = 0
    verified_bytes: Bytes = 0


@dataclass(frozen=True, slots=True)
class Verified:
    """Iterations of a whole run in which all that moved was checked and came back as it left, and how much that was."""

    iterations: int
    microbatches: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstFailure:
    """The rank that failed first, by the ranks' own account."""

    rank: Rank
    cause: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryHeader:
    """One rank. Besides activations; `optimizer_to_come_bytes` is what its optimizer had not allocated before the
    first iteration."""

    FORMAT: ClassVar[str] = "bpipe-memory"

    run: Text | None = None
    rank: Rank
    pipeline: Rank
    place: Rank
    host: Text = ""
    device: Text = ""
    limit_bytes: Bytes | None = None
    micro_batch: Whole | None = None
    weights_bytes: Bytes
    gradients_bytes: Bytes
    optimizer_bytes: Bytes
    optimizer_to_come_bytes: Bytes | None = None

    @property
    def besides_bytes(self) -> int:
        """All but activations, the optimizer's state included that comes with the first step."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + (self.optimizer_to_come_bytes or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryMark:
    """Memory of a rank at one time: when an `action` had run, or, with an `error`, while it ran.

    `microbatches`: stage, number, bytes.

    `shard_bytes`: what its shard of the vocabulary holds of one micro-batch between its passes, 0 where none was seen
    yet; `in_shards_bytes`: what those between their passes hold.
    """

    iteration: Whole
    action: Text | None = None
    error: Text | None = None
    out_of_memory: Flag = False
    program: Program | None = None
    microbatches: Annotated[tuple[tuple[int, int, int], ...], each(Rule(_microbatch))]
    saved_bytes: BytesByStage
    moved_bytes: BytesByStage = field(default_factory=dict)
    after_input_bytes: BytesByStage = field(default_factory=dict)
    received_bytes: Bytes = 0
    host_bytes: Bytes = 0
    logits_bytes: Bytes = 0
    shard_bytes: Bytes = 0
    in_shards_bytes: Bytes = 0
    allocated_bytes: Bytes | None = None
    reserved_bytes: Bytes | None = None

    @property
    def activations_bytes(self) -> int:
        return sum(size for _, _, size in self.microbatches) + self.in_shards_bytes + self.host_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHeld(MemoryHeader):
    """One rank and what it held, in the order of time."""

    marks: tuple[MemoryMark, ...]

    @property
    def end(self) -> MemoryMark | None:
        """The error that ended this rank's training, where it was written down."""
        return next((mark for mark in reversed(self.marks) if mark.error is not None), None)


@dataclass(frozen=True, slots=True)
class Held:
    """Memory records of the ranks of a folder."""

    folder: Path
    ranks: tuple[RankHeld, ...]
    failure: FirstFailure | None


@dataclass(frozen=True, slots=True)
class Run:
    """A whole folder. `step_s[iteration]` is a training step with its reduction and update; `run_peak_bytes[rank]`
    the peak over all iterations, recorded or not. `notes` tell what is missing, `verified` what was checked of what
    moved."""

    folder: Path
    info: RunInfo
    ranks: tuple[RankRecord, ...]
    step_s: Mapping[int, float]
    run_peak_bytes: Mapping[int, int]
    notes: tuple[str, ...]
    verified: Verified | None = None
