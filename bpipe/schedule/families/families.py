"""The table of families, by name. A new one is a module next to this one and an entry here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bpipe.schedule.families import (
    bitpipe,
    bitpipe_early,
    chimera,
    combined,
    gpipe,
    grouped_interleaved,
    interleaved,
    mixpipe,
    one_f_one_b,
    one_f_one_b_split,
    v_half,
    v_min,
    zb_h1,
    zb_v,
)
from bpipe.schedule.families.family import Family
from bpipe.schedule.program import Exchange

_WHOLE = (gpipe, one_f_one_b, interleaved, combined)
_IN_HALVES = (one_f_one_b_split, zb_h1, zb_v, v_half, v_min, grouped_interleaved)
_IN_TWO_PIPES = (chimera, mixpipe, bitpipe, bitpipe_early)
_MODULES = (*_WHOLE, *_IN_HALVES, *_IN_TWO_PIPES)
FAMILIES: dict[str, Family] = {module.FAMILY.name: module.FAMILY for module in _MODULES}
# What each family is: the first sentence of its module.
SUMMARIES = {module.FAMILY.name: " ".join((module.__doc__ or "").partition(".")[0].split()) for module in _MODULES}

# The families that Megatron's own loops run, without and with chunks.
DEFAULTS = (one_f_one_b.FAMILY.name, interleaved.FAMILY.name)

# Families worth predicting. One that holds more with every further micro-batch is never faster than one that does not;
# one that overlaps is predicted to be as fast as one that does not, and holds more.
SEARCHED = tuple(name for name, family in FAMILIES.items() if family.fill is not None and not family.overlaps)


def default_family(num_chunks: int, overlaps: bool = False) -> str:
    """Return the schedule that runs if none is named.

    Args:
        overlaps: Whether Megatron is told to combine forwards and backwards.
    """
    return combined.FAMILY.name if overlaps else DEFAULTS[num_chunks > 1]


def exchange_of(name: str) -> Exchange:
    """Return the exchange of a schedule of this name: its family's, otherwise our executor's."""
    return FAMILIES[name].exchange if name in FAMILIES else Exchange.POSTED


def _names(condition: Callable[[Family], bool]) -> str:
    """Return the names of the families that fulfil a condition, as an error lists them."""
    return ", ".join(name for name, family in FAMILIES.items() if condition(family))


families_with_groups = partial(_names, lambda family: family.takes_groups)
families_with_deferral = partial(_names, lambda family: family.takes_delay)
families_with_slices = partial(_names, lambda family: family.takes_slices)
families_with_shards = partial(_names, lambda family: family.sharded is not None)
families_with_interlacing = partial(_names, lambda family: family.interlaces)
families_with_chunks = partial(_names, lambda family: family.max_chunks is None)
families_for_bounds = partial(_names, lambda family: family.within is not None)
families_with_early_forwarding = partial(_names, lambda family: family.early is not None)
