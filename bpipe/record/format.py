"""What a run writes down about itself: every file, key and column, defined once.

    DIR/run.json              RunInfo: what is the same for all ranks; written once, by rank 0
    DIR/record_00003.jsonl    RankHeader, then an Iteration per line, written at once: a killed run leaves whole lines
    DIR/memory_00003.jsonl    MemoryHeader, then a MemoryMark for every new maximum, and for the error that ended the run
    DIR/iterations.jsonl      TrainingStep: written by the last rank, one line per step, with exact loss and gradient norm
    DIR/rank_00003.json       RankSummary: peaks over all iterations, measured and predicted, of a rank that ended well
    DIR/failure.json          FirstFailure: the rank of a failed run that failed first, and why

A field of type `Annotated[int, Rule(...)]`, or of such a type or None, is a key of the same name that `write` writes
and `read` reads. A key without a default is required; of the others null and absence mean the default. A field without
a rule is no key. A column of the rows is a field of `Row`. To add one, add it here and where it is filled. Keys are
added and never renamed; later ones have a default, so that older records can still be read. `run` is the same name in
all files of a run.

A *place* is a rank's position in its pipeline, 0 to p-1; with data or tensor parallelism there are several pipelines.
Times of a row are seconds from its iteration's `begin_s`, which is unix time on rank 0's clock.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from enum import Enum
from fractions import Fraction
from functools import cache, lru_cache
from itertools import starmap
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, get_args, get_type_hints

from bpipe.balance.budget import ActivationBudget
from bpipe.balance.config import BalanceConfig, name_of, named_balance
from bpipe.balance.deadlines import Windows
from bpipe.build import ScheduleConfig
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.families.family import UnitCosts
from bpipe.schedule.files.text import read_action, read_costs
from bpipe.schedule.layout import Vocabulary
from bpipe.schedule.memory import KeptMemory, memory_of
from bpipe.schedule.program import Exchange
from bpipe.values import LARGEST, LARGEST_BYTES, a_flag, a_list, a_number, a_text, a_whole, an_object, printable


@dataclass(frozen=True, slots=True)
class Rule:
    """How a value is read and written: `read(value, name)` raises ValueError; `write` returns the JSON form."""

    read: Callable[[Any, str], Any]
    write: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a line, or one column of its rows."""

    name: str
    rule: Rule
    needed: bool
    default: Any


@cache
def keys_of(kind: type) -> tuple[Key, ...]:
    """Return the keys in the order of the class."""
    rules = {name: _rule(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}
    defaults = _defaults(kind)
    return tuple(
        Key(name, rule, name not in defaults, defaults.get(name)) for name, rule in rules.items() if rule is not None
    )


def _defaults(kind: type) -> dict[str, Any]:
    if not is_dataclass(kind):
        return dict(kind._field_defaults)  # type: ignore[attr-defined]
    defaults = {}
    for entry in fields(kind):
        if entry.default is not MISSING:
            defaults[entry.name] = entry.default
        elif entry.default_factory is not MISSING:
            defaults[entry.name] = entry.default_factory()
    return defaults


def _rule(hint: Any) -> Rule | None:
    """Return the rule in a type, or in a part of it."""
    own = next((extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Rule)), None)
    return own or next((rule for rule in map(_rule, get_args(hint)) if rule is not None), None)


def values_of(kind: type, value: object, name: str, prefix: str = "") -> dict[str, Any]:
    """Return the arguments of a `kind` that an object of a file has. Unknown keys are ignored: later versions add some."""
    return read_keys(keys_of(kind), an_object(value, name), prefix)


def read_keys(keys: Iterable[Key], entries: Mapping[str, object], prefix: str) -> dict[str, Any]:
    """Return the values of these keys by their names, without those that are absent or null."""
    values = {}
    for key in keys:
        value = entries.get(key.name)
        if value is not None:
            values[key.name] = key.rule.read(value, prefix + key.name)
        elif key.needed:
            raise ValueError(f"{key.name!r} is missing")
    return values


def written(value: Any) -> dict[str, Any]:
    """Return a line's keys and values as JSON has them."""
    kind: type = type(value)
    fields = ((key, getattr(value, key.name)) for key in keys_of(kind))
    return {key.name: None if field is None else key.rule.write(field) for key, field in fields}


# Rules for what files hold.


def whole(least: int = 0, most: int = LARGEST_BYTES) -> Rule:
    return Rule(lambda value, name: a_whole(value, name, least, most))


def number(least: float = 0, most: float = LARGEST) -> Rule:
    return Rule(lambda value, name: a_number(value, name, least, most))


