"""Layers built from Megatron's own parts that do what only Transformer Engine's layers can; for the trainer's `--spec`.

Independent of the project under test.
"""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

from tests.gloo.plain_attention import PlainAttention


def attending_plainly(model: Any) -> ModuleSpec:
    """Return layers with attention over a sequence that several ranks share, or with latent attention."""
    config = model.transformer
    spec = get_gpt_layer_local_spec(
        multi_latent_attention=config.multi_latent_attention, normalization=config.normalization
    )
    attention = spec.submodules.self_attention
    attention.submodules = dataclasses.replace(attention.submodules, core_attention=PlainAttention)
    return spec


class LatentAttention(DotProductAttention):
    """Megatron's core attention that accepts the widths of keys and values that latent attention passes.

    It divides its output by `--kv-channels`, which here is a value's width."""

    def __init__(self, *, k_channels: int | None = None, v_channels: int | None = None, **others: Any) -> None:
        super().__init__(**others)
        assert v_channels in (None, self.config.kv_channels)


def attending_to_latents(model: Any) -> ModuleSpec:
    """Return latent attention on top of Megatron's own core attention."""
    spec = get_gpt_layer_local_spec(multi_latent_attention=True, normalization=model.transformer.normalization)
    attention = spec.submodules.self_attention
    attention.submodules = dataclasses.replace(attention.submodules, core_attention=LatentAttention)
    return spec


class ComputesAtOnce(ColumnParallelLinear):
    """A layer that does not defer its own weight gradient when the output layer does."""

    def __init__(self, *sizes: Any, config: Any, **settings: Any) -> None:
        at_once = copy.copy(config)
        at_once.defer_embedding_wgrad_compute = False
        super().__init__(*sizes, config=at_once, **settings)


def computing_at_once(model: Any) -> ModuleSpec:
    """Return layers in which only the output layer defers its weight gradient."""
    spec = get_gpt_layer_local_spec()
    attention = spec.submodules.self_attention
    attention.submodules = dataclasses.replace(attention.submodules, linear_qkv=ComputesAtOnce)
    mlp = MLPSubmodules(linear_fc1=ComputesAtOnce, linear_fc2=RowParallelLinear)
    spec.submodules = dataclasses.replace(spec.submodules, mlp=partial(MLP.as_mlp_submodule, submodules=mlp))
    return spec
