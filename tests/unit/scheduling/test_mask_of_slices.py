"""Before it trains in slices the trainer tries the mask of an attention that only a GPU has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnMaskType

from megatron.scheduling.slices.attention import _SEES_SLICES, BY_MASK
from megatron.scheduling.slices.judging import judge

HEADS, GROUPS, WIDTH = 4, 2, 8


class Engine(torch.nn.Module):
    """Attention as Transformer Engine has it: masks by name, groups of heads, outputs side by side.

    `bottom_right`: whether a mask of fewer queries than keys ends in the corner where it has to.
    """

    def __init__(self, bottom_right: bool) -> None:
        super().__init__()
        self.bottom_right = bottom_right

    def forward(self, query: Any, key: Any, value: Any, attention_mask: None, attn_mask_type: AttnMaskType) -> Any:
        queries, keys = query.shape[0], key.shape[0]
        diagonal = keys - queries if attn_mask_type is AttnMaskType.causal_bottom_right and self.bottom_right else 0
        mask = torch.ones(queries, keys, dtype=torch.bool).tril(diagonal)
        heads = [one.permute(1, 2, 0, 3) for one in (query, key, value)]
        given = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)
        return given.permute(2, 0, 1, 3).flatten(-2)


for mark in (BY_MASK, _SEES_SLICES):
    setattr(Engine.forward, mark, True)


class Layer(Attention):
    """As much of Megatron's attention as is asked."""

    def __init__(self, core: torch.nn.Module) -> None:
        torch.nn.Module.__init__(self)
        self.core_attention = core
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.attn_mask_type = AttnMaskType.causal
        self.num_attention_heads_per_partition, self.num_query_groups_per_partition = HEADS, GROUPS
        self.hidden_size_per_attention_head = WIDTH
        self.config: Any = SimpleNamespace(multi_latent_attention=False, params_dtype=torch.float32)

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """Never called."""


def test_a_mask_that_ends_bottom_right_is_taken() -> None:
    judge([Layer(Engine(bottom_right=True))])


def test_a_mask_that_ends_elsewhere_ends_the_run_before_it_trains() -> None:
    with pytest.raises(ValueError, match="Engine masks fewer queries than keys otherwise than slices need"):
        judge([Layer(Engine(bottom_right=False))])
