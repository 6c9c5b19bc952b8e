"""Build the schedule a configuration asks for: the one door. In: a `ScheduleConfig`. Out: a checked Schedule.

The command, the planner and the trainer's hooks all ask here, so they cannot differ. Knows no tensors and no command
line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import lru_cache

from bpipe.balance.config import BalanceConfig, balanced, name_of
from bpipe.balance.pairs import allocated_counts, balance, keeps_bound
from bpipe.names import unknown
from bpipe.schedule.action import Action
from bpipe.schedule.check.rules import check
from bpipe.schedule.families.families import (
    FAMILIES,
    exchange_of,
    families_with_chunks,
    families_with_deferral,
    families_with_groups,
    families_with_interlacing,
    families_with_shards,
    families_with_slices,
)
from bpipe.schedule.families.family import Family, FamilyOptions, OrderChoice, RankLimit
from bpipe.schedule.families.order_cache import RememberedOrders
from bpipe.schedule.families.turns import groups_of
from bpipe.schedule.families.unit_grid import Order, place
from bpipe.schedule.files.text import header, read_csv, write_rows
from bpipe.schedule.hosts import PAIR
from bpipe.schedule.layout import Layout, Vocabulary
from bpipe.schedule.memory import with_after_input
from bpipe.schedule.program import Exchange
from bpipe.schedule.schedule import Schedule, Slot

# About a gigabyte and a half of schedule, and a minute and a half to build it.
MAX_COMPUTATIONS = 10_000_000

Pass = Callable[[Schedule], Schedule]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpec(FamilyOptions):
    """Request for a schedule, whatever the numbers of its ranks and micro-batches."""

    num_chunks: int = 1
    """Stages that each rank computes."""

    balance: BalanceConfig | None = None
    """How it is balanced; None leaves it as it is."""

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

    after_input: Fraction = field(default=Fraction(1), kw_only=True)
    """Share of a micro-batch that is held between I and W, by which it is counted."""

    exchange: Exchange | None = field(default=None, kw_only=True)
    """When whoever runs it sends and receives; by default as the family says."""

    written: str | None = field(default=None, kw_only=True)
    """The schedule itself, as CSV with its header, if it comes from elsewhere."""

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
        computations = (
            ((3 if family.splits else 2) * self.num_chunks + shards)
            * self.num_ranks
            * self.num_microbatches
            * self.slices
        )
        if computations > MAX_COMPUTATIONS:
            raise ValueError(
                f"{computations} computations are more than {MAX_COMPUTATIONS}: use fewer stages or micro-batches"
            )
        self._check_slices(family)
        self._check_chunks(family)
        if self.group_size is not None and not family.takes_groups:
            others = f"leave the group out, or choose from {families_with_groups()}"
            raise ValueError(f"schedule {self.schedule} has no groups of micro-batches: {others}")
        self._check_shards(family)
        self._check_delay(family)

    def _check_slices(self, family: Family) -> None:
        if self.slices == 1:
            return
        if not family.takes_slices:
            why = (
                "its two pipes fill each other's gaps in an order that is known for whole micro-batches only"
                if family.num_pipes > 1
                else "its order is known for whole micro-batches only"
            )
            raise ValueError(
                f"schedule {self.schedule} does not cut micro-batches into slices, because {why}: leave slices out, "
                "or choose from "
                f"{families_with_slices()}"
            )
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

    def _check_delay(self, family: Family) -> None:
        if self.delay and not family.takes_delay:
            others = f"leave the delay out, or choose from {families_with_deferral()}"
            raise ValueError(
                f"schedule {self.schedule} does not delay weights' halves by a number of micro-batches: {others}"
            )
        if self.delay < 0:
            raise ValueError(f"delay is {self.delay}, but a weights' half cannot come before its own I: give 0 or more")

    def _check_chunks(self, family: Family) -> None:
        if self.num_chunks < family.min_chunks:
            raise ValueError(
                f"schedule {self.schedule} needs at least {family.min_chunks} chunks per rank, not {self.num_chunks}"
            )
        if family.max_chunks is not None and self.num_chunks > family.max_chunks:
            most = f"{family.max_chunks} chunk{'s' * (family.max_chunks > 1)}"
            raise ValueError(
                f"schedule {self.schedule} takes at most {most} per rank, not {self.num_chunks}: "
                f"leave it at {family.max_chunks}, or choose a schedule with any number ({families_with_chunks()})"
            )

    def _check_shards(self, family: Family) -> None:
        if self.vocabulary is Vocabulary.WHOLE:
            if self.input_shards:
                raise ValueError(
                    "shards of the embedding need shards of the output layer: choose vocabulary 1, 2 or interlaced, too"
                )
        elif family.sharded is None:
            raise ValueError(
                f"schedule {self.schedule} has no place for shards of the vocabulary: leave the vocabulary whole, or "
                f"choose from "
                f"{families_with_shards()}"
            )
        elif self.vocabulary is Vocabulary.INTERLACED and not family.interlaces:
            raise ValueError(
                f"schedule {self.schedule} has no place where all ranks compute shards at the same time: use "
                "vocabulary 1 or 2, or choose "
                f"from {families_with_interlacing()}"
            )
        elif self.num_ranks < 2:
            raise ValueError("1 rank cannot share the vocabulary: leave it whole, or use more ranks")

    @property
    def limit(self) -> RankLimit | None:
        """Limits for which orders are made: one bound for all, where groups and pairs are not chosen and the family
        makes orders for a bound.

        None are made for slices.
        """
        if self.slices > 1:
            return None
        how = self.balance
        bounds = None if how is None or how.partners is not None or how.hosts != PAIR else how.bounds
        if (
            self.written is not None
            or FAMILIES[self.schedule].within is None
            or self.group_size is not None
            or bounds is None
        ):
            return None
        return RankLimit(bounds[0], self.after_input) if len(set(bounds)) == 1 else None

    @property
    def passing(self) -> Exchange:
        """Exchange order of whoever runs it."""
        ours = self.written is not None or self.vocabulary is not Vocabulary.WHOLE
        return self.exchange or (Exchange.POSTED if ours else FAMILIES[self.schedule].exchange)

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
        return name_of(self.balance)


_ASKED, _FAMILY_OPTIONS = ([each.name for each in fields(kind)] for kind in (ScheduleSpec, FamilyOptions))


def sized(spec: ScheduleSpec, schedule: str, num_ranks: int, num_microbatches: int) -> ScheduleConfig:
    """Return what is asked, for these sizes."""
    return ScheduleConfig(schedule, num_ranks, num_microbatches, **{name: getattr(spec, name) for name in _ASKED})


def build(config: ScheduleConfig) -> Schedule:
    """Generate, then run the passes, checking the schedule after each.

    Raises ValueError for what cannot be built, naming the value, the limit and the way out.
    """
    return run(*_recipe(config))


@lru_cache(maxsize=256)
def built(config: ScheduleConfig) -> Schedule:
    """Build a schedule, remembered."""
    return build(config)


@lru_cache(maxsize=256)
def unchecked(config: ScheduleConfig) -> Schedule:
    """Build a schedule for predictions without checking it, remembered: thousands of configurations of a search share
    about a hundred.

    Checking takes several times as long as building: whoever prints or runs a schedule checks it.
    """
    schedule, changes, _ = _recipe(config)
    for change in changes:
        schedule = change(schedule)
    return schedule


def orders_of(config: ScheduleConfig) -> Iterator[list[Action]]:
    """Return every rank's computations in their order before any pass, not placed, of a family's usual order."""
    assert config.written is None, "what was written is no family's"
    assert config.limit is None, "an order made for a bound is not the usual one"
    family, sizes = FAMILIES[config.schedule], (config.num_ranks, config.num_microbatches, config.num_chunks)
    orders: Sequence[Order]
    if config.vocabulary is Vocabulary.WHOLE:
        orders = _usual_orders(config)
    else:
        assert family.sharded is not None, f"nobody has said where shards stand in {family.name}"
        orders = family.sharded(*sizes, config, config.layout)
    for order in orders:
        yield [action for one in order for action in (one.computations if isinstance(one, Slot) else (one,))]


def _recipe(config: ScheduleConfig) -> tuple[Schedule, tuple[Pass, ...], Exchange]:
    """What to start from, the passes, and the exchange by which it is checked."""
    if config.written is not None:
        return _adopted(config, config.written)
    if config.limit is not None:
        return _made_for(config, config.limit)[1], passes(config.balance), config.passing
    schedule = _usual(config)
    if config.after_input != 1:
        schedule = with_after_input(schedule, config.after_input)
    return schedule, passes(config.balance), config.passing


def _usual(config: ScheduleConfig) -> Schedule:
    """Return the family's own order, whatever bound is asked."""
    family, sizes = FAMILIES[config.schedule], (config.num_ranks, config.num_microbatches, config.num_chunks)
    if config.vocabulary is Vocabulary.WHOLE:
        return place(family.name, config.num_microbatches * config.slices, config.layout, _usual_orders(config))
    return family.generate_sharded(*sizes, config.vocabulary, config.input_shards, config)