def each(rule: Rule, element: str | None = None) -> Rule:
    """Read a list as a tuple. `element`: how an error calls an element, by default like the list."""
    return Rule(
        lambda values, name: tuple(rule.read(value, element or name) for value in a_list(values, name)),
        lambda values: [rule.write(value) for value in values],
    )


def line(kind: Callable[..., Any], name: str) -> Rule:
    """Read an object with keys of its own as a `kind`."""
    return Rule(lambda value, _: kind(**values_of(kind, value, name)), written)  # type: ignore[arg-type]


def by_name(rule: Rule, element: str) -> Rule:
    """Read an object whose keys are names. `element`: how an error calls a value, with `{key}` for its key."""

    def read(values: object, name: str) -> dict[str, Any]:
        pairs = an_object(values, name).items()
        return {printable(key): rule.read(value, element.format(key=key)) for key, value in pairs}

    return Rule(read, dict)


Text = Annotated[str, Rule(a_text)]
Flag = Annotated[bool, Rule(a_flag)]


_Sizes = Annotated[tuple[int, ...], each(whole())]
_Seconds = Annotated[tuple[float, ...], each(number())]


@dataclass(frozen=True, slots=True)
class _BudgetKeys:
    """Keys of an `ActivationBudget`, in bytes of one micro-batch or, with `slices`, of one slice."""

    room_bytes: _Sizes  # by rank
    saved_bytes: _Sizes  # by stage, the slices of a stage next to each other; so are the next two
    moved_bytes: _Sizes
    after_input_bytes: _Sizes
    shard_bytes: Annotated[int, whole()] = 0  # of a shard of the vocabulary
    reserved: Flag = False  # whether host buffers have a reserve
    slices: Annotated[int, whole(1)] = 1
    keys_bytes: _Sizes = ()  # keys and values that are kept, by stage
    gradients_bytes: _Sizes = ()  # their gradients


def _read_budget(value: object, name: str) -> ActivationBudget:
    keys = _BudgetKeys(**values_of(_BudgetKeys, value, name, f"{name}."))
    memory = memory_of(keys.saved_bytes, keys.moved_bytes, keys.after_input_bytes, keys.shard_bytes)
    kept = tuple(starmap(KeptMemory, zip(keys.keys_bytes, keys.gradients_bytes, strict=True)))
    return ActivationBudget(keys.room_bytes, replace(memory, reserved=keys.reserved, slices=keys.slices, kept=kept))


def _write_budget(budget: ActivationBudget) -> dict[str, Any]:
    memory = budget.memory
    return written(
        _BudgetKeys(
            room_bytes=budget.room_bytes,
            saved_bytes=tuple(size.saved_bytes for size in memory.stages),
            moved_bytes=tuple(size.moved_bytes for size in memory.stages),
            after_input_bytes=tuple(size.after_input_bytes for size in memory.stages),
            shard_bytes=memory.shard_bytes,
            reserved=memory.reserved,
            slices=memory.slices,
            keys_bytes=tuple(kept.keys_bytes for kept in memory.kept),
            gradients_bytes=tuple(kept.gradients_bytes for kept in memory.kept),
        )
    )


@dataclass(frozen=True, slots=True)
class _WindowsKeys:
    """Keys of `Windows`, in seconds."""

    lasts_s: Annotated[
        Mapping[str, tuple[float, ...]], by_name(each(number()), "{key} of what lasts")
    ]  # by kind, stage
    hop_s: Annotated[float, number()]  # of a message
    inside_s: _Seconds  # of a stage's transfer in a node, then between nodes
    between_s: _Seconds
    nodes: _Sizes = ()
    own_s: _Seconds = ()  # of a stage's transfer to its node's memory
    slices: Annotated[int, whole(1)] = 1


def _read_windows(value: object, name: str) -> Windows:
    keys = values_of(_WindowsKeys, value, name, f"{name}.")
    lasts = tuple((Kind(kind), seconds) for kind, seconds in keys.pop("lasts_s").items())
    return Windows(lasts, **keys)


def _write_windows(windows: Windows) -> dict[str, Any]:
    lasts = {kind.value: tuple(map(float, seconds)) for kind, seconds in windows.lasts_s}
    inside, between, own = (
        tuple(map(float, seconds)) for seconds in (windows.inside_s, windows.between_s, windows.own_s)
    )
    return written(_WindowsKeys(lasts, float(windows.hop_s), inside, between, windows.nodes, own, windows.slices))


