"""Collect what a launch of Megatron says, from the table: the rows that are read, and words to be written.

In: values by field. Out: words.

Knows no flag by its name.
"""

from __future__ import annotations

from collections.abc import Mapping

from bpipe.config.flags.configurations import CONFIGURATION, MODEL, TRAINING
from bpipe.config.flags.experts import EXPERTS
from bpipe.config.flags.flag import Flag
from bpipe.config.flags.megatron import MEGATRON
from bpipe.config.flags.trainer import BPIPE, MIN_BYTES, TRAINER

_ROWS = {
    flag.in_launch: flag
    for flags in (
        MEGATRON,
        (BPIPE, MIN_BYTES),
        *(group.flags for group in (MODEL, TRAINING, EXPERTS, CONFIGURATION, *TRAINER)),
    )
    for flag in flags
    if flag.launch is not None
}
# Every row of the table that is on Megatron's command line, by its field.
_BY_FIELD = {flag.field: flag for flag in _ROWS.values()}
# What is read of a launch, by its name there, as Megatron's parser has it.
READ: dict[str, Flag] = {
    name: flag.of_launch for name, flag in _ROWS.items() if flag.launch is not None and flag.launch.is_read
}
# Of what is read, the fields of our own options, each with the name that Megatron's parser gives it.
SAME = {flag.field: READ[name].field for name, flag in _ROWS.items() if name in READ}


def words(values: Mapping[str, object]) -> list[str]:
    """Write values as flags, by the fields of the table, in this order; a switch where it is true, and nothing for
    None."""
    found: list[str] = []
    for field, value in values.items():
        flag = _BY_FIELD[field]
        if value is None or value is False:
            continue
        several = value if isinstance(value, tuple) and flag.count is not None else () if flag.is_switch else (value,)
        found += [flag.in_launch, *map(str, several)]
    return found
