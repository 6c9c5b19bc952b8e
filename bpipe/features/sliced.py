"""Say in which state features of Megatron's are beside sequences in slices, and why.

In: as `table`. Out: features, each guarded or refused. Imports nothing else.
"""

from __future__ import annotations

from bpipe.features.feature import Feature, Settings, State, has_experts


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
        "the first slice that sees earlier keys also asks the kernel for a mask of known answer, and the run ends where it "
        "is another",
        "use --transformer-impl local",
        State.GUARDED,
        "an_engine_that_masks_otherwise_ends_the_run",
    ),
    Feature(
        "context parallelism",
        lambda s: (s.context_parallel_size or 1) > 1,
        "a ring of ranks exchanges parts of equal length, and slices attend to ever more keys",
        "use --context-parallel-size 1: slices need as much less memory",
    ),
    Feature(
        "variable lengths in slices",
        lambda s: s.variable_seq_lengths,
        "where slices begin is one list for all micro-batches",
        "leave variable_seq_lengths at False, or drop --bpipe-slices",
    ),
    Feature(
        "packed sequences",
        lambda s: s.sft or s.dataloader_inter_document_masking,
        "where packed sequences begin is told of a whole row",
        "drop --sft / --dataloader-inter-document-masking",
    ),
    Feature(
        "hybrid models in slices",
        lambda s: s.hybrid_layer_pattern or s.is_hybrid_model,
        "Mamba layers carry a state from token to token, which slices do not",
        "drop --hybrid-layer-pattern",
    ),
    Feature(
        "other attention",
        lambda s: s.experimental_attention_variant,
        "sparse and linear attention keep other things than keys and values",
        "drop --experimental-attention-variant",
    ),
    Feature(
        "fused rotary positions of latent attention",
        lambda s: s.multi_latent_attention and s.apply_rope_fusion,
        "the fused kernel looks positions up from the sequence's beginning",
        "use --no-rope-fusion",
    ),
    Feature(
        "fused softmax",
        lambda s: s.transformer_impl == "local" and (s.bf16 or s.fp16) and s.masked_softmax_fusion,
        "the fused softmax takes as many keys as queries, and slices have more",
        "use --no-masked-softmax-fusion",
    ),
    Feature(
        "one layer for all further tokens",
        lambda s: s.mtp_num_layers and s.mtp_use_repeated_layer,
        "a layer keeps the keys of one pass, and this one runs once for each further token",
        "drop --mtp-use-repeated-layer",
    ),
    Feature(
        "further tokens in a layout of slices",
        lambda s: s.mtp_num_layers and s.pipeline_model_parallel_layout,
        "a layout may predict further tokens on another stage than the loss, which never ran in slices",
        "drop --pipeline-model-parallel-layout or --mtp-num-layers",
    ),
    Feature(
        "capacity of experts",
        lambda s: has_experts(s) and s.moe_expert_capacity_factor is not None,
        "which tokens an expert drops is decided among a whole micro-batch's",
        "drop --moe-expert-capacity-factor",
    ),
    Feature(
        "routing of a whole micro-batch",
        lambda s: has_experts(s) and {"sinkhorn", "quantile_balancing", "global_aux_loss"} & set(_routing(s)),
        "Sinkhorn and quantile balancing choose experts among all tokens of a micro-batch, and a global loss counts "
        "those of several",
        "use --moe-router-load-balancing-type aux_loss, seq_aux_loss or none",
    ),
    Feature(
        "losses of experts computed again",
        lambda s: _has_auxiliary_losses(s) and _routes_again(s),
        "tokens by expert would be known only behind the backwards that need them",
        "use --recompute-granularity selective without moe, or set --moe-aux-loss-coeff and --moe-z-loss-coeff to 0",
    ),
    Feature(
        "losses of experts by token",
        lambda s: _has_auxiliary_losses(s) and s.calculate_per_token_loss,
        "Megatron weighs a router's losses by the tokens that it is given, which are a slice's",
        "drop --calculate-per-token-loss, or set --moe-aux-loss-coeff and --moe-z-loss-coeff to 0",
    ),
)