def _one_of(kind: type[Enum]) -> Rule:
    def read(value: object, name: str) -> Enum:
        members = {member.value: member for member in kind}
        if value not in members:
            raise ValueError(f"{name}: {value!r} is none of {', '.join(members)}")
        return members[str(value)]

    return Rule(read, lambda member: member.value)


def _read_costs(value: object, name: str) -> UnitCosts:
    try:
        return UnitCosts(*read_costs(a_text(value, name), 4, 4))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _write_costs(costs: UnitCosts) -> str:
    return ",".join(str(Fraction(getattr(costs, field.name))) for field in fields(UnitCosts))


# The rule of a field, by its type.
_RULES: dict[Any, Rule] = {
    str: Rule(a_text),
    bool: Rule(a_flag),
    int: whole(1, LARGEST),
    tuple[int, ...]: each(whole(0, LARGEST)),
    UnitCosts: Rule(_read_costs, _write_costs),
    Exchange: _one_of(Exchange),
    Vocabulary: _one_of(Vocabulary),
    ActivationBudget: Rule(_read_budget, _write_budget),
    Windows: Rule(_read_windows, _write_windows),
}
# Keys whose field has another name: in files the number of ranks was always called that of stages.
_FIELDS = {"num_stages": "num_ranks"}
# Written even if they are the default.
_ALWAYS = ("schedule", "num_stages", "num_microbatches", "num_chunks")
_BALANCE = Key("balance", Rule(a_text), False, name_of(None))


def _keys_of(kind: type) -> list[Key]:
    """Return a key for each field that is no configuration itself."""
    names, hints = {field: key for key, field in _FIELDS.items()}, get_type_hints(kind)
    keys = []
    for entry in fields(kind):
        hint = hints[entry.name]
        rule = next((_RULES[part] for part in (hint, *get_args(hint)) if part in _RULES), None)
        if rule is not None:
            keys.append(Key(names.get(entry.name, entry.name), rule, entry.default is MISSING, entry.default))
    return keys


_OF_SCHEDULE, _OF_BALANCE = _keys_of(ScheduleConfig), _keys_of(BalanceConfig)


def read_program(value: object, name: str = "program") -> ScheduleConfig:
    """Read the configuration of a schedule."""
    entries, prefix = an_object(value, name), f"{name}."
    schedule = {_FIELDS.get(key, key): field for key, field in read_keys(_OF_SCHEDULE, entries, prefix).items()}
    balancing = read_keys(_OF_BALANCE, entries, prefix)
    balance_name = read_keys([_BALANCE], entries, prefix).get(_BALANCE.name, _BALANCE.default)
    balance = named_balance(
        balance_name, balancing.get("bounds"), balancing.get("partners"), hosts=balancing.get("hosts")
    )
    return ScheduleConfig(**schedule, balance=None if balance is None else BalanceConfig(**balancing))


def write_program(config: ScheduleConfig) -> dict[str, Any]:
    """Return the keys of a configuration without defaults."""
    schedule = _written(_OF_SCHEDULE, config)
    always = {name: schedule.pop(name) for name in _ALWAYS}
    balancing = {} if config.balance is None else _written(_OF_BALANCE, config.balance)
    return {**always, _BALANCE.name: config.balance_name, **balancing, **schedule}


def _written(keys: Iterable[Key], config: object) -> dict[str, Any]:
    values = [(key, getattr(config, _FIELDS.get(key.name, key.name))) for key in keys]
    return {key.name: key.rule.write(value) for key, value in values if key.name in _ALWAYS or value != key.default}


Program = Annotated[ScheduleConfig, Rule(read_program, write_program)]


VERSION = 1

# Transports whose copies report their own end.
ONE_SIDED = frozenset(("peer", "host"))
# A shorter wait is only the cost of asking: the transfer had ended already.
SHORTEST_WAIT_S = 5e-5
# Hosts' clocks differ from rank 0's by far less than this.
CLOCK_ERROR_S = 1.0
# The error of two marks of one stream.
_TIMER_ERROR_S = 1e-3
# More than any machine has, so that no list of ranks grows with a damaged number.
MOST_RANKS = 1_000_000


@dataclass(frozen=True, slots=True)
class PerRank:
    """Files of one kind, one per rank."""

    stem: str
    suffix: str

    def path(self, folder: Path, rank: int) -> Path:
        return folder / f"{self.stem}_{rank:05d}{self.suffix}"

    def rank(self, path: Path) -> int | None:
        """Return the rank whose file this is, by its name; None for another kind of file."""
        match = re.fullmatch(rf"{self.stem}_([0-9]+){re.escape(self.suffix)}", path.name)
        return None if match is None else int(match.group(1))

    def files(self, folder: Path) -> list[Path]:
        """Return the files of a folder, in the order of their names."""
        return sorted(file for file in folder.iterdir() if self.rank(file) is not None) if folder.is_dir() else []


