"""What an action holds and gives back: THE memory rule.

    F           takes what it saves                   B           gives all of it back
    I           gives back what W does not need,      W           gives back what is left
                or takes what W needs beyond it
    LOAD, HOST  take what a transfer moves            EVICT, RETURN  give it back
    S           takes what a shard of the vocabulary holds of a micro-batch, its logits above all;  T gives it back

If micro-batches are cut into slices, a stage's slices may differ in size. Besides what each slice saves, a stage keeps
the keys and values of the whole micro-batch, of which every slice writes a part that later ones read:

    F of the first slice     takes room for all keys and values
    B, I of the last slice   takes room for all their gradients
    B, I of the first slice  gives both back; neither moves in a transfer

An action takes memory when it starts and gives it back when it is over, in slots of the grid as in seconds. Other
actions hold nothing. Counts of micro-batches follow the same rule with ones for bytes, and none for shards.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple, Protocol

from bpipe.schedule.action import Action, Kind
from bpipe.schedule.schedule import Schedule

# Share by which host buffers exceed the largest size seen, if micro-batches differ in size. What a router sends to an
# expert changes from step to step, and a buffer that grows costs its room again for an iteration.
RESERVE = Fraction(1, 8)


class Transfers(NamedTuple):
    """Counts of the transfers of one rank: the first two as evictor, the others as acceptor."""

    evictions: int
    loads: int
    hosts: int
    returns: int


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Memory of one micro-batch, or slice, of a stage.

    Attributes:
        saved_bytes: Held from the forward on.
        moved_bytes: Part of these that a transfer moves.
        after_input_bytes: Held from the end of a backward's first half, I, to the end of its second, W. May exceed what
            was saved: W also needs the gradients of outputs, which tensor parallelism may have gathered.
    """

    saved_bytes: int
    moved_bytes: int
    after_input_bytes: int


