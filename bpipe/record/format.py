"""What a run writes down about itself: every file, key and column, defined once.

    DIR/run.json              RunInfo: what is the same for all ranks; written once, by rank 0
    DIR/record_00003.jsonl    RankHeader, then an Iteration per line, written at once: a killed run leaves whole lines
    DIR/memory_00003.jsonl    MemoryHeader, then a MemoryMark for every new maximum, and for the error that ended the run
    DIR/iterations.jsonl      TrainingStep: written by the last rank, one line per step, with exact loss and gradient norm
    DIR/rank_00003.json       RankSummary: peaks over all iterations, measured and predicted, of a rank that ended well
    DIR/failure.json          FirstFailure: the rank of a failed run that failed first, and why

A field whose type has a rule, its own (`Annotated[int, Rule(...)]`) or that of `rule_of`, is a key of the same name that
`append` and `write_whole` write and `read` reads. A key without a default is required; of the others null and absence mean the default. A
field without a rule is no key. A column of the rows is a field of `Row`. To add one, add it here and where it is filled. Keys are
added and never renamed; later ones have a default, so that older records can still be read. `run` is the same name in
all files of a run.

A *place* is a rank's position in its pipeline, 0 to p-1; with data or tensor parallelism there are several pipelines.
Times of a row are seconds from its iteration's `begin_s`, which is unix time on rank 0's clock. A line is written at once,
so that a killed run leaves whole ones; a file of one value is written whole or not at all.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from enum import Enum
from fractions import Fraction
from functools import cache, lru_cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, NamedTuple, Union, get_args, get_origin, get_type_hints

from bpipe.balance.config import BalanceConfig, name_of, named_balance
from bpipe.balance.deadlines import Seconds
from bpipe.build import ScheduleConfig
from bpipe.schedule.action import Action
from bpipe.schedule.families.family import UnitCosts
from bpipe.schedule.files.text import read_action, read_costs
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
def keys_of(kind: Any) -> tuple[Key, ...]:
    """Return the keys in the order of the class."""
    rules = {name: rule_of(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}
    defaults = _defaults(kind)
    return tuple(
        Key(name, rule, name not in defaults, defaults.get(name)) for name, rule in rules.items() if rule is not None
    )


def _defaults(kind: Any) -> dict[str, Any]:
    if not is_dataclass(kind):
        return dict(kind._field_defaults)
    defaults = {}
    for entry in fields(kind):
        if entry.default is not MISSING:
            defaults[entry.name] = entry.default
        elif entry.default_factory is not MISSING:
            defaults[entry.name] = entry.default_factory()
    return defaults


def rule_of(hint: Any) -> Rule | None:
    """Return how values of a type are read and written, None for a type that no key has."""
    if metadata := getattr(hint, "__metadata__", ()):
        return next((extra for extra in metadata if isinstance(extra, Rule)), None)
    if hint in _RULES:
        return _RULES[hint]
    origin, parts = get_origin(hint), [rule_of(part) for part in get_args(hint)]
    if origin in (Union, UnionType):
        return next(filter(None, parts), None)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _one_of(hint)
    if is_dataclass(hint):
        kind: Any = hint
        return Rule(lambda value, name: kind(**values_of(kind, value, name, f"{name}.")), _without_defaults)
    if origin is tuple and (rule := parts[0]) is not None:
        return each(rule) if get_args(hint)[-1] is Ellipsis else together([part for part in parts if part is not None])
    if origin is Mapping and get_args(hint)[0] is str and (rule := parts[1]) is not None:
        return by_name(rule)
    return None


def values_of(kind: Any, value: object, name: str, prefix: str = "") -> dict[str, Any]:
    """Return the arguments of a `kind` that an object of a file has.

    Unknown keys are ignored: later versions add some. Those that are absent or null are left out.
    """
    return read_keys(keys_of(kind), an_object(value, name), prefix)


def read_keys(keys: Iterable[Key], entries: Mapping[str, object], prefix: str = "") -> dict[str, Any]:
    values = {}
    for key in keys:
        value = entries.get(key.name)
        if value is not None:
            values[key.name] = key.rule.read(value, prefix + key.name)
        elif key.needed:
            raise ValueError(f"{key.name!r} is missing")
    return values


def _entries(value: Any) -> list[tuple[Key, Any]]:
    kind: Any = type(value)
    return [(key, getattr(value, key.name)) for key in keys_of(kind)]


def written(value: Any) -> dict[str, Any]:
    """Return a line's keys and values as JSON has them. Counts and sizes that are zero by default are left out."""
    return {
        key.name: None if entry is None else key.rule.write(entry)
        for key, entry in _entries(value)
        if entry != key.default or type(entry) not in (int, dict)
    }