RUN, STEPS, FAILURE = "run.json", "iterations.jsonl", "failure.json"
RECORD, MEMORY, SUMMARY = PerRank("record", ".jsonl"), PerRank("memory", ".jsonl"), PerRank("rank", ".json")

# What a value of a file may be.


def _by_stage(value: Any, name: str) -> dict[int, int]:
    sizes = an_object(value, name)
    if not all(re.fullmatch("[0-9]{1,9}", stage) for stage in sizes):
        raise ValueError(f"{name} has {next(iter(sizes))!r:.40}: its keys must be stages")
    return {int(stage): a_whole(size, f"{name} of stage {stage}", 0, LARGEST_BYTES) for stage, size in sizes.items()}


def _microbatch(value: Any, _: str) -> tuple[int, int, int]:
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError(f"{str(value)[:40]} is not a stage, a micro-batch and bytes")
    stage, microbatch, num_bytes = value
    place = a_whole(stage, "a stage"), a_whole(microbatch, "a micro-batch")
    return *place, a_whole(num_bytes, "its bytes", 0, LARGEST_BYTES)


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
    """One action of one rank."""

    action: ActionText
    start_s: Start
    end_s: End
    wait_s: Wait = 0.0  # seconds for which computation waited for this transfer
    host_start_s: HostTime | None = None
    host_end_s: HostTime | None = None
    bytes: Bytes | None = None
    slot: Whole | None = None  # the number of the host buffer
    live_bytes: Bytes | None = None  # the most held during the action
    left_bytes: Bytes | None = None  # held at its end

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


COLUMNS = keys_of(Row)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """Speed of a pair's link, by transport, when it was probed at the start, and why other transports were refused."""

    ranks: LinkRanks
    transport: Text | None = None
    bytes_per_s: SpeedByName
    refused: ReasonByName = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Facts of the whole run."""

    FORMAT: ClassVar[str] = "bpipe-run"

    run: Text | None = None
    started: Text | None = None
    world_size: Ranks | None = None
    num_pipelines: Ranks | None = None
    balanced: Flag = False
    synchronous: Flag = False  # whether every transfer was waited for as soon as it was started
    captured: Whole | None = None  # the first iteration that a CUDA graph replays
    device: Text | None = None
    torch: Text | None = None
    megatron_core: Text | None = None
    megatron_core_path: Text | None = None
    flops_per_iteration: Annotated[float, number(0, 1e40)] | None = None  # of all ranks
    peak_flops: Annotated[float, number(1, 1e20)] | None = None  # of one device, per second
    peak_source: Text | None = None
    links: Annotated[tuple[LinkSpeed, ...], each(line(LinkSpeed, "a link"))] = ()

    @property
    def versions(self) -> tuple[tuple[str, str], ...]:
        """The known versions of what ran, by name."""
        names = ("torch", "megatron_core", "megatron_core_path")
        return tuple((name, getattr(self, name)) for name in names if getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHeader:
    """Header of a rank's record."""

    FORMAT: ClassVar[str] = "bpipe-record"

    run: Text | None = None
    rank: Rank
    pipeline: Rank
    place: Rank
    host: Text = ""
    device: Text = ""
    # Cores that the rank may use. Ranks that share fewer cores than they are slow each other, which is not predicted.
    cores: Ranks | None = None
    transport: Text | None = None
    partner: Rank | None = None  # in the world, like `rank`
    weights_bytes: Bytes | None = None
    limit_bytes: Bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One rank's part of one iteration. Sizes by stage are of one micro-batch, of the largest if they differ."""

    iteration: Whole
    program: Program
    begin_s: Seconds
    elapsed_s: Seconds
    saved_bytes: BytesByStage
    moved_bytes: BytesByStage = field(default_factory=dict)
    after_input_bytes: BytesByStage = field(default_factory=dict)  # held between the halves of a split backward
    # All that a forward keeps for its backward, of stages that leave, as counted in the run's first iteration.
    kept_bytes: BytesByStage = field(default_factory=dict)
    kept_counted_by: Text | None = None
    shard_bytes: Bytes = 0  # of one micro-batch, in a shard of the vocabulary between S and T
    received_bytes: Bytes = 0
    host_bytes: Bytes = 0  # of host buffers for others, on this device
    own_bytes: Bytes = 0  # of host buffers for itself, in its node's memory
    stayed_microbatches: Whole = 0  # that should have been evicted and were too large
    stayed_bytes: Bytes = 0
    passed_microbatches: Whole = 0  # by which the bound was exceeded at most
    passed_bytes: Bytes = 0
    device_peak_bytes: Bytes | None = None
    # In the file these are two keys: the columns' names, and the rows' values.
    rows: tuple[Row, ...]

    @property
    def end_s(self) -> float:
        return self.begin_s + self.elapsed_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord(RankHeader):
    """One rank and its iterations, by number."""

    iterations: Mapping[int, Iteration]

    def ended(self, row: Row) -> bool:
        """Whether the row's end is the transfer's own.

        With a two-sided transport it is when somebody asked, so it is the transfer's only if that took time.
        """
        return self.transport in ONE_SIDED or row.wait_s > SHORTEST_WAIT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """One step of the training."""

    iteration: Whole
    numbers: Mapping[str, float | None] = field(default_factory=dict)  # each loss and the gradient norm, exactly
    skipped: Whole | None = None
    elapsed_s: Seconds | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """One rank over all of its iterations. Bytes are of activations and host buffers, transfers per iteration."""

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
    own_buffers: Whole = 0  # in its node's memory, not on its device
    own_bytes: Bytes = 0
    moved_fraction: Annotated[float, number(0, 1)] | None = None  # of a forward's activations; the smallest stage's
    stayed_microbatches: Whole = 0  # of all iterations, that were too large for the room there was
    stayed_bytes: Bytes = 0
    passed_microbatches: Whole = 0  # by which the bound was exceeded at most
    passed_bytes: Bytes = 0
    largest_bytes: BytesByStage = field(default_factory=dict)  # that were to leave, as a host buffer takes them
    times_grown: Whole = 0  # how often host buffers grew
    keys_bytes: Bytes = 0  # of slices: keys, values and gradients, in addition to all this
    predicted_keys_bytes: Bytes = 0
    verified_iterations: Whole = 0  # in which everything came back as it left, and how much that was
    verified_microbatches: Whole = 0
    verified_storages: Whole = 0
    verified_bytes: Bytes = 0


