"""Two chunks per rank in the shape of a V, within a bound.

In: sizes, a building block, a bound, costs. Out: every rank's order.

Stage s is on rank s, stage p + k on rank p - 1 - k: the last rank has both stages in the middle, the first one both
ends, so what enters the first chunk last leaves the second first, and ranks hold alike. A building block says when each
rank begins the two forwards and the two I of a micro-batch; micro-batches repeat it every six slots, in which a rank
has room for these and both W. How long a block keeps a micro-batch is what a rank holds. W go into the first slots that
are free, in order. What is left unused while the pipeline fills and empties, and what durations that differ leave, is
made use of within the bound by moving everything to and fro (`shift`). Cut into k slices, what is repeated is a slice:
backwards begin k - 1 intervals later, for which a rank has room for as many more. Source: Qi et al., "Pipeline
Parallelism with Controllable Memory", 2024. Knows no schedule by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from bpipe.schedule.action import Action, Kind, by_microbatch
from bpipe.schedule.families.family import Family, FamilyOptions, UnitCosts
from bpipe.schedule.families.run_ahead import later_microbatch
from bpipe.schedule.families.shift import shortened
from bpipe.schedule.families.slices import in_slices
from bpipe.schedule.families.steady_phase import lengthened
from bpipe.schedule.layout import Layout, one_pipe
from bpipe.schedule.program import Exchange

_KINDS = _FORWARD, _INPUT, _WEIGHT = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
_INTERVAL = 6
# With so many micro-batches per rank the pipeline is full.
_FILL = 2

# (num_ranks, rank) -> the slots in which it begins F of micro-batch 0 in its first chunk and its second, and I in the
# second and the first.
Block = Callable[[int, int], tuple[int, int, int, int]]


def layout(num_ranks: int, num_chunks: int) -> Layout:
    return one_pipe((*range(num_ranks), *reversed(range(num_ranks))))


def half(num_ranks: int, rank: int) -> tuple[int, int, int, int]:
    """Return V-Half's block: forwards go down at half speed, everything else at full speed, and a rank holds half of
    what 1F1B's first one does."""
    gap = 0 if num_ranks % 2 else 3
    down, up = 2 * rank, 3 * num_ranks - 2 - rank
    return down, up, 3 * num_ranks - 1 + gap + 2 * rank, 6 * num_ranks - 2 + gap - rank


def third(num_ranks: int, rank: int) -> tuple[int, int, int, int]:
    """Return V-Min's block: a micro-batch goes both ways without a stop, and a rank holds a third of what 1F1B's
    first one does, the least."""
    gap = 0 if num_ranks % 3 else 2
    return rank, 2 * num_ranks - 1 - rank, 2 * num_ranks + gap + rank, 4 * num_ranks + gap - 1 - rank


def family_within(
    name: str, block: Block, most: Callable[[int], int], least: Callable[[int], int] | None = None
) -> Family:
    """Return the family of a block. Each rank holds at most `most` micro-batches of a chunk, by the number of ranks.

    In a full pipeline the first rank holds at least `least`, by default as many.
    """

    def orders(num_ranks: int, num_microbatches: int, _: int, options: FamilyOptions) -> Sequence[Sequence[Action]]:
        slices = options.slices
        return orders_within(
            num_ranks, num_microbatches, block, most(num_ranks) + 2 * (slices - 1), options.costs, slices
        )

    def ahead(num_ranks: int, num_microbatches: int, _: int, group: int) -> int:
        return (least or most)(num_ranks) if num_microbatches >= _FILL * num_ranks else 1

    return Family(
        name,
        layout,
        orders,
        Exchange.POSTED,
        min_chunks=2,
        max_chunks=2,
        splits=True,
        fill=_FILL,
        ahead=ahead,
        sharded=later_microbatch(orders),
        takes_slices=True,
    )


# Whole and in shards by either algorithm, with the embedding and without, a configuration has the same orders.
@lru_cache(maxsize=16)
def orders_within(
    num_ranks: int, num_microbatches: int, block: Block, most: int, costs: UnitCosts, slices: int = 1
) -> Sequence[Sequence[Action]]:
    """Return the shortest orders found from the block in which no rank holds more than `most` micro-batches of a
    chunk, or slices.

    Where durations are even, those of many micro-batches repeat the steady phase of few: they are the same as if all
    were moved, and are made in a fraction of the time.
    """
    placed, few = replace(layout(num_ranks, 2), slices=slices), _num_steady(num_ranks, slices)
    if costs.even and num_microbatches > few:
        orders = orders_within(num_ranks, few, block, most, costs, slices)
        longer = lengthened(placed, few * slices, orders, slices, num_microbatches - few, costs)
        if longer is not None:
            return longer
    width, later = num_microbatches * slices, _INTERVAL * (slices - 1)
    repeated = []
    for rank in range(num_ranks):
        down, up, back, last = block(num_ranks, rank)
        repeated.append(_repeated(num_ranks, rank, width, (down, up, back + later, last + later)))
    return shortened(placed, width, in_slices(repeated, slices), [most] * num_ranks, costs)


def _num_steady(num_ranks: int, slices: int) -> int:
    """Return with how many micro-batches what is moved while the pipeline fills and empties leaves a step in between."""
    return -(-7 * num_ranks // (2 * slices)) + 3


def _repeated(num_ranks: int, rank: int, num_microbatches: int, begins: tuple[int, int, int, int]) -> list[Action]:
    """One rank's order: its block once every interval, and W wherever there is room."""
    first, second = rank, 2 * num_ranks - 1 - rank
    block = zip(begins, ((first, _FORWARD), (second, _FORWARD), (second, _INPUT), (first, _INPUT)), strict=True)
    known = {
        key: by_microbatch(*key, num_microbatches)
        for key in ((stage, kind) for stage in (first, second) for kind in _KINDS)
    }
    begun = sorted(
        (slot + _INTERVAL * k, k, stage, kind) for slot, (stage, kind) in block for k in range(num_microbatches)
    )
    order: list[Action] = []
    waiting: list[Action] = []
    now = 0
    for slot, microbatch, stage, kind in begun:
        free = slot - now
        order += waiting[:free]
        del waiting[:free]
        order.append(known[stage, kind][microbatch])
        if kind is _INPUT:
            waiting.append(known[stage, _WEIGHT][microbatch])
        now = slot + 1
    return order + waiting
