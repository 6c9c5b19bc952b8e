"""The table of families, by name. A new one is a `Family` in a module of this package and an entry here."""

from collections.abc import Callable
from functools import partial

from bpipe.schedule.families.bidirectional import TWO_PIPES
from bpipe.schedule.families.family import Family
from bpipe.schedule.families.grouped_interleaved import GROUPED
from bpipe.schedule.families.interleaved import COMBINED, INTERLEAVED
from bpipe.schedule.families.one_f_one_b import GPIPE, ONE_F_ONE_B, SPLIT, ZB_H1
from bpipe.schedule.families.v_shape import V_HALF, V_MIN, ZB_V
from bpipe.schedule.program import Exchange

_WHOLE = (GPIPE, ONE_F_ONE_B, INTERLEAVED, COMBINED)
_IN_HALVES = (SPLIT, ZB_H1, ZB_V, V_HALF, V_MIN, GROUPED)
FAMILIES: dict[str, Family] = {family.name: family for family in (*_WHOLE, *_IN_HALVES, *TWO_PIPES)}
SUMMARIES = {name: family.summary for name, family in FAMILIES.items()}

# The families that Megatron's own loops run, without and with chunks.
DEFAULTS = (ONE_F_ONE_B.name, INTERLEAVED.name)

# Families worth predicting. One that holds more with every further micro-batch is never faster than one that does not;
# one that overlaps is predicted to be as fast as one that does not, and holds more.
SEARCHED = tuple(name for name, family in FAMILIES.items() if family.fill is not None and not family.overlaps)


def default_family(num_chunks: int, overlaps: bool = False) -> str:
    """Return the schedule that runs if none is named.

    Args:
        num_chunks: Chunks per rank.
        overlaps: Whether Megatron is told to combine forwards and backwards.
    """
    return COMBINED.name if overlaps else DEFAULTS[num_chunks > 1]


def exchange_of(name: str) -> Exchange:
    """Return the exchange of a schedule of this name: its family's, otherwise our executor's."""
    return FAMILIES[name].exchange if name in FAMILIES else Exchange.POSTED


def _names(condition: Callable[[Family], bool]) -> str:
    """Return the names of the families that fulfil a condition, as an error lists them."""
    return ", ".join(name for name, family in FAMILIES.items() if condition(family))


def families_that_take(option: str) -> str:
    """Return the names of the families that take one of the `TAKEN` options."""
    return _names(lambda family: family.takes(option))


families_with_shards = partial(_names, lambda family: family.sharded is not None)
families_with_interlacing = partial(_names, lambda family: family.interlaces)
families_with_chunks = partial(_names, lambda family: family.max_chunks is None)
families_for_bounds = partial(_names, lambda family: family.within is not None)
