"""1F1B: one forward, one backward. In: number of ranks and micro-batches. Out: every rank's order. One stage per rank.

A rank runs ahead by as many forwards as ranks follow it (warm-up), then alternates a forward and a backward (steady
phase), then runs the backwards that are left (cool-down). It saves at most min(p - rank, m) micro-batches; the grid has
2 * (m + p - 1) slots. Cut into k slices it saves min(p - rank + k - 1, m k) of them, (p - rank + k - 1) / k
micro-batches. Source: Narayanan et al., "PipeDream-Flush" in "Memory-Efficient Pipeline-Parallel DNN Training", 2021.
"""

from __future__ import annotations

from bpipe.schedule.action import Action
from bpipe.schedule.families.family import Family, FamilyOptions, one_stage_a_rank
from bpipe.schedule.families.sharded_1f1b import sharded
from bpipe.schedule.families.slices import in_slices
from bpipe.schedule.families.turns import WarmUp, warm_up
from bpipe.schedule.families.unit_grid import alternate, backwards, forwards
from bpipe.schedule.program import Exchange


def orders(num_ranks: int, num_microbatches: int, _: int, options: FamilyOptions) -> list[list[Action]]:
    return in_slices(in_turn(num_ranks, num_microbatches, options.slices), options.slices)


def in_turn(num_ranks: int, num_microbatches: int, slices: int) -> list[list[Action]]:
    """Return the orders whose backwards have not got their slices' numbers."""
    return [_order(rank, num_ranks - rank - 1 + slices - 1, num_microbatches * slices) for rank in range(num_ranks)]


def _order(rank: int, warm_up_forwards: int, num_microbatches: int) -> list[Action]:
    ahead = min(warm_up_forwards, num_microbatches)
    warm_up = forwards(rank, range(ahead))
    steady = alternate(forwards(rank, range(ahead, num_microbatches)), backwards(rank, range(num_microbatches - ahead)))
    cool_down = backwards(rank, range(num_microbatches - ahead, num_microbatches))
    return warm_up + steady + cool_down


def sliced_warm_up(num_ranks: int, num_microbatches: int, _: int, __: int | None, slices: int) -> WarmUp:
    """Return what each rank holds at its first backward, with the forward that stands before it."""
    return warm_up([num_ranks - rank + slices - 1 for rank in range(num_ranks)], num_microbatches * slices, 1, 1)


FAMILY = Family(
    "1f1b",
    one_stage_a_rank,
    orders,
    Exchange.MEGATRON_1F1B,
    fill=2,
    ahead=lambda p, m, v, g: min(p, m),
    sliced_warm_up=sliced_warm_up,
    sharded=sharded(orders),
    interlaces=True,
    takes_slices=True,
)
