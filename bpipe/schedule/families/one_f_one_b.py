"""1F1B, GPipe, 1F1B with backwards in halves, and ZB-H1: one stage per rank.

In 1F1B a rank runs ahead by as many forwards as ranks follow it (warm-up), then alternates a forward and a backward
(steady phase), then runs the remaining backwards (cool-down). It saves at most min(p - rank, m) micro-batches; the grid
has 2 * (m + p - 1) slots. Cut into k slices it saves min(p - rank + k - 1, m k) of them, (p - rank + k - 1) / k
micro-batches. Source: Narayanan et al., "PipeDream-Flush" in "Memory-Efficient Pipeline-Parallel DNN Training", 2021.
"""

from collections.abc import Sequence
from dataclasses import replace

from bpipe.schedule.action import Action, Kind
from bpipe.schedule.families.family import Family, FamilyOptions, one_stage_a_rank
from bpipe.schedule.families.shards import BESIDE_HALVES, BESIDE_WHOLE, fit_shards, further_forwards
from bpipe.schedule.families.turns import WarmUp, in_slices, warm_up
from bpipe.schedule.families.unit_grid import Order, alternate, backwards, forwards
from bpipe.schedule.layout import Layout, Vocabulary
from bpipe.schedule.program import Exchange


def orders(num_ranks: int, num_microbatches: int, _: int, options: FamilyOptions) -> list[list[Action]]:
    return in_slices(in_turn(num_ranks, num_microbatches, options.slices), options.slices)


def in_turn(num_ranks: int, num_microbatches: int, slices: int) -> list[list[Action]]:
    """Return the orders whose backwards do not have their slices' numbers yet."""
    return [_order(rank, num_ranks - rank - 1 + slices - 1, num_microbatches * slices) for rank in range(num_ranks)]


def _order(rank: int, warm_up_forwards: int, num_microbatches: int) -> list[Action]:
    ahead = min(warm_up_forwards, num_microbatches)
    warm_up = forwards(rank, range(ahead))
    steady = alternate(forwards(rank, range(ahead, num_microbatches)), backwards(rank, range(num_microbatches - ahead)))
    cool_down = backwards(rank, range(num_microbatches - ahead, num_microbatches))
    return warm_up + steady + cool_down


def sliced_warm_up(num_ranks: int, num_microbatches: int, _: int, __: int | None, slices: int) -> WarmUp:
    """Return what each rank holds at its first backward, including the forward before it."""
    return warm_up([num_ranks - rank + slices - 1 for rank in range(num_ranks)], num_microbatches * slices, 1, 1)


_running_ahead = further_forwards(orders, BESIDE_WHOLE)


