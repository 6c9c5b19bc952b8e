"""Say what a family of schedules is.

In: what its file gives. Out: a value that generates, and answers what plans and commands ask of it.

Nobody outside of this package compares a schedule's name: what tells families apart is a field here. Knows no family
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from bpipe.schedule.families.turns import WarmUp
from bpipe.schedule.families.unit_grid import Order, place
from bpipe.schedule.layout import Layout, Vocabulary, one_pipe
from bpipe.schedule.program import Exchange
from bpipe.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """Durations on one rank for one micro-batch, all its chunks together: a forward, and the two parts of a backward;
    any unit.

    A backward that is not split takes as long as its halves. `hop`: how long a message takes from one rank to another,
    in the same unit. Raises ValueError for what takes no time, or less; only W and a hop may take none.
    """

    forward: int | Fraction = 1
    backward_input: int | Fraction = 1
    backward_weight: int | Fraction = 1
    hop: int | Fraction = 0

    def __post_init__(self) -> None:
        if self.forward <= 0 or self.backward_input <= 0 or min(self.backward_weight, self.hop) < 0:
            costs = f"{self.forward}, {self.backward_input}, {self.backward_weight} and a hop of {self.hop}"
            raise ValueError(
                f"costs {costs}: a forward and a backward must cost more than 0, the weights' half and a hop at least 0"
            )

    @property
    def even(self) -> bool:
        """Whether all computations of a stage take as long, and messages no time."""
        return self.forward == self.backward_input == self.backward_weight and not self.hop


ALIKE = UnitCosts()


@dataclass(frozen=True, slots=True)
class RankLimit:
    """Limits of a rank once pairs share their memory: `bound` micro-batches of a chunk, and `after_input`, the share
    held between I and W."""

    bound: int
    after_input: Fraction = Fraction(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyOptions:
    """What a family is asked besides sizes. Each takes the options that its fields in `Family` name."""

    group_size: int | None = None
    """Micro-batches that go through a chunk before the next chunk's turn; by default as many as the family says."""

    delay: int = 0
    """Micro-batches whose I comes before a W, slices if micro-batches are cut."""

    slices: int = 1
    """Slices into which each micro-batch's sequence is cut; orders are then of slices (`schedule.families.slices`)."""

    costs: UnitCosts = ALIKE
    """What a family that knows several orders chooses by."""


NO_OPTIONS = FamilyOptions()


@dataclass(frozen=True, slots=True)
class OrderChoice:
    """Description of an order made within a bound: sizes of its `groups`, and its `rule` in words."""

    groups: tuple[int, ...]
    rule: str


# (num_ranks, num_chunks) -> who computes which stage.
LayoutOf = Callable[[int, int], Layout]
# (num_ranks, num_microbatches, num_chunks, what else is asked) -> one order per rank.
Orders = Callable[[int, int, int, FamilyOptions], Sequence[Order]]
# The same, for a limit -> orders made for it, and what each is: those that take least time first.
OrdersWithin = Callable[[int, int, int, RankLimit, FamilyOptions], Iterable[tuple[OrderChoice, Sequence[Order]]]]
# The same, and a layout -> orders with shards of the vocabulary, as that says.
ShardedOrders = Callable[[int, int, int, FamilyOptions, Layout], Sequence[Order]]
# Both: orders with shards made for a limit.
ShardedOrdersWithin = Callable[
    [int, int, int, RankLimit, FamilyOptions, Layout], Iterable[tuple[OrderChoice, Sequence[Order]]]
]


