"""Builds the schedule of a `ScheduleConfig`, for the command, the planner and the trainer's hooks alike."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache

from bpipe.balance.config import BalanceConfig, balanced, name_of
from bpipe.balance.pairs import allocated_counts, balance, keeps_bound
from bpipe.names import unknown
from bpipe.schedule.action import Action
from bpipe.schedule.check.rules import check
from bpipe.schedule.families.families import (
    FAMILIES,
    exchange_of,
    families_that_take,
    families_with_chunks,
    families_with_interlacing,
    families_with_shards,
)
from bpipe.schedule.families.family import TAKEN, Family, FamilyOptions
from bpipe.schedule.families.unit_grid import Order, place
from bpipe.schedule.files.text import header, read_csv, write_rows
from bpipe.schedule.hosts import PAIR
from bpipe.schedule.layout import Layout, Vocabulary
from bpipe.schedule.program import Exchange
from bpipe.schedule.schedule import Schedule

# About a gigabyte and a half of schedule, and a minute and a half to build it.
MAX_COMPUTATIONS = 10_000_000
# Actions in cached orders, enough for a search over 2,048 devices (about 300 MB).
_MAX_CACHED_ACTIONS = 8_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpec(FamilyOptions):
    """Request for a schedule of any numbers of ranks and micro-batches."""

    num_chunks: int = 1
    """Stages that each rank computes."""

    balance: BalanceConfig | None = None
    """How to balance it; None leaves it as it is."""

    vocabulary: Vocabulary = Vocabulary.WHOLE
    """How the output layer is split over all ranks."""

    input_shards: bool = False
    """Whether the embedding is split as well."""


@dataclass(frozen=True, slots=True)
class ScheduleConfig(ScheduleSpec):
    """Schedule to build."""

    schedule: str
    """The family's name, or the schedule's own if it is `written`."""

    num_ranks: int
    """Ranks of a pipeline, p; there are p * `num_chunks` stages."""

    num_microbatches: int
    """Micro-batches of an iteration."""

    exchange: Exchange | None = field(default=None, kw_only=True)
    """Exchange order of whoever runs it; by default the family's."""

    written: str | None = field(default=None, kw_only=True)
    """The schedule itself as CSV with its header, if it comes from a file or another library."""

    def __post_init__(self) -> None:
        if self.written is not None:
            return
        if self.schedule not in FAMILIES:
            raise ValueError(unknown("schedule", self.schedule, FAMILIES))
        for name in ("num_ranks", "num_microbatches", "num_chunks", "slices"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 1")
        family = FAMILIES[self.schedule]
        shards = 2 * (self.vocabulary is not Vocabulary.WHOLE) + 2 * self.input_shards
        per_rank = ((3 if family.splits else 2) * self.num_chunks + shards) * self.num_microbatches * self.slices
        computations = self.num_ranks * per_rank
        if computations > MAX_COMPUTATIONS:
            raise ValueError(
                f"{computations} computations are more than {MAX_COMPUTATIONS}: use fewer stages or micro-batches"
            )
        self._check_options(family)
        self._check_chunks(family)
        self._check_shards(family)

    def _check_options(self, family: Family) -> None:
        for name, option in TAKEN.items():
            if getattr(self, name) != option.default and not family.takes(name):
                raise ValueError(
                    f"schedule {self.schedule} {option.metadata['lack']}: leave that out, or choose from "
                    f"{families_that_take(name)}"
                )
        if self.delay < 0:
            raise ValueError(f"delay is {self.delay}, but a weights' half cannot come before its own I: give 0 or more")
        if self.slices == 1:
            return
        if self.vocabulary is Vocabulary.INTERLACED:
            raise ValueError(
                f"slices {self.slices} and vocabulary interlaced: all ranks compute a shard at one point of an "
                f"interval, and the backward of a slice waits for those of later slices: use vocabulary 1 or 2"
            )
        if self.input_shards:
            raise ValueError(
                f"slices {self.slices} and shards of the embedding: the shards receive the tokens of whole "
                "micro-batches before the iteration, so leave the embedding whole"
            )

    def _check_chunks(self, family: Family) -> None:
        if self.num_chunks < family.min_chunks:
            raise ValueError(
                f"schedule {self.schedule} needs at least {family.min_chunks} chunks per rank, not {self.num_chunks}"
            )
        if family.max_chunks is not None and self.num_chunks > family.max_chunks:
            limit = f"{family.max_chunks} chunk{'s' * (family.max_chunks > 1)}"
            raise ValueError(
                f"schedule {self.schedule} takes at most {limit} per rank, not {self.num_chunks}: "
                f"leave it at {family.max_chunks}, or choose a schedule with any number ({families_with_chunks()})"
            )

    def _check_shards(self, family: Family) -> None:
        if self.vocabulary is Vocabulary.WHOLE:
            if self.input_shards:
                raise ValueError(
                    "shards of the embedding need shards of the output layer: choose vocabulary 1, 2 or interlaced, too"
                )
        elif family.sharded is None:
            others = f"leave the vocabulary whole, or choose from {families_with_shards()}"
            raise ValueError(f"schedule {self.schedule} has no place for shards of the vocabulary: {others}")
        elif self.vocabulary is Vocabulary.INTERLACED and not family.interlaces:
            others = f"use vocabulary 1 or 2, or choose from {families_with_interlacing()}"
            raise ValueError(
                f"schedule {self.schedule} has no place where all ranks compute shards at the same time: {others}"
            )
        elif self.num_ranks < 2:
            raise ValueError("1 rank cannot share the vocabulary: leave it whole, or use more ranks")

    @property
    def limit(self) -> int | None:
        """Bound for which an order is made: the same for all ranks, without given groups, pairs or slices."""
        if self.slices > 1:
            return None
        how = self.balance
        bounds = None if how is None or how.partners is not None or how.hosts != PAIR else how.bounds
        if bounds is None or len(set(bounds)) != 1 or self.written is not None or self.group_size is not None:
            return None
        return None if FAMILIES[self.schedule].within is None else bounds[0]

    @property
    def passing(self) -> Exchange:
        """Exchange order of whoever runs it."""
        own_loop = self.written is not None or self.vocabulary is not Vocabulary.WHOLE
        return self.exchange or (Exchange.POSTED if own_loop else FAMILIES[self.schedule].exchange)

    @property
    def layout(self) -> Layout:
        """Placement of stages on ranks."""
        if self.written is not None:
            return _read(self.written).layout
        layout = FAMILIES[self.schedule].layout(self.num_ranks, self.num_chunks)
        return replace(layout, vocabulary=self.vocabulary, input_shards=self.input_shards, slices=self.slices)

    @property
    def splits(self) -> bool:
        """Whether backwards are computed in halves."""
        if self.written is None:
            return FAMILIES[self.schedule].splits
        return bool(_read(self.written).split_stages)

    @property
    def balance_name(self) -> str:
        """Name of the balance in records and outputs."""
        return name_of(self.balance)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self.num_ranks, self.num_microbatches, self.num_chunks


def sized(spec: ScheduleSpec, schedule: str, num_ranks: int, num_microbatches: int) -> ScheduleConfig:
    """Return the configuration of a request for these sizes."""
    requested = {field.name: getattr(spec, field.name) for field in fields(ScheduleSpec)}
    return ScheduleConfig(schedule, num_ranks, num_microbatches, **requested)


def build(config: ScheduleConfig) -> Schedule:
    """Generate and balance a schedule, checking it after each step.

    Args:
        config: The family, its sizes and options, and how to balance.

    Returns:
        A checked schedule, with transfers if it is balanced.

    Raises:
        ValueError: It cannot be built; names the value, the limit and the remedy.
    """
    return _checked(*_recipe(config), config.passing)


@lru_cache(maxsize=256)
def built(config: ScheduleConfig) -> Schedule:
    """Build a schedule, cached."""
    return build(config)


@lru_cache(maxsize=256)
def unchecked(config: ScheduleConfig) -> Schedule:
    """Build a schedule for predictions without checking it, cached: a search asks for the same ones many times.

    Checking takes several times as long as building: whoever prints or runs a schedule checks it.
    """
    schedule, how = _recipe(config)
    return schedule if how is None else balanced(schedule, how)


def orders_of(config: ScheduleConfig) -> Iterator[list[Action]]:
    """Yield every rank's computations in the family's usual order, neither placed nor balanced."""
    assert config.written is None, "a schedule from elsewhere has no family"
    assert config.limit is None, "an order made for a bound is not the usual one"
    for order in _usual_orders(config):
        yield [action for cell in order for action in cell.computations]


def _recipe(config: ScheduleConfig) -> tuple[Schedule, BalanceConfig | None]:
    """Return the schedule to start from, and how to balance it."""
    if config.written is not None:
        schedule = _read(config.written)
        sizes = {
            "num_ranks": schedule.num_ranks,
            "num_microbatches": schedule.num_whole_microbatches,
            "num_chunks": schedule.num_chunks,
            "slices": schedule.layout.slices,
        }
        for name, size in sizes.items():
            if getattr(config, name) != size:
                raise ValueError(f"schedule {schedule.name} has {name} {size}, not {getattr(config, name)}")
        return schedule, config.balance if schedule.hosts is None else None
    if config.limit is not None:
        return _made_for(config, config.limit), config.balance
    return _usual(config), config.balance


def _usual(config: ScheduleConfig) -> Schedule:
    """Return the schedule of the family's usual order, whatever bound is asked."""
    return place(_name(config), config.num_microbatches * config.slices, config.layout, _usual_orders(config))


def _name(config: ScheduleConfig) -> str:
    """Return the name of a schedule; one with shards is run by our executor, and by no loop of Megatron's."""
    shards = "" if config.vocabulary is Vocabulary.WHOLE else f"-vocabulary-{config.vocabulary.value}"
    return f"{config.schedule}{shards}"


# The latest orders of families with the number of their actions, by schedule, sizes and options.
_ORDERS: dict[Hashable, tuple[int, Sequence[Order]]] = {}


def _family_orders(config: ScheduleConfig) -> Sequence[Order]:
    """Return the family's own orders, cached: they do not depend on how they are balanced, and some take long.

    At least two are cached, others while all have at most `_MAX_CACHED_ACTIONS` actions. A limit by number alone would
    fill a machine's memory with orders of hundreds of ranks, or forget those of few.
    """
    key = config.schedule, config._sizes, tuple(getattr(config, field.name) for field in fields(FamilyOptions))
    entry = _ORDERS.pop(key, None)
    if entry is None:
        orders = FAMILIES[config.schedule].orders(*config._sizes, config)
        entry = sum(map(len, orders)), orders
    _ORDERS[key] = entry
    while len(_ORDERS) > 2 and sum(size for size, _ in _ORDERS.values()) > _MAX_CACHED_ACTIONS:
        del _ORDERS[next(iter(_ORDERS))]
    return entry[1]


def _usual_orders(config: ScheduleConfig) -> Sequence[Order]:
    """Return the family's usual orders, with shards if the vocabulary is split."""
    if config.vocabulary is Vocabulary.WHOLE:
        return _family_orders(config)
    sharded = FAMILIES[config.schedule].sharded
    assert sharded is not None, f"{config.schedule} has no order with shards"
    return sharded(*config._sizes, config, config.layout)


@lru_cache(maxsize=16)
def _made_for(config: ScheduleConfig, bound: int) -> Schedule:
    """Return the fastest of the family's orders for a bound that pairs can keep; ValueError if there is none."""
    family = FAMILIES[config.schedule]
    staying = config.balance is not None and config.balance.buffers_stay
    if config.vocabulary is Vocabulary.WHOLE:
        assert family.within is not None, f"{family.name} has no orders for a bound"
        candidates = family.within(*config._sizes, bound, config)
    else:
        assert family.sharded_within is not None, f"{family.name} has no orders with shards for a bound"
        candidates = family.sharded_within(*config._sizes, bound, config, config.layout)
    for _, orders in candidates:
        schedule = place(_name(config), config.num_microbatches, config.layout, orders)
        if keeps_bound(schedule, bound, staying):
            return schedule
    usual, group = _usual(config), family.usual_group(config.num_ranks)
    if keeps_bound(usual, bound, staying):
        return usual
    evened = balance(usual)
    (kept,) = {max(allocated_counts(evened))} if staying else set(evened.bounds or ())
    raise ValueError(
        f"no order of {config.schedule} was found that keeps every rank within {bound} micro-batches of a chunk"
        f"{', host buffers included' if staying else ''}: "
        f"its groups of {group} keep {kept}; raise the bound, or use more chunks"
    )


def config_of_schedule(schedule: Schedule, balance: BalanceConfig | None = None) -> ScheduleConfig:
    """Return the configuration of a schedule from elsewhere, to be balanced unless it has transfers already.

    Args:
        schedule: A schedule that no family made, such as one from a file.
        balance: How to balance it; None leaves it as it is.

    Raises:
        ValueError: It breaks a rule.
    """
    check(schedule, Exchange.POSTED)
    return ScheduleConfig(
        schedule.name,
        schedule.num_ranks,
        schedule.num_whole_microbatches,
        num_chunks=schedule.num_chunks,
        balance=balance,
        slices=schedule.layout.slices,
        written=f"{header(schedule)}\n{write_rows(schedule)}",
    )


@lru_cache(maxsize=16)
def _read(written: str) -> Schedule:
    return read_csv(written)


def adopt(schedule: Schedule, how: BalanceConfig | None = None) -> Schedule:
    """Return a schedule from elsewhere, checked, and balanced if asked."""
    return _checked(schedule, how, exchange_of(schedule.name))


def _checked(schedule: Schedule, how: BalanceConfig | None, exchange: Exchange) -> Schedule:
    """Check a schedule as it will be run, balance it, and check it again."""
    check(schedule, exchange)
    if how is not None:
        schedule = balanced(schedule, how)
        check(schedule, exchange)
    return schedule