# Large enough for the orders that a search over 2,048 devices reuses (about 300 MB).
_REMEMBERED = RememberedOrders(8_000_000)


def _usual_orders(config: ScheduleConfig) -> Sequence[Order]:
    """Return the family's own orders, cached: they do not depend on how they are balanced, and some take long."""
    sizes = config.num_ranks, config.num_microbatches, config.num_chunks
    options = tuple(getattr(config, name) for name in _FAMILY_OPTIONS)
    key = config.schedule, sizes, options
    return _REMEMBERED.of(key, lambda: FAMILIES[config.schedule].orders(*sizes, config))


def choice_for_bound(config: ScheduleConfig) -> OrderChoice | None:
    """Return what was chosen for the bound; None where nothing was left to choose.

    Raises ValueError where no order keeps the bound.
    """
    return None if config.limit is None else _made_for(config, config.limit)[0]


@lru_cache(maxsize=16)
def _made_for(config: ScheduleConfig, limit: RankLimit) -> tuple[OrderChoice, Schedule]:
    """Return the fastest of the family's orders for a bound that pairs can keep.

    Raises ValueError where there is none.
    """
    family, sizes = FAMILIES[config.schedule], (config.num_ranks, config.num_microbatches, config.num_chunks)
    staying = config.balance is not None and config.balance.buffers_stay
    for choice, made in family.generate_within(*sizes, limit, config, config.vocabulary, config.input_shards):
        schedule = replace(made, after_input=limit.after_input)
        if keeps_bound(schedule, limit.bound, staying):
            return choice, schedule
    usual = replace(_usual(config), after_input=limit.after_input)
    if keeps_bound(usual, limit.bound, staying):
        group = min(family.usual_group(config.num_ranks), config.num_microbatches)
        return OrderChoice(groups_of(config.num_microbatches, group), "the usual order"), usual
    evened = balance(usual)
    (kept,) = {max(allocated_counts(evened))} if staying else set(evened.bounds or ())
    raise ValueError(
        f"no order of {config.schedule} was found that keeps every rank within {limit.bound} micro-batches of a chunk"
        f"{', host buffers included' if staying else ''}: "
        f"its groups of {family.usual_group(config.num_ranks)} keep {kept}; raise the bound, or use more chunks"
    )