@dataclass(frozen=True, slots=True)
class Family:
    """One family of schedules, by the name that commands, files and records give it.

    `orders` may choose among its rules by costs, and raises ValueError for sizes that it cannot take. A rank has
    `min_chunks` to `max_chunks` stages (None: any number). `takes_groups`: a group size may be given, by default
    `usual_group` of the number of ranks; `takes_delay`: a delay of W; `takes_slices`: micro-batches may be cut.
    `splits`: backwards are computed in halves. `overlaps`: a forward and a backward run at once in its steady phase,
    which only a launch asks for that hides communication so. `exchange` is the rule by which whoever runs it sends and receives
    between stages. `fill`: with that many micro-batches per rank the pipeline is full, and no rank holds more of them
    however many follow; None where every rank holds all, and has nothing to share. `ahead`: so many micro-batches of a
    chunk the first rank holds at least when it holds most, with equal costs, by numbers of ranks, micro-batches and
    chunks and the group; so many slices by the number of slices, where no `sliced_warm_up` says more. None where nobody
    has said. `warm_up`, by the same: what all ranks hold at their first
    backward; `sliced_warm_up`, by the number of slices, too, and the group that is asked or None: what they hold of
    slices. `within`: orders for the room that is asked, fastest first, `sharded_within` with the vocabulary's layers
    split; whether pairs then keep the bound, balancing says. None where nobody has said how. `sharded`: the orders
    where the vocabulary's layers are split over all ranks; None where nobody has said how. `interlaces`: also with
    nothing beside the shards. `early`: the family that is this one with early forwarding, which lets more micro-batches
    in for less waiting; None where there is none. `num_pipes`: ways through the same ranks, each with its own replica
    of all stages; the number of ranks is a multiple of it.
    """

    name: str
    layout: LayoutOf
    orders: Orders
    exchange: Exchange
    min_chunks: int = 1
    max_chunks: int | None = 1
    takes_groups: bool = False
    usual_group: Callable[[int], int] = lambda num_ranks: 1
    takes_delay: bool = False
    takes_slices: bool = False
    splits: bool = False
    overlaps: bool = False
    fill: int | None = None
    ahead: Callable[[int, int, int, int], int] | None = None
    warm_up: Callable[[int, int, int, int], WarmUp] | None = None
    sliced_warm_up: Callable[[int, int, int, int | None, int], WarmUp] | None = None
    sharded: ShardedOrders | None = None
    interlaces: bool = False
    within: OrdersWithin | None = None
    sharded_within: ShardedOrdersWithin | None = None
    num_pipes: int = 1
    early: str | None = None

    def generate(
        self, num_ranks: int, num_microbatches: int, num_chunks: int = 1, options: FamilyOptions = NO_OPTIONS
    ) -> Schedule:
        """Return the compute-only schedule: every rank's order, placed.

        Costs choose orders; on the grid any computation takes one slot.
        """
        orders = self.orders(num_ranks, num_microbatches, num_chunks, options)
        layout = replace(self.layout(num_ranks, num_chunks), slices=options.slices)
        return place(self.name, num_microbatches * options.slices, layout, orders)

    def generate_sharded(
        self,
        num_ranks: int,
        num_microbatches: int,
        num_chunks: int,
        vocabulary: Vocabulary,
        input_shards: bool,
        options: FamilyOptions,
    ) -> Schedule:
        """Generate a schedule with shards of the output layer on all ranks, and of the embedding where asked.

        Its name says so: no loop of Megatron's runs shards, so our executor runs it.
        """
        assert self.sharded is not None, f"nobody has said where shards stand in {self.name}"
        whole = replace(self.layout(num_ranks, num_chunks), slices=options.slices)
        layout = replace(whole, vocabulary=vocabulary, input_shards=input_shards)
        made = self.sharded(num_ranks, num_microbatches, num_chunks, options, layout)
        return place(self._name_of(vocabulary), num_microbatches * options.slices, layout, made)

    def generate_within(
        self,
        num_ranks: int,
        num_microbatches: int,
        num_chunks: int,
        limit: RankLimit,
        options: FamilyOptions,
        vocabulary: Vocabulary = Vocabulary.WHOLE,
        input_shards: bool = False,
    ) -> Iterable[tuple[OrderChoice, Schedule]]:
        """Yield schedules for a bound, one for each order that the family knows for it."""
        layout = replace(self.layout(num_ranks, num_chunks), vocabulary=vocabulary, input_shards=input_shards)
        asked = num_ranks, num_microbatches, num_chunks, limit, options
        if vocabulary is Vocabulary.WHOLE:
            assert self.within is not None, f"nobody has said how {self.name} is made for a bound"
            made = self.within(*asked)
        else:
            assert self.sharded_within is not None, (
                f"nobody has said where shards stand in {self.name} that is made for a bound"
            )
            made = self.sharded_within(*asked, layout)
        for choice, orders in made:
            yield choice, place(self._name_of(vocabulary), num_microbatches, layout, orders)

    def _name_of(self, vocabulary: Vocabulary) -> str:
        return self.name if vocabulary is Vocabulary.WHOLE else f"{self.name}-vocabulary-{vocabulary.value}"

    def filling(self, num_ranks: int) -> int:
        """Return how many micro-batches fill the pipeline; where it never is full, one per rank."""
        return (self.fill or 1) * num_ranks

    def chunks(self, most: int) -> range:
        """Return the numbers of chunks a rank that there are, up to `most`."""
        return range(self.min_chunks, min(most, self.max_chunks or most) + 1)


def one_stage_a_rank(num_ranks: int, num_chunks: int) -> Layout:
    return one_pipe(range(num_ranks))
