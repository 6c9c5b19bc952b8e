"""Two chunks per rank in the shape of a V, within a bound.

Stage s is on rank s, stage p + k on rank p - 1 - k: the last rank has both stages in the middle, the first one both
ends, so what enters the first chunk last leaves the second first, and ranks hold alike. A building block says when each
rank begins the two forwards and the two I of a micro-batch; micro-batches repeat it every six slots, in which a rank
has room for these and both W. A rank holds a micro-batch for as long as its block lasts. W go into the first free
slots, in order. Moving everything to and fro within the bound (`shift`) uses what is left while the pipeline fills and
empties, and what durations that differ leave. If micro-batches are cut into k slices, slices are repeated: backwards
begin k - 1 intervals later, and a rank has room for as many more. Source: Qi et al., "Pipeline Parallelism with
Controllable Memory", 2024.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain

from bpipe.schedule.action import Action, Kind, by_microbatch, of_microbatch
from bpipe.schedule.families.family import Family, FamilyOptions, UnitCosts
from bpipe.schedule.families.shards import later_microbatch
from bpipe.schedule.families.shift import shortened
from bpipe.schedule.families.timing import starts, work_at
from bpipe.schedule.families.turns import in_slices
from bpipe.schedule.layout import Layout, one_pipe
from bpipe.schedule.program import Exchange

_FORWARD, _INPUT, _WEIGHT = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
_INTERVAL = 6
# Micro-batches per rank with which the pipeline is full.
_FILL = 2

# (num_ranks, rank) -> the slots in which the rank begins F of micro-batch 0 in its first chunk and its second, and I in
# the second and the first.
Block = Callable[[int, int], tuple[int, int, int, int]]


def layout(num_ranks: int, num_chunks: int) -> Layout:
    return one_pipe((*range(num_ranks), *reversed(range(num_ranks))))


def half(num_ranks: int, rank: int) -> tuple[int, int, int, int]:
    """Return V-Half's block: forwards go down at half speed, all else at full; a rank holds half of 1F1B's first."""
    gap = 0 if num_ranks % 2 else 3
    down, up = 2 * rank, 3 * num_ranks - 2 - rank
    return down, up, 3 * num_ranks - 1 + gap + 2 * rank, 6 * num_ranks - 2 + gap - rank


def third(num_ranks: int, rank: int) -> tuple[int, int, int, int]:
    """Return V-Min's block: a micro-batch goes both ways without a stop, and a rank holds a third of 1F1B's first."""
    gap = 0 if num_ranks % 3 else 2
    return rank, 2 * num_ranks - 1 - rank, 2 * num_ranks + gap + rank, 4 * num_ranks + gap - 1 - rank


def family_within(
    name: str, summary: str, block: Block, limit_of: Callable[[int], int], least_of: Callable[[int], int] | None = None
) -> Family:
    """Return the family of a block.

    Args:
        name: Name of the family.
        summary: Its line in the list of families.
        block: The slots in which a rank begins the computations of its first micro-batch.
        limit_of: Most micro-batches of a chunk that a rank holds, by the number of ranks.
        least_of: Least that the first rank holds in a full pipeline; by default `limit_of`.
    """

    def orders(num_ranks: int, num_microbatches: int, _: int, options: FamilyOptions) -> Sequence[Sequence[Action]]:
        bound = limit_of(num_ranks) + 2 * (options.slices - 1)
        return orders_within(num_ranks, num_microbatches, block, bound, options.costs, options.slices)

    def ahead(num_ranks: int, num_microbatches: int, _: int, group: int) -> int:
        return (least_of or limit_of)(num_ranks) if num_microbatches >= _FILL * num_ranks else 1

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
        summary=summary,
    )


# A configuration has the same orders whole and in shards by either algorithm, with the embedding and without.
@lru_cache(maxsize=16)
def orders_within(
    num_ranks: int, num_microbatches: int, block: Block, limit: int, costs: UnitCosts, slices: int = 1
) -> Sequence[Sequence[Action]]:
    """Return the shortest orders found from the block in which no rank holds more than `limit` micro-batches, or slices,
    of a chunk.

    If durations are even, orders of many micro-batches repeat the steady phase of few: these are the same as if all
    were moved, and made in a fraction of the time.
    """
    placed, few = replace(layout(num_ranks, 2), slices=slices), _num_steady(num_ranks, slices)
    if costs.even and num_microbatches > few:
        orders = orders_within(num_ranks, few, block, limit, costs, slices)
        longer = lengthened(placed, few * slices, orders, slices, num_microbatches - few, costs)
        if longer is not None:
            return longer
    width, later = num_microbatches * slices, _INTERVAL * (slices - 1)
    repeated = []
    for rank in range(num_ranks):
        down, up, first_back, second_back = block(num_ranks, rank)
        repeated.append(_repeated(num_ranks, rank, width, (down, up, first_back + later, second_back + later)))
    return shortened(placed, width, in_slices(repeated, slices), [limit] * num_ranks, costs)


def _num_steady(num_ranks: int, slices: int) -> int:
    """Return the number of micro-batches with which moving leaves a whole step between filling and emptying."""
    return -(-7 * num_ranks // (2 * slices)) + 3


def _repeated(num_ranks: int, rank: int, num_microbatches: int, begins: tuple[int, int, int, int]) -> list[Action]:
    """Return one rank's order: its block once every interval, and W wherever there is room."""
    first, second = rank, 2 * num_ranks - 1 - rank
    block = zip(begins, ((first, _FORWARD), (second, _FORWARD), (second, _INPUT), (first, _INPUT)), strict=True)
    actions = {
        (stage, kind): by_microbatch(stage, kind, num_microbatches)
        for stage in (first, second)
        for kind in (_FORWARD, _INPUT, _WEIGHT)
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
        order.append(actions[stage, kind][microbatch])
        if kind is _INPUT:
            waiting.append(actions[stage, _WEIGHT][microbatch])
        now = slot + 1
    return order + waiting


def lengthened(
    layout: Layout, num_microbatches: int, orders: Sequence[Sequence[Action]], step: int, times: int, costs: UnitCosts
) -> list[list[Action]] | None:
    """Return orders of `num_microbatches` with a step of `step` micro-batches repeated `times` times more.

    A step is a sequence of computations that every rank has just computed at some moment, and will compute of the next
    micro-batches. It may be repeated there for further micro-batches: its operands are made in the same step or an
    earlier one, so nobody waits for ever, and it ends with as much held as it began with. None if there is no such
    moment.
    """
    lengths = [len(order) * step // num_microbatches for order in orders]
    for cuts in _moments(layout, num_microbatches, orders, costs):
        phases = [order[max(0, cut - size) : cut] for order, cut, size in zip(orders, cuts, lengths, strict=True)]
        parts = list(zip(orders, cuts, phases, strict=True))
        complete = list(map(len, phases)) == lengths
        if complete and all(_later(phase, step) == list(order[cut : cut + len(phase)]) for order, cut, phase in parts):
            return [
                [
                    *order[:cut],
                    *chain.from_iterable(_later(phase, number * step) for number in range(1, times + 1)),
                    *_later(order[cut:], times * step),
                ]
                for order, cut, phase in parts
            ]
    return None


def _moments(
    layout: Layout, num_microbatches: int, orders: Sequence[Sequence[Action]], costs: UnitCosts
) -> Iterator[list[int]]:
    """Yield how many computations each rank has begun at moments of the iteration, from the middle on to both ends."""
    work = work_at(layout, num_microbatches, orders, costs)
    begins = starts(work)
    rows = [[begins[job] for job in row] for row in work.rows]
    middle = max(row[-1] for row in rows) / 2
    for moment in sorted(rows[0], key=lambda moment: abs(moment - middle)):
        yield [bisect_left(row, moment) for row in rows]


def _later(computed: Sequence[Action], further: int) -> list[Action]:
    """Return the same computations of later micro-batches."""
    return [of_microbatch(action, action.microbatch + further) for action in computed]


# Every rank holds at most p micro-batches of its share, as 1F1B's first does. With F, I and W of equal length the last
# rank never waits between its first computation and its last, so no order is shorter: in slots of half a micro-batch an
# iteration takes 6 m and the p - 1 until the last rank begins. Earlier ranks begin before it, and wait at most as long
# in between. At other costs the order is the shortest that `shift` finds. It starts from V-Half's building block: more
# room is all that ZB-V has. Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2024.
ZB_V = family_within(
    "zb-v",
    "ZB-V: two chunks per rank in a V that hold what 1F1B does, as short as can be",
    half,
    limit_of=lambda num_ranks: 2 * num_ranks,
)

# No rank holds more than (p + 2) // 2 micro-batches of its share, and all hold alike: balancing moves nothing. With F,
# I and W of equal length every rank computes without a pause once the pipeline is full: in slots of half a micro-batch
# an iteration takes 6 m and, from p = 3 on, 3 p - 7 more for even p, 3 p - 4 for odd p.
V_HALF = family_within(
    "v-half",
    "V-Half: two chunks per rank in a V that hold half of what 1F1B does",
    half,
    limit_of=lambda num_ranks: 2 * ((num_ranks + 2) // 2),
)

# No rank holds more than (p + 4) // 3 micro-batches of its share, the least with which a V of F, I and W of equal
# length runs at its full rate. Filling and emptying cost most here: in slots of half a micro-batch an iteration takes 6
# m and 4 p - 5, 4 p - 9 or 4 p - 7 more, from p = 4 on, for p % 3 of 1, 2 and 0. There is no room for durations that
# differ: at other costs, and over slow hops, ranks wait in every interval.
V_MIN = family_within(
    "v-min",
    "V-Min: two chunks per rank in a V that hold a third of what 1F1B does",
    third,
    limit_of=lambda num_ranks: 2 * ((num_ranks + 4) // 3),
    least_of=lambda num_ranks: 2 * num_ranks // 3,
)
