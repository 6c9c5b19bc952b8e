"""Say what a saved tensor takes, and of what its sizes are made.

In: a Setup. Out: rows, and bytes of one device. Knows no layer.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from bpipe.predict.layout import Setup


class Saved(NamedTuple):
    """Saved storages: `num` of `nbytes` each."""

    name: str
    nbytes: int
    num: int = 1


def total(rows: tuple[Saved, ...]) -> int:
    return sum(row.nbytes * row.num for row in rows)


def shard_size(value: int, shards: int) -> int:
    """Return the size of one shard, rounded up."""
    return -(-value // shards)


def element_bytes(setup: Setup) -> int:
    return 4 if setup.precision == "fp32" else 2


def kept_bytes(setup: Setup, num_values: int, shards: int) -> int:
    """Return bytes kept of inputs of a layer's matrix for the gradient of its weights, on one of so many devices."""
    if setup.fp8 is None:
        return shard_size(element_bytes(setup) * num_values, shards)
    return ceil(shard_size(num_values, shards) * setup.fp8.value_bytes)


def num_tokens(setup: Setup) -> int:
    """Return the tokens of one micro-batch, or of one slice, on one context-parallel rank."""
    if setup.span is not None:
        return (setup.span[1] - setup.span[0]) * setup.micro_batch
    return setup.sequence * setup.micro_batch // setup.context


def num_keys(setup: Setup) -> int:
    """Return how many tokens of a sequence a query may attend to: of a slice, all up to its end."""
    return setup.sequence if setup.span is None else setup.span[1]


def sent_bytes(setup: Setup) -> int:
    """Return bytes that a stage sends to the next for a micro-batch: a value for every token and hidden unit."""
    return shard_size(element_bytes(setup) * num_tokens(setup) * setup.model.hidden_size, setup.sequence_shards)
