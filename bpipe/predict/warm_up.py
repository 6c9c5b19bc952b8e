"""Bound what the fullest rank needs by what ranks hold when their backwards begin.

In: a Setup. Out: bytes that some rank needs at least.

Families say how many micro-batches of each chunk that are (`Family.warm_up`), so no order has to be made to tell that
it is too much. Near to what is needed, where a first rank's stages are smaller than others, and where pairs share what
they hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import gt
from typing import NamedTuple

from bpipe.predict.layout import Setup
from bpipe.predict.memory import least_saved_bytes, part_of_held, rank_states, with_state
from bpipe.predict.slices import kept_memory
from bpipe.predict.temporaries import working_bytes
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.families.turns import WarmUp
from bpipe.schedule.hosts import PAIR


def least_warm_bytes(setup: Setup, states: tuple[int, ...] | None = None) -> int:
    """Return the least bytes held in warm-up, or 0 where the family does not say.

    `states`: what ranks hold besides, if known.
    """
    told = _told(setup)
    if told is None:
        return 0
    each, states = _sizes(setup), states or rank_states(setup)
    if setup.balance is None:
        return _of_one(setup, told, each, states)
    if _shares_surely(setup, told):
        return _of_pairs(setup, told, each, states)
    # Of whole ones the first rank's part is asked for elsewhere (`least_shared_bytes`), from its order.
    return _of_parts(setup, told, each, states) if setup.slices > 1 else 0


def _told(setup: Setup) -> WarmUp | None:
    family, sizes = FAMILIES[setup.schedule], (setup.pipeline, setup.num_microbatches, setup.num_chunks)
    if setup.slices == 1:
        return None if family.warm_up is None else family.warm_up(*sizes, setup.turn_size)
    return None if family.sliced_warm_up is None else family.sliced_warm_up(*sizes, setup.group_size, setup.slices)


class _Size(NamedTuple):
    """Bytes of a stage: what a forward of one of `slices` of a micro-batch saves at least, and what is kept of a
    micro-batch of which any slice is held."""

    saved: int
    kept: int
    slices: int

    def held(self, count: int) -> int:
        return count * self.saved + -(-count // self.slices) * self.kept


def _sizes(setup: Setup) -> list[list[_Size]]:
    """By rank, of each of its chunks."""
    saved = least_saved_bytes(setup)
    kept = [one.keys_bytes for one in kept_memory(setup)] or [0] * setup.num_stages
    every = [_Size(*both, setup.slices) for both in zip(saved, kept, strict=True)]
    return [every[rank :: setup.pipeline] for rank in range(setup.pipeline)]


def _held(sizes: Sequence[_Size], counts: Sequence[int]) -> int:
    return sum(size.held(count) for size, count in zip(sizes, counts, strict=True))


def _shares_surely(setup: Setup, warm_up: WarmUp) -> bool:
    """Whether the first rank's partner is the last, and so on, and the first pair has something to share.

    What ranks hold falls, by enough, and all groups of the warm-up are whole, so that all ranks take the same turns. Of
    one chunk with split backwards ranks may hold alike, as what waits for its W is not in the warm-up.
    """
    family, falls = FAMILIES[setup.schedule], all(map(gt, warm_up.lengths, warm_up.lengths[1:]))
    width, turn = setup.num_microbatches * setup.slices, warm_up.group_size
    are_whole = width % turn == 0 or warm_up.lengths[0] <= warm_up.num_chunks * (width - width % turn - turn)
    told = falls and are_whole and not (family.splits and family.max_chunks == 1)
    return setup.hosts == PAIR and setup.pipeline > 3 and told


def _of_one(setup: Setup, warm_up: WarmUp, sizes: Sequence[Sequence[_Size]], states: Sequence[int]) -> int:
    working = working_bytes(setup)
    held = (_held(sizes[rank], warm_up.at_first_backward(rank)) for rank in range(setup.pipeline))
    return max(with_state(setup, states[rank], own + working[rank]) for rank, own in enumerate(held))


def _of_parts(setup: Setup, warm_up: WarmUp, sizes: Sequence[Sequence[_Size]], states: Sequence[int]) -> int:
    """Whoever hosts, it or the rank itself has a part of what a rank holds."""
    least = min(states), min(working_bytes(setup))
    held = max(_held(sizes[rank], warm_up.at_first_backward(rank)) for rank in range(setup.pipeline))
    return with_state(setup, least[0], part_of_held(setup, held) + least[1])


def _of_pairs(setup: Setup, warm_up: WarmUp, sizes: Sequence[Sequence[_Size]], states: Sequence[int]) -> int:
    """Of the first two ranks, whichever partner each has: by a budget they need not be mirror images.

    One of two has half of what both hold.
    """
    working, found = working_bytes(setup), 0
    for rank in (0, 1):
        own, least = _held(sizes[rank], warm_up.at_first_backward(rank)), []
        for partner in range(rank + 1, setup.pipeline):
            others = min(_held(sizes[partner], counts) for counts in warm_up.meanwhile(rank, partner))
            half = (own + others) // 2 + min(working[rank], working[partner])
            least.append(with_state(setup, min(states[rank], states[partner]), half))
        found = max(found, min(least))
    return found