def _without_defaults(value: Any) -> dict[str, Any]:
    return {key.name: key.rule.write(entry) for key, entry in _entries(value) if key.needed or entry != key.default}


# Rules for what files hold.


def whole(least: int = 0, most: int = LARGEST_BYTES) -> Rule:
    return Rule(lambda value, name: a_whole(value, name, least, most))


def number(least: float = 0, most: float = LARGEST) -> Rule:
    return Rule(lambda value, name: a_number(value, name, least, most))


def each(rule: Rule) -> Rule:
    """Read a list as a tuple."""
    return Rule(
        lambda values, name: tuple(rule.read(value, name) for value in a_list(values, name)),
        lambda values: [rule.write(value) for value in values],
    )


def together(rules: Sequence[Rule]) -> Rule:
    """Read a list of as many values as there are rules."""

    def read(values: object, name: str) -> tuple[Any, ...]:
        if len(a_list(values, name)) != len(rules):
            raise ValueError(f"{name} has {str(values)[:40]}, but must have {len(rules)} values")
        return tuple(rule.read(value, name) for rule, value in zip(rules, a_list(values, name), strict=True))

    return Rule(read, lambda values: [rule.write(value) for rule, value in zip(rules, values, strict=True)])


def by_name(rule: Rule) -> Rule:
    """Read an object whose keys are names."""

    def read(values: object, name: str) -> dict[str, Any]:
        pairs = an_object(values, name).items()
        return {printable(key): rule.read(value, f"{printable(key)} of {name}") for key, value in pairs}

    return Rule(read, lambda values: {key: rule.write(value) for key, value in values.items()})


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


def _by_stage(value: Any, name: str) -> dict[int, int]:
    sizes = an_object(value, name)
    if not all(re.fullmatch("[0-9]{1,9}", stage) for stage in sizes):
        raise ValueError(f"{name} has {next(iter(sizes))!r:.40}: its keys must be stages")
    return {int(stage): a_whole(size, f"{name} of stage {stage}", 0, LARGEST_BYTES) for stage, size in sizes.items()}


_read_action = lru_cache(maxsize=1 << 18)(read_action)

_RULES: dict[Any, Rule] = {
    str: Rule(a_text),
    bool: Rule(a_flag),
    int: whole(),
    float: number(),
    # A duration may be exact.
    Seconds: Rule(number().read, float),
    frozenset[int]: Rule(lambda value, name: frozenset(each(whole()).read(value, name)), sorted),
    Mapping[int, int]: Rule(_by_stage),
    Action: Rule(lambda value, _: _read_action(a_text(value, "an action")), str),
    UnitCosts: Rule(_read_costs, _write_costs),
}
# In files the number of ranks was always called that of stages.
_RANKS, _STAGES = "num_ranks", "num_stages"
_BALANCE = Key("balance", Rule(a_text), False, name_of(None))
_OF_SCHEDULE = [
    replace(key, name=_STAGES) if key.name == _RANKS else key
    for key in keys_of(ScheduleConfig)
    if key.name != _BALANCE.name
]


def read_program(value: object, name: str = "program") -> ScheduleConfig:
    """Read the configuration of a schedule."""
    entries, prefix = an_object(value, name), f"{name}."
    schedule = read_keys(_OF_SCHEDULE, entries, prefix)
    balancing = read_keys(keys_of(BalanceConfig), entries, prefix)
    balance_name = read_keys([_BALANCE], entries, prefix).get(_BALANCE.name, _BALANCE.default)
    balance = named_balance(
        balance_name, balancing.get("bounds"), balancing.get("partners"), hosts=balancing.get("hosts")
    )
    num_ranks = schedule.pop(_STAGES)
    return ScheduleConfig(
        num_ranks=num_ranks, **schedule, balance=None if balance is None else BalanceConfig(**balancing)
    )


