"""The state of this project's use of Megatron's features, and why: the table of the trainer, plans and `bpipe check-launch`.

It applies to Megatron's arguments, the configuration of a model that is about to train, or a launch's flags. What the
settings do not have does not apply: a model's configuration says nothing of FSDP.

`supported`: trained by stock Megatron and with this project, and equal in every bit. `guarded`: right by construction as
far as can be said without the hardware, and checked where it runs: what moves in the first iterations has to come back
unchanged (`--bpipe-verify`). `refused`: known to fail, or without any use, so the run does not start.

All guarded features rely on one rule: a storage moves only if it belongs to this micro-batch alone. So what anybody's
buffer holds stays, and so does memory that does not come from torch's allocator.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bpipe.schedule.families.bidirectional import TWO_PIPES


class State(enum.Enum):
    """State of a feature, the best first."""

    SUPPORTED = "supported"
    GUARDED = "guarded"
    REFUSED = "refused"


class Settings:
    """Megatron's arguments or a model's configuration, read alike: what it does not have is None."""

    def __init__(self, source: object) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name, None)


def has_experts(settings: Settings) -> bool:
    """Whether a model has experts; the arguments and a model's configuration name their number differently."""
    return bool(settings.num_experts or settings.num_moe_experts)


@dataclass(frozen=True)
class Feature:
    """A feature of Megatron.

    Attributes:
        name: Its name in the documentation.
        applies: Whether settings use it.
        reason: Why it has its state.
        remedy: What to do without it.
        state: How far it is supported.
        proof: Test that shows it: in tests/gloo for what is supported, of a stand-in with the same shape of memory for
            the rest; empty if the reason needs none.
        moving: Whether it matters only if activations move, and not for measuring them.
        own_loop: Whether it matters only in our own loop, and not in Megatron's.
    """

    name: str
    applies: Callable[[Settings], object]
    reason: str
    remedy: str
    state: State = State.REFUSED
    proof: str = ""
    moving: bool = False
    own_loop: bool = False


# Megatron's default: eager iterations before the one that is captured.
_WARMUP_STEPS = 3


def _modules(settings: Settings) -> frozenset[str]:
    """Return the parts of a layer that CUDA graphs capture; none for whole layers."""
    parts = settings.cuda_graph_modules or settings.cuda_graph_scope or ()
    parts = parts.replace(",", " ").split() if isinstance(parts, str) else parts
    return frozenset(str(getattr(part, "name", part)) for part in parts) - {"full"}


def _graphs_an_iteration(settings: Settings) -> bool:
    return settings.cuda_graph_impl == "full_iteration" or (
        settings.cuda_graph_impl == "local" and "full_iteration" in _modules(settings)
    )


def _verifies_replays(settings: Settings) -> bool:
    """Whether transfers are to be checked in more iterations than run before a capture."""
    steps, wanted = settings.cuda_graph_warmup_steps, settings.bpipe_verify
    return wanted is not None and (wanted == "all" or wanted > (_WARMUP_STEPS if steps is None else steps))


def _graphs_layers(settings: Settings) -> bool:
    """Whether Transformer Engine captures layers, or parts of them."""
    return settings.cuda_graph_impl == "transformer_engine" or bool(settings.external_cuda_graph)


def _graphs_whole_layers(settings: Settings) -> bool:
    modules = _modules(settings)
    rest = {"moe"} if has_experts(settings) else {"mlp"}
    return _graphs_layers(settings) and (not modules or {"attn"} | rest <= modules)


def _has_expert_biases(settings: Settings) -> bool:
    return has_experts(settings) and bool(settings.add_bias_linear)


def _groups_experts(settings: Settings) -> bool:
    """Whether experts are Transformer Engine's grouped matrices, which add their first bias themselves."""
    return bool(settings.moe_grouped_gemm) and settings.transformer_impl == "transformer_engine"


def _fuses_expert_activation(settings: Settings) -> bool:
    """Whether experts have biases that their fused activation function does not take (`MLP.forward`, `TEGroupedMLP`)."""
    if not _has_expert_biases(settings) or settings.quick_geglu:
        return False
    if settings.swiglu:
        return bool(settings.bias_swiglu_fusion) and not _groups_experts(settings)
    return bool(settings.bias_gelu_fusion)


