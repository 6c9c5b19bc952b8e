"""Layers of Megatron's own parts where its local ones stop short of what Transformer Engine's do, given to the trainer
as `--spec`.

In: a model's configuration. Out: what one of its layers is made of. Knows nothing of the project under test.
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
    """Attention over a sequence that several ranks share, and latent attention; Megatron's own does neither."""
    config = model.transformer
    spec = get_gpt_layer_local_spec(
        multi_latent_attention=config.multi_latent_attention, normalization=config.normalization
    )
    attention = spec.submodules.self_attention
    attention.submodules = dataclasses.replace(attention.submodules, core_attention=PlainAttention)
    return spec


class LatentAttention(DotProductAttention):
    """Megatron's own core attention, for latent attention: that says how wide keys and values are, and its own takes
    neither. It divides its output by `--kv-channels`, which are a value's here."""

    def __init__(self, *, k_channels: int | None = None, v_channels: int | None = None, **others: Any) -> None:
        super().__init__(**others)
        assert v_channels in (None, self.config.kv_channels)


def attending_to_latents(model: Any) -> ModuleSpec:
    """Latent attention whose keys and values Megatron's own core attention attends to."""
    spec = get_gpt_layer_local_spec(multi_latent_attention=True, normalization=model.transformer.normalization)
    attention = spec.submodules.self_attention
    attention.submodules = dataclasses.replace(attention.submodules, core_attention=LatentAttention)
    return spec


class ComputesAtOnce(ColumnParallelLinear):
    """Put off the gradients of the output layer only: Megatron's own looks for a place to keep them in every layer,
    and finds none."""

    def __init__(self, *sizes: Any, config: Any, **settings: Any) -> None:
        at_once = copy.copy(config)
        at_once.defer_embedding_wgrad_compute = False
        super().__init__(*sizes, config=at_once, **settings)


def computing_at_once(model: Any) -> ModuleSpec:
    """Layers that leave deferred gradients to the output layer."""
    spec = get_gpt_layer_local_spec()
    attention = spec.submodules.self_attention
    attention.submodules = dataclasses.replace(attention.submodules, linear_qkv=ComputesAtOnce)
    mlp = MLPSubmodules(linear_fc1=ComputesAtOnce, linear_fc2=RowParallelLinear)
    spec.submodules = dataclasses.replace(spec.submodules, mlp=partial(MLP.as_mlp_submodule, submodules=mlp))
    return spec