def write_program(config: ScheduleConfig) -> dict[str, Any]:
    """Return the keys of a configuration without defaults."""
    schedule = {_STAGES if name == _RANKS else name: value for name, value in _without_defaults(config).items()}
    always = {"schedule": config.schedule, _STAGES: config.num_ranks}
    always |= {"num_microbatches": config.num_microbatches, "num_chunks": config.num_chunks}
    balancing = {} if config.balance is None else schedule.pop(_BALANCE.name)
    return {**always, _BALANCE.name: config.balance_name, **balancing, **schedule, **always}


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


# Times of a row.
Time = Annotated[float, number(-CLOCK_ERROR_S)]
Wait = Annotated[float, Rule(lambda value, name: max(0.0, a_number(value, name, -_TIMER_ERROR_S)))]


class Row(NamedTuple):
    """One action of one rank."""

    action: Action
    start_s: Time
    end_s: Time
    wait_s: Wait = 0.0  # seconds for which computation waited for this transfer
    host_start_s: Time | None = None
    host_end_s: Time | None = None
    bytes: int | None = None
    slot: int | None = None  # the number of the host buffer
    live_bytes: int | None = None  # the most held during the action
    left_bytes: int | None = None  # held at its end

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


COLUMNS = keys_of(Row)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """Speed of a pair's link, by transport, when it was probed at the start, and why other transports were refused."""

    ranks: frozenset[int]
    transport: str | None = None
    bytes_per_s: Mapping[str, Annotated[float, number(1, 1e18)]]
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Facts of the whole run."""

    FORMAT: ClassVar[str] = "bpipe-run"

    run: str | None = None
    started: str | None = None
    world_size: Annotated[int, whole(1, MOST_RANKS)] | None = None
    num_pipelines: int | None = None
    balanced: bool = False
    synchronous: bool = False  # whether every transfer was waited for as soon as it was started
    captured: int | None = None  # the first iteration that a CUDA graph replays, or later if the plan changes before it
    device: str | None = None
    torch: str | None = None
    megatron_core: str | None = None
    megatron_core_path: str | None = None
    flops_per_iteration: Annotated[float, number(0, 1e40)] | None = None  # of all ranks
    peak_flops: Annotated[float, number(1, 1e20)] | None = None  # of one device, per second
    peak_source: str | None = None
    links: tuple[LinkSpeed, ...] = ()

    @property
    def versions(self) -> tuple[tuple[str, str], ...]:
        """The known versions of what ran, by name."""
        names = ("torch", "megatron_core", "megatron_core_path")
        return tuple((name, getattr(self, name)) for name in names if getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    run: str | None = None
    rank: int
    pipeline: int
    place: int
    host: str = ""
    device: str = ""
    limit_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHeader(_Header):
    """Header of a rank's record."""

    FORMAT: ClassVar[str] = "bpipe-record"

    # Cores that the rank may use. Ranks that share fewer cores than they are slow each other, which is not predicted.
    cores: int | None = None
    transport: str | None = None
    partner: int | None = None  # in the world, like `rank`
    weights_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes that a rank measured. Those by stage are of one micro-batch, of the largest if they differ."""

    iteration: int
    saved_bytes: Mapping[int, int]
    moved_bytes: Mapping[int, int] = field(default_factory=dict)
    after_input_bytes: Mapping[int, int] = field(default_factory=dict)  # held between the halves of a split backward
    received_bytes: int = 0  # of one micro-batch
    host_bytes: int = 0  # of host buffers for others, on this device
    shard_bytes: int = 0  # of one micro-batch, in a shard of the vocabulary between S and T; 0 until one was seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration(Sizes):
    """One rank's part of one iteration."""

    program: Program
    begin_s: float
    elapsed_s: float
    # All that a forward keeps for its backward, of stages that leave, as counted in the run's first iteration.
    kept_bytes: Mapping[int, int] = field(default_factory=dict)
    kept_counted_by: str | None = None
    own_bytes: int = 0  # of host buffers for itself, in its node's memory
    stayed_microbatches: int = 0  # that should have been evicted and were too large
    stayed_bytes: int = 0
    passed_microbatches: int = 0  # by which the bound was exceeded at most
    passed_bytes: int = 0
    device_peak_bytes: int | None = None
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

    iteration: int
    # Each loss and the gradient norm, exactly: keys of their own.
    numbers: Annotated[Mapping[str, float | None], "no key"] = field(default_factory=dict)
    skipped: int | None = None
    elapsed_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """One rank over all of its iterations. Bytes are of activations and host buffers, transfers per iteration."""

    run: str | None = None
    rank: int
    stage: int | None = None
    pipeline: int | None = None
    balanced: bool | None = None
    num_microbatches: int | None = None
    peak_microbatches: int | None = None
    peak_bytes: int
    predicted_microbatches: int | None = None
    predicted_bytes: int | None = None
    evictions: int | None = None
    loads: int | None = None
    own_buffers: int = 0  # in its node's memory, not on its device
    own_bytes: int = 0
    moved_fraction: Annotated[float, number(0, 1)] | None = None  # of a forward's activations; the smallest stage's
    stayed_microbatches: int = 0  # of all iterations, that were too large for the room there was
    stayed_bytes: int = 0
    passed_microbatches: int = 0  # by which the bound was exceeded at most
    passed_bytes: int = 0
    largest_bytes: Mapping[int, int] = field(default_factory=dict)  # that were to leave, as a host buffer takes them
    times_grown: int = 0  # how often host buffers grew
    keys_bytes: int = 0  # of slices: keys, values and gradients, in addition to all this
    predicted_keys_bytes: int = 0
    graph_pool_bytes: int | None = None  # of the CUDA graph of an iteration, if one was captured
    verified_iterations: int = 0  # in which everything came back as it left, and how much that was
    verified_microbatches: int = 0
    verified_storages: int = 0
    verified_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Verified:
    """Iterations of a whole run in which everything came back as it left, and how much that was."""

    iterations: int
    microbatches: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstFailure:
    """The rank that failed first, as the ranks recorded it."""

    rank: int
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryHeader(_Header):
    """One rank's memory besides activations."""

    FORMAT: ClassVar[str] = "bpipe-memory"

    micro_batch: int | None = None
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    optimizer_to_come_bytes: int | None = None  # which the optimizer allocates in its first step

    @property
    def besides_bytes(self) -> int:
        return self.weights_bytes + self.gradients_bytes + self.whole_optimizer_bytes

    @property
    def whole_optimizer_bytes(self) -> int:
        """What the optimizer holds from its first step on."""
        return self.optimizer_bytes + (self.optimizer_to_come_bytes or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryMark(Sizes):
    """Memory of a rank after an action, or during it if there was an error."""

    action: str | None = None
    error: str | None = None
    out_of_memory: bool = False
    program: Program | None = None
    microbatches: tuple[tuple[int, int, int], ...]  # stage, number, bytes
    logits_bytes: int = 0
    in_shards_bytes: int = 0  # of all micro-batches between S and T
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None

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
    graph_pool_bytes: int | None = None  # of the rank whose CUDA graph has most
    verified: Verified | None = None


def write_whole(path: Path, value: Any) -> None:
    """Write a file of one value."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(_keys(value), indent=1) + "\n")
    partial.replace(path)


def begin(path: Path, *values: Any) -> None:
    """Begin a file with these lines, and replace what another run left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(map(_line, values)))


def append(path: Path, *values: Any) -> None:
    """Append lines to a file."""
    with path.open("a") as file:
        file.write("".join(map(_line, values)))


def _line(value: Any) -> str:
    # The long ones, of which there are many, have no spaces.
    separators = (",", ":") if isinstance(value, Iteration | MemoryMark) else None
    return json.dumps(_keys(value), separators=separators) + "\n"


def _keys(value: Any) -> dict[str, Any]:
    kind = type(value)
    keys = {"format": kind.FORMAT, "version": VERSION} if hasattr(kind, "FORMAT") else {}
    keys |= written(value)
    if isinstance(value, Iteration):
        keys["columns"] = [column.name for column in COLUMNS]
        keys["actions"] = [
            [None if cell is None else column.rule.write(cell) for column, cell in zip(COLUMNS, row, strict=True)]
            for row in value.rows
        ]
    if isinstance(value, TrainingStep):
        exact = {name: None if number is None else number.hex() for name, number in value.numbers.items()}
        keys = {"iteration": keys.pop("iteration"), **exact, **keys}
    return keys