FEATURES: tuple[Feature, ...] = (
    Feature(
        "CUDA graphs of an iteration",
        _graphs_an_iteration,
        "transfers are captured and replayed with the iteration, and what is checked, measured and recorded are the "
        "iterations before the capture (--cuda-graph-warmup-steps)",
        "use no CUDA graphs",
        State.GUARDED,
        "test_replays_come_to_the_bits_of_iterations",
    ),
    Feature(
        "differing sizes in a CUDA graph of an iteration",
        lambda s: _graphs_an_iteration(s) and (s.bpipe_differing_sizes or s.variable_seq_lengths),
        "micro-batches of differing size tell their sizes in every iteration, and a CUDA graph asks no CPU",
        "drop --bpipe-differing-sizes, or use no CUDA graphs",
        moving=True,
    ),
    Feature(
        "checks of replays",
        lambda s: _graphs_an_iteration(s) and _verifies_replays(s),
        "replays of a CUDA graph cannot be checked, only the iterations before its capture",
        "lower --bpipe-verify to --cuda-graph-warmup-steps or less",
        moving=True,
    ),
    Feature(
        "shards of the vocabulary or slices in a CUDA graph of an iteration",
        lambda s: _graphs_an_iteration(s) and (s.bpipe_vocabulary not in (None, "none") or (s.bpipe_slices or 1) > 1),
        "shards of the vocabulary ask the device whether the loss can be computed in them, and slices may differ in "
        "size, which a CUDA graph cannot",
        "drop --bpipe-vocabulary and --bpipe-slices, or use no CUDA graphs",
        own_loop=True,
    ),
    Feature(
        "two pipelines in a CUDA graph of an iteration",
        lambda s: _graphs_an_iteration(s) and s.bpipe_schedule in {family.name for family in TWO_PIPES},
        "Megatron copies the data of a micro-batch to the same memory for all chunks of a rank, and in two directions "
        "these compute different micro-batches",
        "choose another --bpipe-schedule, or use no CUDA graphs",
        own_loop=True,
    ),
    Feature(
        "CUDA graphs of whole layers",
        _graphs_whole_layers,
        "CUDA graphs of whole layers keep what these layers save in static memory of their own, so nothing is left to "
        "move",
        "name a part of each layer with --cuda-graph-modules, such as attn or moe_router",
    ),
    Feature(
        "local CUDA graphs",
        lambda s: (s.cuda_graph_impl == "local" and not _graphs_an_iteration(s)) or s.enable_cuda_graph,
        "Megatron's local CUDA graphs pass the memory of one micro-batch to the next in the order of capture, and "
        "share that memory's pool with tensors that are not captured",
        "use --cuda-graph-impl transformer_engine with --cuda-graph-modules, and drop --enable-cuda-graph",
    ),
    Feature(
        "CUDA graphs of parts of layers",
        lambda s: _graphs_layers(s) and not _graphs_whole_layers(s),
        "what a graph captures stays in its static memory and the rest of the layer moves, and before the second "
        "iteration the log shows how much that is",
        "drop --cuda-graph-impl",
        State.GUARDED,
        "test_a_static_pool_stays",
        moving=True,
    ),
    *(
        Feature(
            name,
            lambda s, name=name: getattr(s, name.lower()) is not None,  # type: ignore[misc]
            f"{name} payloads and scales are ordinary storages and move, while copies of weights in {name} belong to "
            "their modules and stay",
            f"drop --{name.lower()}-format",
            State.GUARDED,
            "test_eight_bit_payloads_and_their_scales_come_back",
            moving=True,
        )
        for name in ("FP8", "FP4")
    ),
    Feature(
        "activation offloading",
        lambda s: s.cpu_offloading or (s.cpu_offloading_num_layers or 0) > 0,
        "activation offloading saves the tensors of whole layers through autograd hooks, and inspecting such a tensor "
        "fetches it back, so nothing in these layers could move",
        "use --fine-grained-activation-offloading, or drop --cpu-offloading-num-layers",
    ),
    Feature(
        "fine-grained activation offloading",
        lambda s: s.fine_grained_activation_offloading,
        "fine-grained offloading saves tensors through its own hooks and holds them itself, on the GPU or in CPU "
        "memory, so they are not inspected and stay, while the rest of the layer moves",
        "drop --fine-grained-activation-offloading",
        State.GUARDED,
        "test_what_hooks_keep_elsewhere_stays_and_the_rest_moves",
        moving=True,
    ),
    Feature(
        "fine-grained offloading in our loop",
        lambda s: s.fine_grained_activation_offloading,
        "fine-grained offloading needs to know where an iteration ends, which Megatron's own loops tell it and "
        "bpipe's own loop does not",
        "drop --fine-grained-activation-offloading, or let Megatron's own loop run the schedule",
        own_loop=True,
    ),
    Feature(
        "combined 1F1B",
        # Megatron has --delay-wgrad-compute with it only.
        lambda s: s.overlap_moe_expert_parallel_comm,
        "combined 1F1B gives each part of a layer its own autograd graph and runs a forward and a backward at once, "
        "so saved tensors are collected from all of these graphs, transfers start before such a pair of steps and end "
        "before the next, and moved memory is marked as used on the experts' communication stream",
        "drop --overlap-moe-expert-parallel-comm / --delay-wgrad-compute",
        State.GUARDED,
        "test_what_parts_of_layers_on_two_streams_saved_moves_in_its_order",
        moving=True,
    ),
    Feature(
        "combined 1F1B in our loop",
        lambda s: s.overlap_moe_expert_parallel_comm,
        "combined 1F1B hides the experts' communication behind a forward and a backward that run at once, but bpipe's "
        "own loop runs them one after the other",
        "drop --overlap-moe-expert-parallel-comm / --delay-wgrad-compute, or let Megatron's own loop run the schedule",
        own_loop=True,
    ),
    Feature(
        "combined 1F1B without a pipeline",
        lambda s: s.overlap_moe_expert_parallel_comm and s.pipeline_model_parallel_size in (None, 1),
        "combined 1F1B on one pipeline rank has no other rank to share memory with, and its loop was never measured",
        "drop --overlap-moe-expert-parallel-comm, or use at least two pipeline ranks",
    ),
    Feature(
        "paged stash",
        lambda s: s.moe_paged_stash,
        "paged stash runs a step again when its buffers overflow",
        "drop --moe-paged-stash",
    ),
    Feature(
        "packed sequences on context-parallel ranks",
        lambda s: (s.context_parallel_size or 1) > 1 and (s.sft or s.dataloader_inter_document_masking),
        "Transformer Engine splits each packed sequence over the context-parallel ranks, which it does on GPUs only, "
        "and keys and values held by the buffers of its ring stay, while the rest moves",
        "use --context-parallel-size 1, or drop --sft / --dataloader-inter-document-masking",
        State.GUARDED,
        "test_a_buffer_that_somebody_holds_stays",
        moving=True,
    ),
    Feature(
        "the flex dispatcher of experts",
        lambda s: has_experts(s) and s.moe_token_dispatcher_type == "flex",
        "DeepEP and HybridEP hold tokens in their own communication buffers, which stay, while what the experts "
        "compute from these tokens moves",
        "use --moe-token-dispatcher-type alltoall",
        State.GUARDED,
        "test_a_buffer_that_somebody_holds_stays",
        moving=True,
    ),
    # Autograd runs a node's backward on the stream of its forward, and there the memory that a load filled belongs to
    # another stream's pool: it would be given out again while the node still reads it, unless that stream is noted.
    Feature(
        "overlapped shared experts",
        lambda s: s.moe_shared_expert_overlap,
        "memory that moves is also marked as used on the shared experts' stream, so that it is not reused before that "
        "stream has finished with it",
        "drop --moe-shared-expert-overlap",
        State.GUARDED,
        "test_what_another_stream_computes_moves_in_its_order",
        moving=True,
    ),
    Feature(
        "hybrid context parallelism",
        lambda s: s.hybrid_context_parallel,
        "with hybrid context parallelism the data determines the number of micro-batches, but bpipe plans an "
        "iteration before it sees the data",
        "drop --hybrid-context-parallel",
    ),
    Feature(
        "distributed saved activations",
        lambda s: s.distribute_saved_activations,
        "Megatron itself replaces the memory of distributed saved activations, in the forward and again in the "
        "backward, which was never tried together with the transfers",
        "drop --distribute-saved-activations",
    ),
    Feature(
        "recomputation of the MLP with biases",
        lambda s: s.recompute_granularity == "selective" and "mlp" in (s.recompute_modules or ()) and s.add_bias_linear,
        "Megatron's own recomputation of the MLP hangs when its linear layers have biases",
        "use --disable-bias-linear, or drop mlp from --recompute-modules",
    ),
    Feature(
        "experts with biases and a fused activation",
        _fuses_expert_activation,
        "in Megatron's first forward, the fused activation function of experts refuses biases, or it is a GELU, which "
        "has no fused form there",
        "use --disable-bias-linear, or --no-bias-swiglu-fusion with --swiglu and --no-bias-gelu-fusion without",
    ),
    Feature(
        "grouped experts with biases and a fused dropout",
        lambda s: _has_expert_biases(s) and _groups_experts(s) and s.bias_dropout_fusion,
        "Megatron does not build grouped experts with biases if their sum is fused with the dropout",
        "use --disable-bias-linear or --no-bias-dropout-fusion",
    ),
    Feature(
        "partial recomputation of micro-batches",
        lambda s: s.num_microbatches_with_partial_activation_checkpoints is not None,
        "bpipe's own loop recomputes all micro-batches alike and cannot recompute some of them only",
        "leave num_microbatches_with_partial_activation_checkpoints unset, or let Megatron's own loop run the schedule",
        own_loop=True,
    ),
    Feature(
        "overlapped tensor-parallel communication",
        lambda s: s.tp_comm_overlap,
        "overlapped tensor-parallel communication gathers into userbuffers, whose memory does not come from torch's "
        "allocator, so it cannot be freed and stays",
        "drop --tp-comm-overlap",
        State.GUARDED,
        "test_memory_without_an_allocator_stays",
        moving=True,
    ),
    Feature(
        "weights sharded beyond tensor parallelism",
        lambda s: (s.gtp_weight_remat_size or 1) > 1 or (s.expert_gtp_weight_remat_size or 1) > 1,
        "weights that are gathered for a step are saved like activations, and moving gathered weights was never tried",
        "drop --tensor-parallel-num-weight-shards / --expert-tensor-parallel-num-weight-shards",
    ),
    Feature(
        "ring exchange",
        lambda s: s.use_ring_exchange_p2p,
        "the ring exchange of a custom torch build was never tried together with the transfers",
        "drop --use-ring-exchange-p2p",
    ),
    Feature(
        "FSDP",
        lambda s: s.use_megatron_fsdp or s.use_torch_fsdp2,
        "FSDP frees parameters whose memory saved tensors share",
        "drop --use-megatron-fsdp / --use-torch-fsdp2",
    ),
    Feature(
        "in-process restart",
        lambda s: s.inprocess_restart,
        "an in-process restart cannot rebuild the pairs' process groups",
        "drop --inprocess-restart",
    ),
    Feature(
        "reinforcement learning",
        lambda s: s.perform_rl_step,
        "reinforcement learning generates text between training iterations, which was never tried",
        "drop --perform-rl-step",
    ),
    Feature(
        "a fake process group",
        lambda s: s.fake_process_group,
        "a fake process group sends nothing, so activations that move would not come back",
        "drop --fake-process-group",
    ),
    Feature(
        "a YAML configuration",
        lambda s: s.yaml_cfg,
        "Megatron reads the YAML file instead of the command line, so it ignores this project's flags too",
        "give the flags on the command line instead of --yaml-cfg",
    ),
)


