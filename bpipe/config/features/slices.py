"""Say in which state features of Megatron's are beside sequences in slices, and why.

In: as `table`. Out: features, each guarded or refused. Imports nothing else.
"""

from __future__ import annotations

from bpipe.config.features.feature import Feature, Settings, State, has_experts


def _routing(settings: Settings) -> tuple[str, ...]:
    """How the router of experts balances loads: Megatron takes one way, or a list."""
    types = settings.moe_router_load_balancing_type
    return tuple(types) if isinstance(types, (list, tuple)) else (types,)


def _has_auxiliary_losses(settings: Settings) -> bool:
    """Whether the router of experts has a loss of its own."""
    coefficients = settings.moe_aux_loss_coeff
    weighed = any(coefficients) if isinstance(coefficients, (list, tuple)) else bool(coefficients)
    return has_experts(settings) and bool(settings.moe_z_loss_coeff or weighed)


def _routes_again(settings: Settings) -> bool:
    """Whether routers are computed again in the backward."""
    selective = settings.recompute_granularity == "selective" and "moe" in (settings.recompute_modules or ())
    return settings.recompute_granularity == "full" or selective


# What micro-batches that are cut into slices cannot do besides: a slice sees the keys of those before it, and nothing
# else of them.
SLICED: tuple[Feature, ...] = (
    Feature(
        "Transformer Engine's attention",
        lambda s: s.transformer_impl == "transformer_engine",
        "the first slice that sees earlier keys also shows Transformer Engine's kernel a mask whose result is known, "
        "and the run ends if the result differs",
        "use --transformer-impl local",
        State.GUARDED,
        "an_engine_that_masks_otherwise_ends_the_run",
    ),
    Feature(
        "context parallelism",
        lambda s: (s.context_parallel_size or 1) > 1,
        "a ring of context-parallel ranks exchanges parts of equal length, but each slice attends to more keys than "
        "the one before",
        "use --context-parallel-size 1, because slices save as much memory",
    ),
    Feature(
        "variable lengths in slices",
        lambda s: s.variable_seq_lengths,
        "all micro-batches have one list of slice boundaries",
        "leave variable_seq_lengths at False, or drop --bpipe-slices",
    ),
    Feature(
        "packed sequences",
        lambda s: s.sft or s.dataloader_inter_document_masking,
        "Megatron gives the boundaries of packed sequences for a whole row and not for a slice",
        "drop --sft / --dataloader-inter-document-masking",
    ),
    Feature(
        "hybrid models in slices",
        lambda s: s.hybrid_layer_pattern or s.is_hybrid_model,
        "Mamba layers carry a state from token to token, but slices do not pass it on",
        "drop --hybrid-layer-pattern",
    ),
    Feature(
        "other attention",
        lambda s: s.experimental_attention_variant,
        "sparse and linear attention keep other tensors than keys and values",
        "drop --experimental-attention-variant",
    ),
    Feature(
        "fused rotary positions of latent attention",
        lambda s: s.multi_latent_attention and s.apply_rope_fusion,
        "the fused kernel looks positions up from the beginning of the sequence and not of the slice",
        "use --no-rope-fusion",
    ),
    Feature(
        "fused softmax",
        lambda s: s.transformer_impl == "local" and (s.bf16 or s.fp16) and s.masked_softmax_fusion,
        "the fused softmax expects as many keys as queries, but slices have more keys",
        "use --no-masked-softmax-fusion",
    ),
    Feature(
        "one layer for all further tokens",
        lambda s: s.mtp_num_layers and s.mtp_use_repeated_layer,
        "a layer keeps the keys of one pass, but a repeated layer runs once for each predicted token",
        "drop --mtp-use-repeated-layer",
    ),
    Feature(
        "further tokens in a layout of slices",
        lambda s: s.mtp_num_layers and s.pipeline_model_parallel_layout,
        "a layout may put multi-token prediction on another stage than the loss, which never ran in slices",
        "drop --pipeline-model-parallel-layout or --mtp-num-layers",
    ),
    Feature(
        "capacity of experts",
        lambda s: has_experts(s) and s.moe_expert_capacity_factor is not None,
        "with a capacity an expert drops tokens by comparing those of a whole micro-batch, but a slice has only some "
        "of them",
        "drop --moe-expert-capacity-factor",
    ),
    Feature(
        "routing of a whole micro-batch",
        lambda s: has_experts(s) and {"sinkhorn", "quantile_balancing", "global_aux_loss"} & set(_routing(s)),
        "Sinkhorn and quantile balancing choose experts among all tokens of a micro-batch, and a global loss counts "
        "the tokens of several micro-batches",
        "use --moe-router-load-balancing-type aux_loss, seq_aux_loss or none",
    ),
    Feature(
        "losses of experts computed again",
        lambda s: _has_auxiliary_losses(s) and _routes_again(s),
        "if routers are recomputed, the number of tokens per expert would be known only after the backwards that need "
        "it",
        "use --recompute-granularity selective without moe, or set --moe-aux-loss-coeff and --moe-z-loss-coeff to 0",
    ),
    Feature(
        "losses of experts by token",
        lambda s: _has_auxiliary_losses(s) and s.calculate_per_token_loss,
        "Megatron weighs a router's losses by the tokens that it receives, which are those of one slice only",
        "drop --calculate-per-token-loss, or set --moe-aux-loss-coeff and --moe-z-loss-coeff to 0",
    ),
)
