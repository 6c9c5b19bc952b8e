"""Train Megatron's hybrid model (recurrent, attention and MLP layers) in a script independent of this project.

The mixer of the recurrent layers is ours, in plain torch: Mamba's own kernels need a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import core_transformer_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from plain_script import datasets, mean_loss

# The default pattern. M: recurrent, *: attention, -: MLP, |: the next stage.
PATTERN = "M*-|M*M-|*M-|M-*"


class Mixer(torch.nn.Module):
    """A causal convolution over the sequence and a running mean of it, gated. (sequence, batch, hidden) in and out."""

    def __init__(self, config: Any, d_model: int, **_: Any) -> None:
        super().__init__()
        self.enter = torch.nn.Linear(d_model, 2 * d_model, bias=False)
        self.along = torch.nn.Conv1d(d_model, d_model, kernel_size=4, groups=d_model, padding=3)
        self.leave = torch.nn.Linear(d_model, d_model, bias=False)

    def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        values, gate = self.enter(hidden).chunk(2, dim=-1)
        mixed = self.along(values.permute(1, 2, 0))[..., : hidden.size(0)].permute(2, 0, 1)
        counts = torch.arange(1, hidden.size(0) + 1, device=hidden.device)[:, None, None]
        state = mixed.cumsum(0) / counts
        return self.leave((mixed + state) * torch.nn.functional.silu(gate)), None


def stack() -> ModuleSpec:
    """Return Megatron's own hybrid stack of its local parts."""
    layer = get_gpt_layer_local_submodules()
    attention = replace(layer, pre_mlp_layernorm=IdentityOp, mlp=IdentityOp, mlp_bda=IdentityFuncOp)
    mixer = MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=Mixer, mamba_bda=get_bias_dropout_add)
    mlp = replace(layer, input_layernorm=IdentityOp, self_attention=IdentityOp, self_attn_bda=IdentityFuncOp)
    parts = HybridStackSubmodules(
        mamba_layer=ModuleSpec(module=MambaLayer, submodules=mixer),
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
    )
    # Its final norm is Transformer Engine's, which is not installed.
    return ModuleSpec(module=HybridStack, params={"post_layer_norm": False}, submodules=parts)


def model(
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, **kwargs: Any
) -> HybridModel:
    args = get_args()
    return HybridModel(
        config=core_transformer_config_from_args(args),
        hybrid_stack_spec=stack(),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.seq_length,
        hybrid_layer_pattern=args.hybrid_layer_pattern or PATTERN,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=True,
        vp_stage=vp_stage,
    )


def forward(data: Any, module: Any) -> tuple[torch.Tensor, Any]:
    sample = {key: value.cuda() for key, value in next(data).items()} if data is not None else {}
    return module(sample.get("tokens"), sample.get("position_ids"), None, labels=sample.get("labels")), partial(
        mean_loss
    )


if __name__ == "__main__":
    arguments = parse_and_validate_args()
    pretrain(pretrain_cfg_container_from_args(arguments), datasets, ModelType.encoder_or_decoder, forward, model)
