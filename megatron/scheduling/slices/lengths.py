"""Choose how long the slices of a sequence are.

In: the sequence's length, what is asked for, a model's configuration. Out: their bounds.

Later slices attend to more keys. Slices of one length take ever longer then, and a pipeline waits for the longest;
slices of equal work get shorter towards the end. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import sqrt
from typing import Any

from bpipe.flags.values import EVEN, SliceLengths
from megatron.scheduling.hooks import upstream

# A forward and a backward, in forwards: attention's backward computes its scores again.
_LINEAR, _ATTENTION = 3, 3.5


def bounds_of(lengths: SliceLengths, length: int, slices: int, unit: int, config: Any) -> tuple[int, ...]:
    """Return where each slice begins, and the last ends.

    `unit`: each has to be a multiple of it. `config` is Megatron's, of the model.

    Raises ValueError where the sequence has no such slices.
    """
    if isinstance(lengths, tuple):
        return _listed(lengths, length, slices, unit)
    even = even_bounds(length, slices, unit)
    return even if lengths == EVEN else _of_equal_work(even, unit, attention_share(length, config))


def even_bounds(length: int, slices: int, unit: int = 1) -> tuple[int, ...]:
    """Return bounds of slices that differ by one unit at most.

    Raises ValueError for a sequence that is no whole units, or of too few.
    """
    units, left = divmod(length, unit)
    if left:
        raise ValueError(f"a sequence of {length} tokens is no multiple of {unit}, and each slice of it has to be one")
    if units < slices:
        raise ValueError(
            f"a sequence of {length} tokens has no {slices} slices of {unit} or more: take {units} at most"
        )
    return tuple(units * number // slices * unit for number in range(slices + 1))


def _listed(lengths: Sequence[int], length: int, slices: int, unit: int) -> tuple[int, ...]:
    if len(lengths) != slices:
        raise ValueError(f"{len(lengths)} lengths for {slices} slices: give one for each")
    if sum(lengths) != length:
        raise ValueError(
            f"the lengths add up to {sum(lengths)} tokens, and a sequence has {length}: they have to be all of it"
        )
    wrong = next((one for one in lengths if one % unit), None)
    if wrong is not None:
        raise ValueError(
            f"a slice of {wrong} tokens is no multiple of {unit}, which the tensor-parallel ranks have parts of"
        )
    return (0, *accumulate(lengths))


def _of_equal_work(even: Sequence[int], unit: int, share: float) -> tuple[int, ...]:
    """Return bounds between which a forward and a backward take as long; `share`: attention's of a whole sequence's
    forward."""
    length, slices = even[-1], len(even) - 1
    line, square = _LINEAR * (1 - share), _ATTENTION * share
    found = [0]
    for number in range(1, slices):
        part = (line + square) * number / slices
        # Of line x + square x**2 = part, written so that nothing is divided by a square of 0.
        place = 2 * part / (line + sqrt(line * line + 4 * square * part))
        left = (slices - number) * unit
        found.append(min(max(round(place * length / unit) * unit, found[-1] + unit), length - left))
    return (*found, length)


def attention_share(length: int, config: Any) -> float:
    """Return which part of a layer's forward FLOPs is attention to earlier tokens, of `length` in all."""
    upstream.require(config, "lengths")
    hidden, queries = config.hidden_size, config.num_attention_heads * config.kv_channels
    groups = config.num_query_groups * config.kv_channels
    experts = config.moe_router_topk if config.num_moe_experts else 1
    ffn = (config.moe_ffn_hidden_size if config.num_moe_experts else None) or config.ffn_hidden_size
    products = hidden * (2 * queries + 2 * groups) + experts * hidden * ffn * (3 if config.gated_linear_unit else 2)
    # Scores and sums of values, of half the tokens on average.
    attention = queries * length
    return float(attention / (products + attention))
