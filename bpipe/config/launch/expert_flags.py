"""Write experts, latent attention and windows as Megatron's flags, and read them."""

import re
from typing import Any

from bpipe.config.flags.flag import Options
from bpipe.config.flags.launches import words
from bpipe.predict.layer_variants import (
    EVERY_LAYER,
    Experts,
    Latent,
    Routing,
    read_pattern,
    shortest,
    write_list,
    write_pattern,
)
from bpipe.predict.layout import Setup

# Fields of a `Latent` in the order of the flags.
_LATENT = ("kv_lora_rank", "q_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


def flags_of_parts(setup: Setup) -> list[str]:
    """Return flags of the model's parts; none for layers like GPT's or LLaMA's."""
    model, experts, routing = setup.model, setup.model.experts, setup.routing
    values: dict[str, object] = {}
    if model.latent is not None:
        values = {"multi_latent_attention": True, "qk_layernorm": True}
        values |= {name: getattr(model.latent, name) for name in _LATENT}
    if model.window is not None:
        # A token attends to itself as well.
        values["window_size"] = f"{model.window - 1},0"
        if model.window_pattern != EVERY_LAYER:
            values["window_attn_skip_freq"] = write_list(model.window_pattern, model.num_layers)
    if experts is None:
        return words(values)
    pattern = None if experts.pattern == EVERY_LAYER else write_pattern(experts.pattern, model.num_layers)
    values |= {
        "num_experts": experts.num_experts,
        "moe_router_topk": experts.top_k,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_layer_freq": pattern,
        "moe_shared_expert_intermediate_size": experts.shared_size or None,
        "moe_shared_expert_gate": experts.shared_gate,
        "moe_router_score_function": "sigmoid" if experts.sigmoid else None,
        "moe_grouped_gemm": setup.kernels == "gpu",
        "expert": routing.expert,
        "expert_tensor": setup.expert_tensor,
        "dispatcher": routing.dispatcher,
        "capacity_factor": routing.capacity,
        "pad_to_capacity": routing.padded,
    }
    return words(values)


def parts_of_flags(args: Options, ffn_hidden_size: int, notes: list[str]) -> dict[str, Any]:
    """Return the options by the names of a Model's fields, and `routing`."""
    options: dict[str, Any] = {}
    if args.multi_latent_attention:
        sizes = (args.q_lora_rank, args.kv_lora_rank, args.qk_head_dim, args.qk_pos_emb_head_dim, args.v_head_dim)
        options["latent"] = Latent(*sizes)
        # Here the flag norms the down-projections, not every head.
        options["qk_layernorm"] = False
        if not args.qk_layernorm:
            notes.append(
                "--multi-latent-attention without --qk-layernorm: predicted with norms after the down-projections"
            )
    if args.window_size is not None:
        options["window"], options["window_pattern"] = _window(args.window_size), _skipped(args.window_attn_skip_freq)
    if args.num_experts is None:
        return options
    if args.moe_router_score_function == "sqrtsoftplus":
        notes.append("--moe-router-score-function sqrtsoftplus is predicted as sigmoid")
    if args.transformer_impl != "local" and not args.moe_grouped_gemm:
        notes.append("without --moe-grouped-gemm experts are computed one after the other: predicted as if all at once")
    sizes_of_experts = (args.num_experts, args.moe_router_topk, args.moe_ffn_hidden_size or ffn_hidden_size)
    shared, sigmoid = args.moe_shared_expert_intermediate_size or 0, args.moe_router_score_function != "softmax"
    options["experts"] = Experts(
        *sizes_of_experts, shared, args.moe_shared_expert_gate, read_pattern(str(args.moe_layer_freq)), sigmoid
    )
    parallel = (args.expert_model_parallel_size, args.expert_tensor_parallel_size, args.moe_token_dispatcher_type)
    options["routing"] = Routing(*parallel, args.moe_expert_capacity_factor, args.moe_pad_expert_input_to_capacity)
    notes.append("experts' loads are assumed to be even")
    return options


def _window(text: str) -> int:
    """Return the number of tokens that a token attends to, itself included, of a text such as `127,0`."""
    parts = text.strip("()").replace(" ", "").split(",")
    if len(parts) != 2 or not all(re.fullmatch("[0-9]{1,12}", part) for part in parts) or int(parts[1]):
        raise ValueError(f"--window-size {text[:40]} is not a window of tokens before a token, such as 127,0")
    return int(parts[0]) + 1


def _skipped(text: str | None) -> tuple[int, ...]:
    """Return the pattern of layers with the window. A number N means that every N-th layer has none."""
    if text is None:
        return EVERY_LAYER
    if re.fullmatch("[0-9]{1,12}", text) and int(text) > 1:
        return shortest((*(1,) * (min(int(text), 1000) - 1), 0))
    return read_pattern(text)
