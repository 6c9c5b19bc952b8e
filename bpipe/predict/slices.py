"""The slices of a sequence: their lengths, for the trainer, too, and a setup for each of them.

Later slices attend to more keys: slices of one length take ever longer, and slices of equal work get ever shorter. A
slice's setup has its own tokens only, which attend to all up to its end. Keys, values and their gradients, which a layer
keeps from the first slice's forward to the first slice's backward, are counted apart (`kept_memory`).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import sqrt
from typing import NamedTuple

from bpipe.predict.layout import Setup
from bpipe.predict.sizes import element_bytes, shard_size
from bpipe.schedule.layout import EVEN
from bpipe.schedule.memory import KeptMemory

# A forward and a backward, in forwards: attention's backward computes its scores again.
_LINEAR, _ATTENTION = 3, 3.5


class Growth(NamedTuple):
    """Work of a whole sequence in any unit: the part that grows with its tokens, and the part with their square."""

    line: float
    square: float


def even_bounds(length: int, slices: int, unit: int = 1) -> tuple[int, ...]:
    """Return bounds of nearly even slices, multiples of `unit`. Raises ValueError if there are none."""
    units, left = divmod(length, unit)
    if left:
        raise ValueError(f"a sequence of {length} tokens is not a multiple of {unit}, but each slice must be one")
    if units < slices:
        raise ValueError(
            f"a sequence of {length} tokens cannot be cut into {slices} slices of {unit} or more: use at most "
            f"{units} slices"
        )
    return tuple(units * number // slices * unit for number in range(slices + 1))


def listed_bounds(lengths: Sequence[int], length: int, slices: int, unit: int = 1) -> tuple[int, ...]:
    """Return the bounds of slices of these lengths. Raises ValueError where they are not a sequence's."""
    if len(lengths) != slices:
        raise ValueError(f"{len(lengths)} lengths for {slices} slices: give one for each")
    if sum(lengths) != length:
        raise ValueError(f"the lengths add up to {sum(lengths)} tokens, but a sequence has {length}")
    wrong = next((length_of_one for length_of_one in lengths if length_of_one % unit), None)
    if wrong is not None:
        raise ValueError(f"a slice of {wrong} tokens is not a multiple of {unit}, which tensor-parallel ranks need")
    return (0, *accumulate(lengths))


def equal_bounds(length: int, slices: int, unit: int, growth: Growth) -> tuple[int, ...]:
    """Return bounds between which as much of what grows so is done. Raises ValueError as `even_bounds` does."""
    even_bounds(length, slices, unit)
    line, square = growth
    bounds = [0]
    for number in range(1, slices):
        part = (line + square) * number / slices
        # Of line x + square x**2 = part, written so that nothing is divided by a square of 0.
        place = 2 * part / (line + sqrt(line * line + 4 * square * part))
        left = (slices - number) * unit
        bounds.append(min(max(round(place * length / unit) * unit, bounds[-1] + unit), length - left))
    return (*bounds, length)


def lengths_of(bounds: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens of each slice."""
    return tuple(end - begin for begin, end in pairwise(bounds))


def work_of(share: float) -> Growth:
    """Return the FLOPs of a forward and a backward; `share`: attention's of a whole sequence's forward."""
    return Growth(_LINEAR * (1 - share), _ATTENTION * share)


def attention_share(length: int, hidden: int, queries: int, keys: int, ffn: int, matrices: int) -> float:
    """Return attention's share of a layer's forward FLOPs. `ffn`: channels of a token's MLPs, `matrices` each."""
    products = hidden * (2 * queries + 2 * keys) + hidden * ffn * matrices
    # Scores and sums of values, of half the tokens on average.
    attention = queries * length
    return float(attention / (products + attention))


# Gradients are added up in no less than 32 bits.
SUM_BYTES = 4


def slice_bounds(setup: Setup) -> tuple[int, ...]:
    """Return where each slice of a sequence begins, and the last ends, as the trainer cuts it.

    Raises ValueError where the sequence has no such slices.
    """
    lengths, sizes = setup.slice_lengths, (setup.sequence, setup.slices, setup.sequence_shards)
    if isinstance(lengths, tuple):
        return listed_bounds(lengths, *sizes)
    if lengths == EVEN:
        return even_bounds(*sizes)
    model = setup.model
    experts = 1 if model.experts is None else model.experts.top_k
    ffn = model.ffn_hidden_size if model.experts is None else model.experts.ffn_hidden_size
    queries, keys = (heads * model.kv_channels for heads in (model.num_attention_heads, model.num_query_groups))
    matrices = 3 if model.gated else 2
    share = attention_share(setup.sequence, model.hidden_size, queries, keys, experts * ffn, matrices)
    return equal_bounds(*sizes, work_of(share))


@lru_cache(maxsize=1024)
def slice_setups(setup: Setup) -> tuple[Setup, ...]:
    """Return a setup of each slice's tokens; the setup itself where sequences are whole.

    Raises ValueError as `slice_bounds` does.
    """
    if setup.slices == 1:
        return (setup,)
    return tuple(replace(setup, span=span) for span in pairwise(slice_bounds(setup)))


def kept_memory(setup: Setup) -> tuple[KeptMemory, ...]:
    """Return what every stage keeps of a micro-batch; nothing where sequences are whole."""
    if setup.slices == 1:
        return ()
    values = setup.sequence * setup.micro_batch * setup.model.key_value_size
    keys = shard_size(element_bytes(setup) * values, setup.tensor)
    gradients = shard_size(max(SUM_BYTES, element_bytes(setup)) * values, setup.tensor)
    attending = (sum(number for kind, _, number in layers if kind.attends) for layers in setup.stage_layers)
    return tuple(KeptMemory(number * keys, number * gradients) for number in attending)
