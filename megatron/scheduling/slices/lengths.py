"""Choose how long the slices of a sequence are, by Megatron's configuration of the model.

In: the sequence's length, what is asked for. Out: their bounds, by the rule that predictions have, too. Knows no
tensors.
"""

from __future__ import annotations

from typing import Any

from bpipe.predict import slice_lengths
from bpipe.predict.slice_lengths import equal_bounds, even_bounds, listed_bounds, work_of
from bpipe.schedule.layout import EVEN, SliceLengths
from megatron.scheduling.hooks import upstream


def bounds_of(lengths: SliceLengths, length: int, slices: int, unit: int, config: Any) -> tuple[int, ...]:
    """Return where each slice begins, and the last ends.

    `unit`: each has to be a multiple of it. `config` is Megatron's, of the model.

    Raises ValueError where the sequence has no such slices.
    """
    if isinstance(lengths, tuple):
        return listed_bounds(lengths, length, slices, unit)
    if lengths == EVEN:
        return even_bounds(length, slices, unit)
    return equal_bounds(length, slices, unit, work_of(attention_share(length, config)))


def attention_share(length: int, config: Any) -> float:
    """Return which part of a layer's forward FLOPs is attention to earlier tokens, of `length` in all."""
    upstream.require(config, "lengths")
    experts = config.moe_router_topk if config.num_moe_experts else 1
    ffn = (config.moe_ffn_hidden_size if config.num_moe_experts else None) or config.ffn_hidden_size
    return slice_lengths.attention_share(
        length,
        config.hidden_size,
        config.num_attention_heads * config.kv_channels,
        config.num_query_groups * config.kv_channels,
        experts * ffn,
        3 if config.gated_linear_unit else 2,
    )
