"""Bound what the fullest rank needs by what ranks hold when their backwards begin.

In: a Setup. Out: bytes that some rank needs at least.

Families say how many micro-batches of each chunk that are (`Family.warm_up`), so no order has to be made to tell that
it is too much. Near to what is needed, where a first rank's stages are smaller than others, and where pairs share what
they hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

from bpipe.generate.families import FAMILIES
from bpipe.generate.turns import WarmUp
from bpipe.ir.hosts import PAIR
from bpipe.models.layout import Setup
from bpipe.models.memory import rank_states, with_state
from bpipe.models.saved import stage_bytes
from bpipe.models.working import working_bytes


def least_warm_bytes(setup: Setup, states: tuple[int, ...] | None = None) -> int:
    """Return the least bytes held in warm-up, or 0 where the family does not say, which is of whole micro-batches.

    `states`: what ranks hold besides, if known.
    """
    family = FAMILIES[setup.schedule]
    if family.warm_up is None or setup.slices > 1:
        return 0
    warm_up = family.warm_up(setup.pipeline, setup.num_microbatches, setup.chunks, setup.group_size)
    if setup.balance == "none":
        return _of_one(setup, warm_up, states or rank_states(setup))
    return _of_pairs(setup, warm_up, states or rank_states(setup)) if _shares_surely(setup, warm_up) else 0


def _shares_surely(setup: Setup, warm_up: WarmUp) -> bool:
    """Return whether the first rank's partner is the last, and so on, and the first pair has something to share:
    what ranks hold falls, by enough, and groups are whole, so that nobody takes other turns."""
    falls = all(one > other for one, other in zip(warm_up.lengths, warm_up.lengths[1:], strict=False))
    return setup.how.hosts == PAIR and setup.pipeline > 3 and falls and setup.num_microbatches % warm_up.group_size == 0


def _of_one(setup: Setup, warm_up: WarmUp, states: Sequence[int]) -> int:
    working, sizes = working_bytes(setup), _sizes(setup)
    held = (sum(map(mul, warm_up.at_first_backward(rank), sizes[rank])) for rank in range(setup.pipeline))
    return max(with_state(setup, states[rank], own + working[rank]) for rank, own in enumerate(held))


def _of_pairs(setup: Setup, warm_up: WarmUp, states: Sequence[int]) -> int:
    """Of the first two pairs: who has the first stage and who the last may hold less than others.

    One of two has half of what both hold.
    """
    working, sizes = working_bytes(setup), _sizes(setup)
    found = 0
    for rank in (0, 1):
        partner = setup.pipeline - 1 - rank
        own = sum(map(mul, warm_up.at_first_backward(rank), sizes[rank]))
        others = min(sum(map(mul, counts, sizes[partner])) for counts in warm_up.meanwhile(rank, partner))
        half = (own + others) // 2 + min(working[rank], working[partner])
        found = max(found, with_state(setup, min(states[rank], states[partner]), half))
    return found


def _sizes(setup: Setup) -> Sequence[Sequence[int]]:
    """By rank, what a forward saves of each of its chunks."""
    saved = stage_bytes(setup)
    return [saved[rank :: setup.pipeline] for rank in range(setup.pipeline)]
