"""GPipe: all forwards, then all backwards.

One stage per rank. Every rank saves all m micro-batches, so a pair has no room to share and balancing moves nothing.
Backwards run in the order of the forwards, as in torch.distributed.pipelining; the paper's figure draws them reversed,
at the same length and peak. The grid has 2 * (m + p - 1) slots. Source: Huang et al., "GPipe", 2019.
"""

from __future__ import annotations

from bpipe.schedule.action import Action
from bpipe.schedule.families.family import Family, FamilyOptions, one_stage_a_rank
from bpipe.schedule.families.turns import in_slices
from bpipe.schedule.families.unit_grid import backwards, forwards
from bpipe.schedule.program import Exchange


def orders(num_ranks: int, num_microbatches: int, _: int, options: FamilyOptions) -> list[list[Action]]:
    everything = range(num_microbatches * options.slices)
    return in_slices(
        [forwards(rank, everything) + backwards(rank, everything) for rank in range(num_ranks)], options.slices
    )


FAMILY = Family("gpipe", one_stage_a_rank, orders, Exchange.POSTED, takes_slices=True)