@dataclass(frozen=True, slots=True)
class KeptMemory:
    """Memory that a stage keeps for slices: all keys and values and, while its backwards run, their gradients."""

    keys_bytes: int
    gradients_bytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    """The rule for stages of these sizes.

    A place is a stage or, if sizes are by slice, a slice of a stage (`place`).

    Attributes:
        stages: Sizes by place.
        unit: Unit of the sizes, for messages.
        shard_bytes: What each rank's shard of the vocabulary holds from S to T.
        reserved: Whether micro-batches may differ in size, so that host buffers have a reserve.
        slices: Slices of a micro-batch by which sizes are given.
        kept: What each stage keeps for its slices.
        takes: `takes[kind][place]` at the start of an action; a kind that never takes anything has no entry.
        gives: `gives[kind][place]` at its end, likewise.
        changes: Both numbers for every kind.
    """

    stages: tuple[StageMemory, ...]
    unit: str = "bytes"
    shard_bytes: int = 0
    reserved: bool = False
    slices: int = 1
    kept: tuple[KeptMemory, ...] = ()
    takes: Mapping[Kind, Sequence[int]] = field(init=False, repr=False, compare=False)
    gives: Mapping[Kind, Sequence[int]] = field(init=False, repr=False, compare=False)
    changes: Mapping[Kind, Sequence[tuple[int, int]]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        saved, moved, after = (
            [getattr(stage, name) for stage in self.stages] for name in StageMemory.__dataclass_fields__
        )
        takes = {Kind.FORWARD: saved, Kind.LOAD: moved, Kind.HOST: moved}
        gives = {Kind.BACKWARD: saved, Kind.BACKWARD_WEIGHT: after, Kind.EVICT: moved, Kind.RETURN: moved}
        if after != saved:
            takes[Kind.BACKWARD_INPUT] = [max(0, stage.after_input_bytes - stage.saved_bytes) for stage in self.stages]
            gives[Kind.BACKWARD_INPUT] = [max(0, stage.saved_bytes - stage.after_input_bytes) for stage in self.stages]
        for stage, kept in enumerate(self.kept):
            self._keep(kept, stage * self.slices, takes, gives)
        if self.shard_bytes:
            # There are no more ranks than stages.
            takes[Kind.SHARD_FORWARD] = gives[Kind.SHARD_BACKWARD] = [self.shard_bytes] * len(self.stages)
        zeros = [0] * len(self.stages)
        changes = {kind: list(zip(takes.get(kind, zeros), gives.get(kind, zeros), strict=True)) for kind in Kind}
        for name, table in (("takes", takes), ("gives", gives), ("changes", changes)):
            object.__setattr__(self, name, table)

    def _keep(self, kept: KeptMemory, first: int, takes: dict[Kind, list[int]], gives: dict[Kind, list[int]]) -> None:
        """Add what a stage keeps whose first slice's place is `first`."""

        def add(table: dict[Kind, list[int]], kind: Kind, place: int, num_bytes: int) -> None:
            # Several kinds may share one list, so it is copied.
            row = table[kind] = list(table.get(kind, [0] * len(self.stages)))
            row[place] += num_bytes

        add(takes, Kind.FORWARD, first, kept.keys_bytes)
        for kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            add(takes, kind, first + self.slices - 1, kept.gradients_bytes)
            add(gives, kind, first, kept.keys_bytes + kept.gradients_bytes)

    def place(self, action: Action) -> int:
        """Return where the tables have an action's sizes."""
        return action.stage * self.slices + action.microbatch % self.slices

    def size(self, stage: int, microbatch: int) -> StageMemory:
        """Return the sizes of a stage's micro-batch, or slice."""
        return self.stages[stage * self.slices + microbatch % self.slices]

    def sizes(self, stage: int) -> tuple[StageMemory, ...]:
        """Return the sizes of a stage's micro-batches, or of its slices."""
        return self.stages[stage * self.slices : (stage + 1) * self.slices]

    def buffer_bytes(self, stages: Iterable[int]) -> int:
        """Return the size of a host buffer for transfers of these stages."""
        largest = max((size.moved_bytes for stage in stages for size in self.sizes(stage)), default=0)
        return largest + int(largest * RESERVE) if self.reserved else largest

    def check(self, num_stages: int) -> None:
        """Raise ValueError unless these are sizes of `num_stages` stages, and transfers move no more than is saved."""
        if len(self.stages) != num_stages * self.slices:
            count = len(self.stages) // self.slices
            raise ValueError(f"sizes of {count} stages, but the schedule has {num_stages}: give one for each stage")
        if len(self.kept) not in (0, num_stages):
            raise ValueError(
                f"{len(self.kept)} stages keep keys and values, but the schedule has {num_stages}: "
                "give one for each stage, or none"
            )
        for place, size in enumerate(self.stages):
            stage = place // self.slices
            if not 0 <= size.moved_bytes <= size.saved_bytes:
                limits = f"between 0 and saved_bytes {size.saved_bytes}"
                raise ValueError(f"stage {stage}: moved_bytes {size.moved_bytes} must lie {limits}")
            if size.after_input_bytes < 0:
                raise ValueError(
                    f"stage {stage}: after_input_bytes is {size.after_input_bytes}, but must be at least 0"
                )
        if self.shard_bytes < 0:
            raise ValueError(f"shard_bytes is {self.shard_bytes}, but must be at least 0")


def memory_of(
    saved_bytes: Sequence[int],
    moved_bytes: Sequence[int] | None = None,
    after_input_bytes: Sequence[int] | None = None,
    shard_bytes: int = 0,
) -> Memory:
    """Return the rule for sizes by stage.

    By default a transfer moves all that is saved, W needs all of it, and shards hold nothing. What is not moved stays
    on its own rank while the micro-batch is away; the acceptor holds only the moved part.
    """
    moved = saved_bytes if moved_bytes is None else moved_bytes
    after = saved_bytes if after_input_bytes is None else after_input_bytes
    for name, sizes in (("moved_bytes", moved), ("after_input_bytes", after)):
        if len(sizes) != len(saved_bytes):
            raise ValueError(
                f"{name} has {len(sizes)} entries, saved_bytes {len(saved_bytes)}: give one for each stage"
            )
    return Memory(tuple(map(StageMemory, saved_bytes, moved, after)), shard_bytes=shard_bytes)


@lru_cache(maxsize=16)
def counting(num_stages: int) -> Memory:
    """Return the rule that counts micro-batches, whole until their W ends."""
    return Memory((StageMemory(1, 1, 1),) * num_stages, "micro-batches")


def plain(number: int | Fraction) -> int | float:
    """Return a number as it is written, without a decimal point if it is whole."""
    return int(number) if number == int(number) else float(number)


def live_counts(schedule: Schedule, rank: int) -> tuple[int, ...]:
    """Return how many chunk micro-batches the rank holds in each slot, hosted ones included."""
    return live_bytes(schedule, rank, counting(schedule.num_stages))


def live_bytes(schedule: Schedule, rank: int, memory: Memory) -> tuple[int, ...]:
    """Return the bytes of activations that the rank holds in each slot."""
    changes, slices = memory.changes, memory.slices
    held = 0
    curve = []
    for slot in schedule.ranks[rank]:
        freed = 0
        compute = slot.compute
        if compute is not None:
            takes, freed = changes[compute.kind][compute.stage * slices + compute.microbatch % slices]
            held += takes
        others = slot.transfers if slot.overlapped is None else (slot.overlapped, *slot.transfers)
        for action in others:
            takes, gives = changes[action.kind][memory.place(action)]
            held += takes
            freed += gives
        curve.append(held)
        held -= freed
    return tuple(curve)


class TimedAction(Protocol):
    """An action and when it ran, by any clock."""

    @property
    def action(self) -> Action: ...
    @property
    def start_s(self) -> int | float | Fraction: ...
    @property
    def end_s(self) -> int | float | Fraction: ...


def changes_in_time(rows: Iterable[TimedAction], memory: Memory) -> list[tuple[int | float | Fraction, int]]:
    """Return one rank's changes of memory in order of time; at one instant it is given back first, as what starts
    waited."""
    changes: list[tuple[int | float | Fraction, int]] = []
    takes, gives = memory.takes, memory.gives
    for row in rows:
        action = row.action
        if action.kind in takes:
            changes.append((row.start_s, takes[action.kind][memory.place(action)]))
        if action.kind in gives:
            changes.append((row.end_s, -gives[action.kind][memory.place(action)]))
    return sorted(changes)


def peak_of_order(order: Iterable[Action], memory: Memory) -> int:
    """Return the most bytes that one rank's computations hold, in this order and without transfers."""
    held = peak = 0
    for action in order:
        takes, gives = memory.changes[action.kind][memory.place(action)]
        peak = max(peak, held + takes)
        held += takes - gives
    return peak


def peak_counts(schedule: Schedule) -> tuple[int, ...]:
    """Return the most chunk micro-batches each rank ever holds."""
    return tuple(max(live_counts(schedule, rank), default=0) for rank in range(schedule.num_ranks))


def peak_bytes(schedule: Schedule, memory: Memory) -> tuple[int, ...]:
    """Return the most bytes of activations each rank ever holds."""
    memory.check(schedule.num_stages)
    return tuple(max(live_bytes(schedule, rank, memory)) for rank in range(schedule.num_ranks))


def num_transfers(schedule: Schedule, rank: int) -> Transfers:
    """Return how many evictions and loads the rank makes, and how many it answers."""
    kinds = Counter(transfer.kind for _, transfer in schedule.transfers(rank))
    return Transfers(kinds[Kind.EVICT], kinds[Kind.LOAD], kinds[Kind.HOST], kinds[Kind.RETURN])


def moves_anything(schedule: Schedule) -> bool:
    """Whether any rank evicts."""
    return any(num_transfers(schedule, rank).evictions for rank in range(schedule.num_ranks))