def sharded(
    num_ranks: int, num_microbatches: int, num_chunks: int, options: FamilyOptions, layout: Layout
) -> Sequence[Order]:
    """Return the orders with the vocabulary's shards: with everything that runs next to them, or interlaced.

    Between the last stage's forward of a micro-batch and its backward every rank computes its shard, S and T, and waits
    for the others': each barrier delays a micro-batch by an interval, so a rank runs one forward further ahead for
    each. With algorithm 1 there are two (statistics, then the gradient), and a rank saves p - rank + 2 micro-batches;
    with algorithm 2 there is one, and it saves p - rank + 1. Source: Yeung et al., "Balancing Pipeline Parallelism with
    Vocabulary Parallelism", 2024.
    """
    if layout.vocabulary is not Vocabulary.INTERLACED:
        return _running_ahead(num_ranks, num_microbatches, num_chunks, options, layout)
    own = [_interlaced(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    return fit_shards(layout, num_microbatches, own, options.costs)[1]


def _interlaced(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """Return one rank's order by intervals, each of which begins with S and T of one micro-batch on all ranks.

    All ranks compute S and T at the same time and nothing else in between, so all must be at the same point of an
    interval. The rest of it has room for F B on one rank and B F on the next: a forward takes half an interval from
    rank to rank, a backward, which is longer, a whole one. Together that is half as much again as in 1F1B: rank 0 saves
    1.5 p micro-batches, rounded up.
    """
    distance = num_ranks - 1 - rank
    forward_first = distance % 2 == 0
    placed: list[tuple[int, int, Action]] = []
    # In the interval of a micro-batch's S the last rank computes its backward, and in the one before its forward.
    for k in range(num_microbatches):
        forward_interval = k - 1 - (distance + 1) // 2
        placed += [
            (k, 0, Action(rank, Kind.SHARD_FORWARD, k)),
            (k, 1, Action(rank, Kind.SHARD_BACKWARD, k)),
            (forward_interval, 2 if forward_first else 3, Action(rank, Kind.FORWARD, k)),
            (k + distance, 3 if forward_first else 2, Action(rank, Kind.BACKWARD, k)),
        ]
    placed.sort(key=lambda entry: entry[:2])
    return [action for _, _, action in placed]


ONE_F_ONE_B = Family(
    "1f1b",
    one_stage_a_rank,
    orders,
    Exchange.MEGATRON_1F1B,
    fill=2,
    ahead=lambda p, m, v, g: min(p, m),
    sliced_warm_up=sliced_warm_up,
    sharded=sharded,
    interlaces=True,
    takes_slices=True,
    summary="1F1B: one forward, one backward",
)


def all_forwards_first(num_ranks: int, num_microbatches: int, _: int, options: FamilyOptions) -> list[list[Action]]:
    """Return GPipe's orders: every rank saves all micro-batches, so a pair has no room to share.

    Backwards run in the order of the forwards, as in torch.distributed.pipelining; the paper's figure draws them
    reversed, at the same length and peak. The grid has 2 * (m + p - 1) slots. Source: Huang et al., "GPipe", 2019.
    """
    everything = range(num_microbatches * options.slices)
    orders = [forwards(rank, everything) + backwards(rank, everything) for rank in range(num_ranks)]
    return in_slices(orders, options.slices)


GPIPE = Family(
    "gpipe",
    one_stage_a_rank,
    all_forwards_first,
    Exchange.POSTED,
    takes_slices=True,
    summary="GPipe: all forwards, then all backwards",
)


def split_orders(num_ranks: int, num_microbatches: int, _: int, options: FamilyOptions) -> list[list[Action]]:
    """Return 1F1B's order with I in place of B: the stage before gets its gradient while this one still computes W.

    The W of a micro-batch comes directly after its own I or, with a delay of N, after the I of the one N later, and the
    remaining W at the end. A rank holds what 1F1B holds and, from I to W, N micro-batches more: min(p - rank + N, m).
    With durations f, i, w of a forward and the halves an iteration takes m (f + i + w) + (p - 1)(f + i), (p - 1) w less
    than 1F1B, whatever the delay: all ranks delay alike. Early ranks still hold most, so balancing pays as in 1F1B.
    Source: the split of Qi et al., "Zero Bubble Pipeline Parallelism", 2024, on the order of Narayanan et al., 2021.
    """
    return defer_wgrads(num_ranks, num_microbatches, [options.delay] * num_ranks, options.slices)


def defer_wgrads(num_ranks: int, num_microbatches: int, delays: Sequence[int], slices: int = 1) -> list[list[Action]]:
    """Return 1F1B with split backwards, one order per rank.

    Args:
        num_ranks: Ranks of the pipeline.
        num_microbatches: Micro-batches of an iteration.
        delays: Per rank, the number of micro-batches, or slices, whose I comes between an I and its W.
        slices: Slices of a sequence.
    """
    width, orders = num_microbatches * slices, []
    for rank, (whole, delay) in enumerate(zip(in_turn(num_ranks, num_microbatches, slices), delays, strict=True)):
        order: list[Action] = []
        for action in whole:
            if action.kind is Kind.FORWARD:
                order.append(action)
                continue
            order.append(Action(rank, Kind.BACKWARD_INPUT, action.microbatch))
            if action.microbatch >= delay:
                order.append(Action(rank, Kind.BACKWARD_WEIGHT, action.microbatch - delay))
        left = range(max(0, width - delay), width)
        orders.append([*order, *(Action(rank, Kind.BACKWARD_WEIGHT, microbatch) for microbatch in left)])
    return in_slices(orders, slices)


SPLIT = Family(
    "1f1b-split",
    one_stage_a_rank,
    split_orders,
    Exchange.POSTED,
    takes_delay=True,
    takes_slices=True,
    splits=True,
    fill=2,
    ahead=lambda p, m, v, g: min(p, m),
    sliced_warm_up=sliced_warm_up,
    sharded=further_forwards(split_orders, BESIDE_HALVES),
    summary="1F1B with backwards in halves",
)


def delayed_by_rank(num_ranks: int, num_microbatches: int, _: int, options: FamilyOptions) -> list[list[Action]]:
    """Return ZB-H1's orders, in which the W of a micro-batch follows the I of the one `rank` later.

    A rank has `rank` of them left after its last I, and they fill 1F1B's wait at the end. A rank holds p - rank
    micro-batches as in 1F1B and `rank` that wait for their W: min(p, m) everywhere, and balancing moves nothing unless
    less of a micro-batch is held after its I. With durations f, i, w of a forward and the halves an iteration takes
    m (f + i + w) + (p - 1)(f + i - w) if w is at most f and at most i, for m >= p. Source: Qi et al., "Zero Bubble
    Pipeline Parallelism", 2024.
    """
    return defer_wgrads(num_ranks, num_microbatches, range(num_ranks), options.slices)


ZB_H1 = replace(
    SPLIT,
    name="zb-h1",
    orders=delayed_by_rank,
    takes_delay=False,
    sharded=further_forwards(delayed_by_rank, BESIDE_HALVES),
    summary="ZB-H1: 1F1B with backwards in halves, each W delayed by one micro-batch per earlier rank",
)
