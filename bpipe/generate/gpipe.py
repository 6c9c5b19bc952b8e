"""GPipe: all forwards, then all backwards. In: number of ranks and micro-batches. Out: a compute-only Schedule. One stage a rank.

Every rank saves all m micro-batches, so a pair has no room to share and balancing moves nothing. Backwards run in the order of the
forwards, as torch.distributed.pipelining runs them; the paper's figure draws them reversed, at the same length and peak.
Source: Huang et al., "GPipe", 2019.
"""

from __future__ import annotations

from bpipe.generate.place import backwards, forwards, place
from bpipe.ir.schedule import Schedule


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """2 * (m + p - 1) slots."""
    everything = range(num_microbatches)
    orders = [forwards(rank, everything) + backwards(rank, everything) for rank in range(num_ranks)]
    return place("gpipe", num_microbatches, range(num_ranks), orders)


def balanced_bound(num_microbatches: int) -> int:
    """Every rank holds all micro-batches at once, so no lower bound can be kept."""
    return num_microbatches
