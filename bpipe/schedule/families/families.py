"""The table of families, by name. A new one is a file beside this one and an entry here."""

from __future__ import annotations

from collections.abc import Callable

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
# By name, what a family is, in one sentence: the first of its module.
SUMMARIES = {module.FAMILY.name: " ".join((module.__doc__ or "").partition(".")[0].split()) for module in _MODULES}

# What Megatron's own loops run, without and with chunks. No other family here holds less.
DEFAULTS = (one_f_one_b.FAMILY.name, interleaved.FAMILY.name)

# What is worth predicting: what never stops holding more the more micro-batches there are, is never faster than one
# that does. What overlaps is as fast as one that does not, as far as is predicted, and holds more.
SEARCHED = tuple(name for name, family in FAMILIES.items() if family.fill is not None and not family.overlaps)


def default_family(num_chunks: int, overlaps: bool = False) -> str:
    """Return the schedule that runs where none is named. `overlaps`: Megatron is told to combine forwards and
    backwards."""
    return combined.FAMILY.name if overlaps else DEFAULTS[num_chunks > 1]


def exchange_of(name: str) -> Exchange:
    """Return how a schedule of this name is exchanged: as its family says, otherwise as our executor does."""
    return FAMILIES[name].exchange if name in FAMILIES else Exchange.POSTED


def _names(of: Callable[[Family], bool]) -> str:
    """Return the names of these families, as an error lists them."""
    return ", ".join(name for name, family in FAMILIES.items() if of(family))


def families_with_groups() -> str:
    return _names(lambda family: family.takes_groups)


def families_with_deferral() -> str:
    return _names(lambda family: family.takes_delay)


def families_with_slices() -> str:
    return _names(lambda family: family.takes_slices)


def families_with_shards() -> str:
    return _names(lambda family: family.sharded is not None)


def families_with_interlacing() -> str:
    return _names(lambda family: family.interlaces)


def families_with_chunks() -> str:
    return _names(lambda family: family.max_chunks is None)


def families_for_bounds() -> str:
    return _names(lambda family: family.within is not None)


def families_with_early_forwarding() -> str:
    return _names(lambda family: family.early is not None)
