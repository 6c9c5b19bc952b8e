"""Write experts, latent attention, windows and a hybrid model's layers as Megatron's flags, and read them.

A hybrid model's pattern has a symbol per layer and, by `|`, where stages begin.
"""

import re
from typing import Any

from bpipe.config.flags.flag import Options
from bpipe.config.flags.launches import words
from bpipe.config.launch.layer_split import (
    CHUNKS,
    COUNT_EMBEDDING,
    COUNT_LOSS,
    FIRST,
    LAST,
    LAYERS_OF_A_CHUNK,
    LAYOUT,
    given,
    read_split,
    refuse_empty,
)
from bpipe.predict.layer_variants import (
    EVERY_LAYER,
    EXPERTS,
    Experts,
    Hybrid,
    Latent,
    Routing,
    read_pattern,
    shortest,
    split_text,
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


PATTERN, OLD_PATTERN = "--hybrid-layer-pattern", "--hybrid-override-pattern"
# Specifications of Megatron's own stack, today's first.
_STACKS = (
    ("megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"),
    ("megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"),
)


def flags_of_hybrid(setup: Setup) -> list[str]:
    """Return flags of a hybrid model; none where every layer has both parts."""
    hybrid = setup.model.hybrid
    if hybrid is None:
        return []
    sizes = {
        "mamba_num_heads": hybrid.num_heads,
        "mamba_head_dim": hybrid.head_dim,
        "mamba_state_dim": hybrid.state_dim,
        "mamba_num_groups": hybrid.num_groups,
        # Megatron's stack is Transformer Engine's.
        "spec": _STACKS[0] if setup.kernels == "gpu" else None,
    }
    text = hybrid.with_stages(setup.layers)
    # A pattern that begins with an MLP would be taken for a flag as a word of its own.
    return [*([f"{PATTERN}={text}"] if text.startswith("-") else [PATTERN, text]), *words(sizes)]


def settle_pattern(args: Options, notes: list[str]) -> None:
    """Set the pattern of its old flag and the number of layers, as Megatron does.

    Raises ValueError for flags that need a pattern without one, and for a stack that is not Megatron's.
    """
    if args.hybrid_override_pattern is not None:
        if args.hybrid_layer_pattern is not None:
            raise ValueError(f"{PATTERN} and {OLD_PATTERN} exclude each other: give the first")
        args.hybrid_layer_pattern = args.hybrid_override_pattern
    if args.spec is not None and (tuple(args.spec) not in _STACKS or args.hybrid_layer_pattern is None):
        text = " ".join(args.spec)[:80]
        raise ValueError(f"--spec {text}: layers of a custom specification are not modelled; leave the flag out")
    if args.hybrid_layer_pattern is None:
        if args.is_hybrid_model:
            raise ValueError(f"--is-hybrid-model does not say which layers the model has: give {PATTERN}, too")
        return
    if args.transformer_impl == "inference_optimized":
        raise ValueError("--transformer-impl inference_optimized is for inference and not modelled; leave the flag out")
    if not isinstance(args.hybrid_layer_pattern, str):
        # argparse takes the word `--` for the end of the flags, in Megatron's parser as well.
        raise ValueError(f"{PATTERN} --: two MLPs alone cannot be given, because -- ends the flags: give another")
    symbols, _ = split_text(args.hybrid_layer_pattern)
    if args.num_layers not in (None, len(symbols)):
        notes.append(
            f"{PATTERN} has {len(symbols)} layers, and Megatron uses those instead of --num-layers {args.num_layers}"
        )
    args.num_layers = len(symbols)
    if args.num_experts is not None and EXPERTS not in symbols:
        raise ValueError(
            f"--num-experts {args.num_experts}, but no layer of {PATTERN} has experts ({EXPERTS}): leave the "
            f"experts' flags out"
        )
    # The pattern alone has which layers have experts.
    args.moe_layer_freq = 1


def hybrid_of_flags(args: Options, position: str) -> dict[str, Any]:
    """Return the options by the names of a Model's fields."""
    others = {"no_positions": True} if position == "none" else {}
    if args.hybrid_layer_pattern is None:
        return others
    heads, inner = args.mamba_num_heads, 2 * args.hidden_size
    if heads is None:
        if inner % args.mamba_head_dim:
            raise ValueError(f"--mamba-head-dim {args.mamba_head_dim} does not divide {inner}: give --mamba-num-heads")
        heads = inner // args.mamba_head_dim
    symbols, _ = split_text(args.hybrid_layer_pattern)
    try:
        return {
            **others,
            "hybrid": Hybrid(symbols, heads, args.mamba_state_dim, args.mamba_head_dim, args.mamba_num_groups),
        }
    except ValueError as error:
        raise ValueError(f"{PATTERN} {args.hybrid_layer_pattern[:60]}: {error}") from None


def layers_of(args: Options) -> tuple[int, ...]:
    """Return the layers of every stage. Raises ValueError for what Megatron would refuse."""
    pipeline = args.pipeline_model_parallel_size
    if args.hybrid_layer_pattern is None:
        return read_split(args)
    _, stages = split_text(args.hybrid_layer_pattern)
    flags = [CHUNKS, LAYERS_OF_A_CHUNK, LAYOUT, COUNT_EMBEDDING, COUNT_LOSS]
    flags += [FIRST, LAST] if stages is not None else []
    if any(given(args, *flags)):
        raise ValueError(f"with {PATTERN} stages begin where it has a |: drop the other flags that place layers")
    if stages is None:
        return read_split(args)
    if len(stages) % pipeline:
        raise ValueError(f"{PATTERN} has {len(stages)} stages, not a multiple of the {pipeline} pipeline ranks")
    refuse_empty(stages)
    return stages
