"""What a family of schedules is: a value that generates schedules and answers the questions of plans and commands.

Nobody outside of this package compares a schedule's name: fields here tell families apart.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from typing import Any

from bpipe.schedule.families.turns import WarmUp
from bpipe.schedule.families.unit_grid import Order, place
from bpipe.schedule.layout import Layout, one_pipe
from bpipe.schedule.program import Exchange
from bpipe.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """Durations on one rank for one micro-batch, all its chunks together, in any unit.

    A backward that is not split takes as long as its halves.

    Attributes:
        forward: A forward.
        backward_input: First half of a backward, I.
        backward_weight: Second half of a backward, W.
        hop: A message from one rank to another.

    Raises:
        ValueError: A duration is not positive, or that of W or a hop negative.
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
        """Whether all computations of a stage take equally long, and messages no time."""
        return self.forward == self.backward_input == self.backward_weight and not self.hop


ALIKE = UnitCosts()


def _taken_by(family_field: str, lack: str, default: object) -> Any:
    """Declare an option for families whose `family_field` is true; `lack` is said of the others."""
    return field(default=default, metadata={"taken_by": family_field, "lack": lack})


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyOptions:
    """Options of a family besides sizes. Their flags are the rows `ORDER` of `bpipe.config.flags.schedules`."""

    group_size: int | None = _taken_by("takes_groups", "has no groups of micro-batches", None)
    """Micro-batches that go through a chunk before the next chunk's turn; by default the family's usual group."""

    delay: int = _taken_by("takes_delay", "does not delay weight gradients", 0)
    """Micro-batches whose I comes before a W, slices if micro-batches are cut."""

    slices: int = _taken_by("takes_slices", "does not cut micro-batches into slices", 1)
    """Slices into which each micro-batch's sequence is cut; orders are then of slices (`turns.in_slices`)."""

    costs: UnitCosts = ALIKE
    """Durations by which a family that knows several orders chooses."""


NO_OPTIONS = FamilyOptions()
# The options that only some families take, by name.
TAKEN = {option.name: option for option in fields(FamilyOptions) if option.metadata}


# (num_ranks, num_chunks) -> which rank computes which stage.
LayoutOf = Callable[[int, int], Layout]
# (num_ranks, num_microbatches, num_chunks, options) -> one order per rank.
Orders = Callable[[int, int, int, FamilyOptions], Sequence[Order]]
# The same with a bound for all ranks, once pairs share memory -> orders made for it, fastest first, each with the sizes
# of its groups.
OrdersWithin = Callable[[int, int, int, int, FamilyOptions], Iterable[tuple[tuple[int, ...], Sequence[Order]]]]
# The same with a layout -> orders with the layout's shards of the vocabulary.
ShardedOrders = Callable[[int, int, int, FamilyOptions, Layout], Sequence[Order]]
# Both: orders with shards, made for a bound.
ShardedOrdersWithin = Callable[
    [int, int, int, int, FamilyOptions, Layout], Iterable[tuple[tuple[int, ...], Sequence[Order]]]
]


@dataclass(frozen=True, slots=True)
class Family:
    """One family of schedules.

    Attributes:
        name: Name that commands, files and records give it.
        layout: Placement of its stages.
        orders: Orders of its ranks, possibly chosen by costs; raises ValueError for sizes that it cannot take.
        exchange: Exchange order between stages of whoever runs it.
        min_chunks: Least number of stages of a rank.
        max_chunks: Greatest number; None for any.
        takes_groups: Whether a group size may be given.
        usual_group: The default group size, by number of ranks.
        takes_delay: Whether a delay of W may be given.
        takes_slices: Whether micro-batches may be cut into slices.
        splits: Whether backwards are computed in halves.
        overlaps: Whether a forward and a backward run at once in its steady phase, for launches that hide communication
            so.
        fill: Micro-batches per rank with which the pipeline is full: further ones do not raise what any rank holds.
            None if every rank holds all, and pairs have nothing to share.
        ahead: Micro-batches of a chunk that the first rank holds at least when it holds most, with equal costs, by
            numbers of ranks, micro-batches and chunks and the group; that many slices with slices, unless
            `sliced_warm_up` says more. None if unknown.
        warm_up: What all ranks hold at their first backward, by the same numbers.
        sliced_warm_up: The same of slices, by the group that is asked, or None, and the number of slices.
        sharded: Orders with the vocabulary's layers split over all ranks; None if unknown.
        interlaces: Whether these also exist with nothing next to the shards.
        within: Orders for a bound, fastest first; balancing decides whether pairs keep it. None if unknown.
        sharded_within: The same with the vocabulary's layers split.
        num_pipes: Ways through the same ranks, each with its own replica of all stages; divides the number of ranks.
        summary: What the family is, in one sentence.
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
    summary: str = ""

    def generate(
        self, num_ranks: int, num_microbatches: int, num_chunks: int = 1, options: FamilyOptions = NO_OPTIONS
    ) -> Schedule:
        """Return the compute-only schedule. Costs choose orders; on the grid any computation takes one slot."""
        orders = self.orders(num_ranks, num_microbatches, num_chunks, options)
        layout = replace(self.layout(num_ranks, num_chunks), slices=options.slices)
        return place(self.name, num_microbatches * options.slices, layout, orders)

    def takes(self, option: str) -> bool:
        """Whether one of the `TAKEN` options may be given."""
        return bool(getattr(self, TAKEN[option].metadata["taken_by"]))

    def filling(self, num_ranks: int) -> int:
        """Return how many micro-batches fill the pipeline; one per rank if it never is full."""
        return (self.fill or 1) * num_ranks

    def chunks(self, limit: int) -> range:
        """Return the possible numbers of chunks per rank, up to `limit`."""
        return range(self.min_chunks, min(limit, self.max_chunks or limit) + 1)


def one_stage_a_rank(num_ranks: int, num_chunks: int) -> Layout:
    return one_pipe(range(num_ranks))
