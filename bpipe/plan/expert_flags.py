"""Say experts, latent attention and windows in Megatron's flags, and read them.

In: a Setup, or parsed flags. Out: flags, or options.

Knows nothing of the other flags. Of experts, what the launch does not say has Megatron's defaults.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

from bpipe.models.layout import Setup
from bpipe.models.parts import (
    DISPATCHERS,
    EVERY_LAYER,
    Experts,
    Latent,
    Routing,
    read_pattern,
    shortest,
    write_list,
    write_pattern,
)

# As `megatron_command.READ` has them.
READ_OF_EXPERTS: dict[str, Any] = {
    **dict.fromkeys(
        ("--num-experts", "--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size", "--q-lora-rank"), int
    ),
    "--expert-tensor-parallel-size": int,
    "--expert-model-parallel-size": (int, 1, None),
    "--moe-router-topk": (int, 2, None),
    "--kv-lora-rank": (int, 32, None),
    "--qk-head-dim": (int, 128, None),
    "--qk-pos-emb-head-dim": (int, 64, None),
    "--v-head-dim": (int, 128, None),
    "--moe-expert-capacity-factor": (float, None, None),
    "--moe-router-score-function": (str, "softmax", ("softmax", "sigmoid", "sqrtsoftplus")),
    "--moe-token-dispatcher-type": (str, "allgather", DISPATCHERS),
    "--moe-layer-freq": (str, 1, None),
    "--window-size": (str, None, None),
    "--window-attn-skip-freq": (str, None, None),
    **dict.fromkeys(("--moe-shared-expert-gate", "--moe-pad-expert-input-to-capacity", "--moe-grouped-gemm"), True),
    "--multi-latent-attention": True,
}


def flags_of_parts(setup: Setup) -> list[str]:
    """Return flags of the model's parts; none for layers like GPT's or LLaMA's."""
    model, flags = setup.model, []
    if model.latent is not None:
        flags += ["--multi-latent-attention", "--qk-layernorm", "--kv-lora-rank", model.latent.kv_lora_rank]
        flags += [] if model.latent.q_lora_rank is None else ["--q-lora-rank", model.latent.q_lora_rank]
        flags += ["--qk-head-dim", model.latent.qk_head_dim, "--qk-pos-emb-head-dim", model.latent.qk_pos_emb_head_dim]
        flags += ["--v-head-dim", model.latent.v_head_dim]
    if model.window is not None:
        # The token itself is one of those that it attends to.
        flags += ["--window-size", f"{model.window - 1},0"]
        flags += (
            []
            if model.window_pattern == EVERY_LAYER
            else ["--window-attn-skip-freq", write_list(model.window_pattern, model.num_layers)]
        )
    return [*map(str, flags), *_of_experts(setup)]


def _of_experts(setup: Setup) -> list[str]:
    experts, routing = setup.model.experts, setup.routing
    if experts is None:
        return []
    flags = [
        "--num-experts",
        experts.num_experts,
        "--moe-router-topk",
        experts.top_k,
        "--moe-ffn-hidden-size",
        experts.ffn_hidden_size,
    ]
    flags += (
        []
        if experts.pattern == EVERY_LAYER
        else ["--moe-layer-freq", write_pattern(experts.pattern, setup.model.num_layers)]
    )
    flags += ["--moe-shared-expert-intermediate-size", experts.shared_size] if experts.shared_size else []
    flags += ["--moe-shared-expert-gate"] * experts.shared_gate
    flags += ["--moe-router-score-function", "sigmoid"] if experts.sigmoid else []
    flags += ["--moe-grouped-gemm"] * (setup.kernels == "gpu")
    flags += ["--expert-model-parallel-size", routing.expert, "--expert-tensor-parallel-size", setup.expert_tensor]
    flags += ["--moe-token-dispatcher-type", routing.dispatcher]
    flags += [] if routing.capacity is None else ["--moe-expert-capacity-factor", routing.capacity]
    flags += ["--moe-pad-expert-input-to-capacity"] * routing.padded
    return [str(flag) for flag in flags]


def parts_of_flags(found: argparse.Namespace, ffn_hidden_size: int, notes: list[str]) -> dict[str, Any]:
    """Return the options by the names of a Model's fields, and `routing`."""
    options: dict[str, Any] = {}
    if found.multi_latent_attention:
        sizes = (found.q_lora_rank, found.kv_lora_rank, found.qk_head_dim, found.qk_pos_emb_head_dim, found.v_head_dim)
        options["latent"] = Latent(*sizes)
        # There it says that what is projected down is normed, not every head.
        options["qk_layernorm"] = False
        if not found.qk_layernorm:
            notes.append(
                "--multi-latent-attention without --qk-layernorm: predicted with the norms of what is projected down"
            )
    if found.window_size is not None:
        options["window"], options["window_pattern"] = _window(found.window_size), _skipped(found.window_attn_skip_freq)
    if found.num_experts is None:
        return options
    if found.moe_router_score_function == "sqrtsoftplus":
        notes.append("--moe-router-score-function sqrtsoftplus is predicted as sigmoid")
    if found.transformer_impl != "local" and not found.moe_grouped_gemm:
        notes.append("without --moe-grouped-gemm experts are computed one after the other: predicted as if all at once")
    each = (found.num_experts, found.moe_router_topk, found.moe_ffn_hidden_size or ffn_hidden_size)
    shared, sigmoid = found.moe_shared_expert_intermediate_size or 0, found.moe_router_score_function != "softmax"
    options["experts"] = Experts(
        *each, shared, found.moe_shared_expert_gate, read_pattern(str(found.moe_layer_freq)), sigmoid
    )
    parallel = (found.expert_model_parallel_size, found.expert_tensor_parallel_size, found.moe_token_dispatcher_type)
    options["routing"] = Routing(*parallel, found.moe_expert_capacity_factor, found.moe_pad_expert_input_to_capacity)
    notes.append("experts' loads are taken to be even")
    return options


def _window(text: str) -> int:
    """How many tokens one attends to, itself included: of `127,0`."""
    parts = text.strip("()").replace(" ", "").split(",")
    if len(parts) != 2 or not all(re.fullmatch("[0-9]{1,12}", part) for part in parts) or int(parts[1]):
        raise ValueError(f"--window-size {text[:40]} is no window of tokens before a token, such as 127,0")
    return int(parts[0]) + 1


def _skipped(text: str | None) -> tuple[int, ...]:
    """Of which layers the window is: a number N says that every N-th layer has none."""
    if text is None:
        return EVERY_LAYER
    if re.fullmatch("[0-9]{1,12}", text) and int(text) > 1:
        return shortest((*(1,) * (min(int(text), 1000) - 1), 0))
    return read_pattern(text)