def config_of_schedule(schedule: Schedule, balance: BalanceConfig | None = None) -> ScheduleConfig:
    """Return the configuration of a schedule from elsewhere, balanced if asked.

    One with transfers is balanced already and stays as it is.

    Raises ValueError for one that breaks a rule.
    """
    check(schedule, Exchange.POSTED)
    text = f"{header(schedule)}\n{write_rows(schedule)}"
    return ScheduleConfig(
        schedule.name,
        schedule.num_ranks,
        schedule.num_whole_microbatches,
        num_chunks=schedule.num_chunks,
        balance=balance,
        slices=schedule.layout.slices,
        written=text,
    )


@lru_cache(maxsize=16)
def _read(written: str) -> Schedule:
    return read_csv(written)


def _adopted(config: ScheduleConfig, written: str) -> tuple[Schedule, tuple[Pass, ...], Exchange]:
    schedule = _read(written)
    own = {
        "num_ranks": schedule.num_ranks,
        "num_microbatches": schedule.num_whole_microbatches,
        "num_chunks": schedule.num_chunks,
        "slices": schedule.layout.slices,
    }
    for name, size in own.items():
        if getattr(config, name) != size:
            raise ValueError(f"schedule {schedule.name} has {name} {size}, not {getattr(config, name)}")
    return schedule, passes(config.balance) if schedule.hosts is None else (), config.passing


def adopt(schedule: Schedule, how: BalanceConfig | None = None) -> Schedule:
    """Return a schedule from elsewhere, checked, and balanced if asked."""
    return run(schedule, passes(how), exchange_of(schedule.name))


def passes(how: BalanceConfig | None) -> tuple[Pass, ...]:
    """Return the passes that a configuration asks for, in order."""
    return () if how is None else (lambda schedule: balanced(schedule, how),)


def run(schedule: Schedule, changes: Sequence[Pass], exchange: Exchange) -> Schedule:
    """Run the passes, checking after each, as it will be run. What a pass gets has been checked."""
    check(schedule, exchange)
    for change in changes:
        schedule = change(schedule)
        check(schedule, exchange)
    return schedule