@dataclass(frozen=True, slots=True)
class Verified:
    """Iterations of a whole run in which everything came back as it left, and how much that was."""

    iterations: int
    microbatches: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstFailure:
    """The rank that failed first, as the ranks recorded it."""

    rank: Rank
    cause: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryHeader:
    """One rank's memory besides activations."""

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
    optimizer_to_come_bytes: Bytes | None = None  # which the optimizer allocates in its first step

    @property
    def besides_bytes(self) -> int:
        """All of these."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + (self.optimizer_to_come_bytes or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryMark:
    """Memory of a rank after an action, or during it if there was an error."""

    iteration: Whole
    action: Text | None = None
    error: Text | None = None
    out_of_memory: Flag = False
    program: Program | None = None
    microbatches: Annotated[tuple[tuple[int, int, int], ...], each(Rule(_microbatch))]  # stage, number, bytes
    saved_bytes: BytesByStage
    moved_bytes: BytesByStage = field(default_factory=dict)
    after_input_bytes: BytesByStage = field(default_factory=dict)
    received_bytes: Bytes = 0
    host_bytes: Bytes = 0
    logits_bytes: Bytes = 0
    shard_bytes: Bytes = 0  # of one micro-batch between S and T, 0 until one was seen
    in_shards_bytes: Bytes = 0  # of all micro-batches between S and T
    allocated_bytes: Bytes | None = None
    reserved_bytes: Bytes | None = None

    @property
    def activations_bytes(self) -> int:
        return sum(size for _, _, size in self.microbatches) + self.in_shards_bytes + self.host_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHeld(MemoryHeader):
    """One rank, and what it held over time."""

    marks: tuple[MemoryMark, ...]

    @property
    def end(self) -> MemoryMark | None:
        """The error that ended this rank's training, if it was recorded."""
        return next((mark for mark in reversed(self.marks) if mark.error is not None), None)


@dataclass(frozen=True, slots=True)
class Held:
    """Memory records of the ranks of a folder."""

    folder: Path
    ranks: tuple[RankHeld, ...]
    failure: FirstFailure | None


@dataclass(frozen=True, slots=True)
class Run:
    """A whole folder."""

    folder: Path
    info: RunInfo
    ranks: tuple[RankRecord, ...]
    step_s: Mapping[int, float]  # by iteration, the whole training step with reduction and update
    run_peak_bytes: Mapping[int, int]  # by rank, over all iterations, recorded or not
    notes: tuple[str, ...]  # what is missing
    verified: Verified | None = None