def _predicts_apart(settings: Settings) -> bool:
    """Whether a layout has layers that predict further tokens on another stage than the loss."""
    layout = settings.pipeline_model_parallel_layout
    stages = layout.split("|") if isinstance(layout, str) else []
    return bool(settings.mtp_num_layers) and any("m" in stage and "L" not in stage for stage in stages)


_BY_RANK = (
    Feature(
        "checkpoints by rank",
        lambda s: (s.save or s.load) and s.ckpt_format not in (None, "torch_dist"),
        "only torch_dist checkpoints store weights by their place in the model, other formats store them by rank, and "
        "here ranks have other weights than in Megatron",
        "use --ckpt-format torch_dist",
    ),
    Feature(
        "local checkpoints",
        lambda s: s.non_persistent_ckpt_type == "local",
        "local checkpoints store weights by rank, and here ranks have other weights than in Megatron",
        "use --non-persistent-ckpt-type global",
    ),
)
# Features that a placement other than Megatron's cannot have: a rank has the first and the last stage.
PLACED: tuple[Feature, ...] = (
    *_BY_RANK,
    Feature(
        "further tokens apart from the loss",
        _predicts_apart,
        "multi-token prediction on a stage without the loss reads data that Megatron provides by pipeline rank, and "
        "here ranks have other layers than in Megatron",
        "put every m of --pipeline-model-parallel-layout on the stage with L, or drop --mtp-num-layers",
    ),
    Feature(
        "skipped iterations",
        lambda s: s.iterations_to_skip,
        "Megatron skips iterations on one data iterator per rank, but here a rank has one per chunk",
        "drop --iterations-to-skip",
    ),
)
# Features that shards of the vocabulary cannot have: no rank has all logits, and every rank has other rows than without.
SHARDED: tuple[Feature, ...] = (
    Feature(
        "further tokens without a whole embedding",
        lambda s: s.mtp_num_layers and (s.untie_embeddings_and_output_weights is False or s.bpipe_vocabulary_input),
        "multi-token prediction looks tokens up in the embedding on the last stage, but with shards every rank has "
        "only some of its rows",
        "use --untie-embeddings-and-output-weights without --bpipe-vocabulary-input, or drop --mtp-num-layers",
    ),
    Feature(
        "heads of further tokens that train alone",
        lambda s: s.mtp_num_layers and s.mtp_detach_heads,
        "with shards one matrix product computes the logits of all tokens, so the output layer receives the gradients "
        "of all of them",
        "drop --mtp-detach-heads",
    ),
    Feature(
        "further tokens in slices and shards",
        lambda s: s.mtp_num_layers and (s.bpipe_slices or 1) > 1,
        "slices join the losses of multi-token prediction to whole rows in the last stage's forward, but with shards "
        "these losses are known only later",
        "drop --bpipe-vocabulary, --bpipe-slices or --mtp-num-layers",
    ),
    Feature(
        "variable lengths in shards",
        lambda s: s.variable_seq_lengths,
        "shards agree on the shape of their common results once, for all micro-batches",
        "leave variable_seq_lengths at False, or drop --bpipe-vocabulary",
    ),
    Feature(
        "deferred gradients of the output layer",
        lambda s: s.defer_embedding_wgrad_compute,
        "Megatron defers the output layer's weight gradient on the last stage, which with shards has only a part of "
        "that layer",
        "drop --defer-embedding-wgrad-compute",
    ),
    Feature(
        "models without weights at first",
        lambda s: s.init_model_with_meta_device,
        "the vocabulary's rows are divided as soon as a model is built, but on the meta device it has no weights yet",
        "drop --init-model-with-meta-device",
    ),
    *_BY_RANK,
)


def _has_auxiliary_losses(settings: Settings) -> bool:
    """Whether the router of experts has a loss of its own."""
    coefficients = settings.moe_aux_loss_coeff
    weighed = any(coefficients) if isinstance(coefficients, (list, tuple)) else bool(coefficients)
    return has_experts(settings) and bool(settings.moe_z_loss_coeff or weighed)


def _routes_again(settings: Settings) -> bool:
    """Whether routers are computed again in the backward."""
    selective = settings.recompute_granularity == "selective" and "moe" in (settings.recompute_modules or ())
    return settings.recompute_granularity == "full" or selective


# Features that slices cannot have: a slice sees the keys of earlier slices, and nothing else of them.
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
        # Megatron takes one way, or a list.
        lambda s: (
            has_experts(s)
            and any(
                name in (s.moe_router_load_balancing_type or ())
                for name in ("sinkhorn", "quantile_balancing", "global_aux_loss")
            )
        ),
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
