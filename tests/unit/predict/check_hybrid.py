"""Compare the parameters of Megatron's own hybrid layers with the predicted ones.

In a process of its own, because importing Megatron takes seconds. Mamba's kernels need a GPU, so its layer is only
built, by Megatron's `MambaMixer` with a stand-in for the norm that mamba_ssm has. Exits with 0 if all agree.
"""

from __future__ import annotations

import contextlib
import io
import sys
from dataclasses import replace
from itertools import product
from typing import Any

# Importing check_saved prepares Megatron.
from check_saved import add_arguments, megatron_flags, one_stage, parse_cluster, torch

from bpipe.predict.flops import layer_parameters
from bpipe.predict.layer_variants import Experts, Hybrid
from bpipe.predict.layout import Setup
from bpipe.predict.model import Model, gpt

GPT = replace(gpt("gpt", 3, 64, 4, 256, 32), hybrid=Hybrid("*-M", 8, 16, 16, 4))
LLAMA = replace(GPT, name="llama", num_query_groups=2, ffn_hidden_size=160, gated=True, rms_norm=True)
LLAMA = replace(LLAMA, linear_bias=False, tied_embedding=False, dropout=False)
MIXTURE = replace(LLAMA, name="mixture", hybrid=Hybrid("*EM", 8, 16, 16, 4), experts=Experts(8, 3, 96, 128))


class Norm(torch.nn.Module):
    """A norm as wide as mamba_ssm's, which is not installed here."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype))


def setup(model: Model, precision: str, tensor: int) -> Setup:
    """Return a setup with attention instead of Mamba layers, for which a CPU's kernels are not modelled."""
    assert model.hybrid is not None
    model = replace(model, hybrid=replace(model.hybrid, pattern=model.hybrid.pattern.replace("M", "*")))
    cluster, layers = parse_cluster(f"a100-80g:{tensor}"), (model.num_layers,)
    return Setup(
        *(model, cluster, tensor, 1, 2, 2, model.sequence, layers, "none", "unfused"),
        precision=precision,
        kernels="cpu",
    )


def stack(model: Model) -> Any:
    """Megatron's hybrid stack, made of its local layers."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
    from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
    from megatron.core.ssm import mamba_context_parallel, mamba_mixer
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer

    mamba_mixer.HAVE_MAMBA_SSM = mamba_mixer.HAVE_EINOPS = mamba_context_parallel.HAVE_EINOPS = True
    mamba_mixer.ExtendedRMSNorm = Norm
    layer = get_gpt_layer_local_submodules(num_experts=model.experts and model.experts.num_experts)
    without_attention = {"input_layernorm": IdentityOp, "self_attention": IdentityOp, "self_attn_bda": IdentityFuncOp}
    mixer = ModuleSpec(
        module=mamba_mixer.MambaMixer,
        submodules=mamba_mixer.MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
    )
    mamba = MambaLayerSubmodules(norm=layer.input_layernorm, mixer=mixer, mamba_bda=get_bias_dropout_add)
    attention = replace(layer, pre_mlp_layernorm=IdentityOp, mlp=IdentityOp, mlp_bda=IdentityFuncOp)
    mlp = replace(layer, **without_attention)
    return HybridStackSubmodules(
        mamba_layer=ModuleSpec(module=MambaLayer, submodules=mamba),
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
        moe_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
    )


@contextlib.contextmanager
def layers(args: Any, model: Model) -> Any:
    """Yield the first tensor-parallel rank's layers, built by Megatron's stack."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.hybrid.hybrid_block import HybridStack
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import core_transformer_config_from_args
    from torch._C._distributed_c10d import HashStore
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend)

    torch.distributed.init_process_group("fake", store=HashStore(), rank=0, world_size=args.world_size)
    try:
        parallel_state.initialize_model_parallel(args.tensor_model_parallel_size)
        tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
        assert model.hybrid is not None
        yield (
            HybridStack(
                core_transformer_config_from_args(args),
                stack(model),
                layer_type_list=list(model.hybrid.pattern),
                post_layer_norm=False,
                pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
            )
            .to(args.params_dtype)
            .layers
        )
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def differences(args: Any, tensor: int, model: Model) -> list[str]:
    """Return what differs, layer by layer."""
    wrong = []
    with contextlib.redirect_stdout(io.StringIO()), layers(args, model) as built:
        for place, layer in enumerate(built):
            kind = model.kind(place)
            parameters = layer_parameters(model, kind)
            ours = (parameters.matrices + parameters.biases + parameters.experts) // tensor + parameters.replicated
            theirs = sum(parameter.numel() for parameter in layer.parameters())
            wrong += [] if ours == theirs else [f"{kind.symbol}: {theirs} parameters, not {ours}"]
    return wrong


def main() -> int:
    cases = [*product((GPT, LLAMA), ("fp32", "bf16"), (1, 2)), *product((MIXTURE,), ("fp32", "bf16"), (1,))]
    wrong = []
    for model, precision, tensor in cases:
        flags = [*megatron_flags(setup(model, precision, tensor)), "--vocab-size", str(model.vocabulary)]
        with contextlib.redirect_stdout(io.StringIO()):
            args = one_stage.parse(flags, add_arguments)
        wrong += [f"{model.name} {precision} t={tensor} {words}" for words in differences(args, tensor, model)]
    print(*wrong, f"{len(cases)} models, {len(wrong)} differences", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
