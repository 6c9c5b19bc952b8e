"""Say in which state this project's use of a feature of Megatron's is, and why: the table that the trainer, plans and
`bpipe check-launch` ask.

In: Megatron's arguments, the configuration of a model that is about to train, or a launch's flags. Out: features, each
supported, guarded or refused. What the settings do not have does not apply: a model's configuration says nothing of
FSDP. Imports nothing, so that a plan asks it as the trainer does.

`supported`: trained by stock Megatron and with this project, and equal in every bit. `guarded`: right by construction
as far as can be said without the hardware, and checked where it runs: what moves in the first iterations has to come
back as it left (`--bpipe-verify`). `refused`: known to go wrong, or to be worth nothing, and the run does not start.

What holds for all that is guarded: a storage leaves only if it is counted to be this micro-batch's alone, so what
somebody's buffer holds stays there. What an owner writes without holding it is not a storage of torch's allocator, and
stays too. Were one of this wrong, a byte would change while its storage leaves or is away.
"""

from __future__ import annotations

from bpipe.features.feature import Feature, Settings, State, has_experts


def _modules(settings: Settings) -> frozenset[str]:
    """Parts of a layer that CUDA graphs capture; none for whole layers."""
    given = settings.cuda_graph_modules or settings.cuda_graph_scope or ()
    names = given.replace(",", " ").split() if isinstance(given, str) else [getattr(one, "name", one) for one in given]
    return frozenset(str(name) for name in names) - {"full"}


def _graphs_an_iteration(settings: Settings) -> bool:
    return settings.cuda_graph_impl == "full_iteration" or (
        settings.cuda_graph_impl == "local" and "full_iteration" in _modules(settings)
    )


def _graphs_layers(settings: Settings) -> bool:
    """Whether Transformer Engine captures layers, or parts of them."""
    return settings.cuda_graph_impl == "transformer_engine" or bool(settings.external_cuda_graph)


def _graphs_whole_layers(settings: Settings) -> bool:
    modules = _modules(settings)
    rest = {"moe"} if has_experts(settings) else {"mlp"}
    return _graphs_layers(settings) and (not modules or {"attn"} | rest <= modules)


FEATURES: tuple[Feature, ...] = (
    Feature(
        "CUDA graphs of an iteration",
        _graphs_an_iteration,
        "a graph repeats what was captured at the same addresses and asks no host, and transfers are started by the host "
        "and give memory back in between",
        "use --cuda-graph-impl transformer_engine with --cuda-graph-modules for a part of each layer, or none",
    ),
    Feature(
        "CUDA graphs of whole layers",
        _graphs_whole_layers,
        "graphs keep what whole layers save in static memory of their own, so nothing is left to move",
        "name a part of each layer by --cuda-graph-modules, such as attn or moe_router",
    ),
    Feature(
        "local CUDA graphs",
        lambda s: (s.cuda_graph_impl == "local" and not _graphs_an_iteration(s)) or s.enable_cuda_graph,
        "Megatron's own graphs of layers give the memory of one micro-batch to the next in the order in which they were "
        "captured, and keep it in one pool with what is not captured",
        "use --cuda-graph-impl transformer_engine with --cuda-graph-modules, and drop --enable-cuda-graph",
    ),
    Feature(
        "CUDA graphs of parts of layers",
        lambda s: _graphs_layers(s) and not _graphs_whole_layers(s),
        "what a graph captures stays in its static memory, and the rest of the layer moves: how much that is the log says "
        "before the second iteration",
        "drop --cuda-graph-impl",
        State.GUARDED,
        "test_a_static_pool_stays",
        moving=True,
    ),
    Feature(
        "FP8",
        lambda s: s.fp8 is not None,
        "payloads and scales are storages like any others; the 8-bit copies of weights are their module's and stay",
        "drop --fp8-format",
        State.GUARDED,
        "test_eight_bit_payloads_and_their_scales_come_back",
        moving=True,
    ),
    Feature(
        "FP4",
        lambda s: s.fp4 is not None,
        "payloads and scales are storages like any others, two numbers a byte; copies of weights are their module's and "
        "stay",
        "drop --fp4-format",
        State.GUARDED,
        "test_eight_bit_payloads_and_their_scales_come_back",
        moving=True,
    ),
    Feature(
        "activation offloading",
        lambda s: s.cpu_offloading or (s.cpu_offloading_num_layers or 0) > 0,
        "activation offloading saves tensors of whole layers through hooks of autograd, and to look at one is to fetch "
        "it: nothing of such a layer could move",
        "use --fine-grained-activation-offloading, or drop --cpu-offloading-num-layers",
    ),
    Feature(
        "fine-grained activation offloading",
        lambda s: s.fine_grained_activation_offloading,
        "what it takes it saves through its own hooks and holds itself, on the device or the host: that is not looked at "
        "and stays, and the rest of the layer moves",
        "drop --fine-grained-activation-offloading",
        State.GUARDED,
        "test_what_hooks_keep_elsewhere_stays_and_the_rest_moves",
        moving=True,
    ),
    Feature(
        "fine-grained offloading in our loop",
        lambda s: s.fine_grained_activation_offloading,
        "Megatron's own loops tell it where an iteration ends, and ours does not",
        "drop --fine-grained-activation-offloading, or leave the schedule to Megatron's loop",
        own_loop=True,
    ),
    Feature(
        "combined 1F1B",
        # Megatron has --delay-wgrad-compute with it only.
        lambda s: s.overlap_moe_expert_parallel_comm,
        "each part of a layer has a graph of its own, and what a stage saved is found in all of them; transfers begin "
        "before a forward and a backward that run at once and end before the next, and what moves is marked as used on "
        "the stream of exchanges",
        "drop --overlap-moe-expert-parallel-comm / --delay-wgrad-compute",
        State.GUARDED,
        "test_what_parts_of_layers_on_two_streams_saved_moves_in_its_order",
        moving=True,
    ),
    Feature(
        "combined 1F1B in our loop",
        lambda s: s.overlap_moe_expert_parallel_comm,
        "our own loop runs a forward and a backward one after the other, so nothing hides the exchanges of experts",
        "drop --overlap-moe-expert-parallel-comm / --delay-wgrad-compute, or leave the schedule to Megatron's loop",
        own_loop=True,
    ),
    Feature(
        "combined 1F1B without a pipeline",
        lambda s: s.overlap_moe_expert_parallel_comm and s.pipeline_model_parallel_size in (None, 1),
        "one pipeline rank has nobody to share memory with, and its loop of combined steps was never measured",
        "drop --overlap-moe-expert-parallel-comm, or take two pipeline ranks or more",
    ),
    Feature("paged stash", lambda s: s.moe_paged_stash, "paged stash runs a step again", "drop --moe-paged-stash"),
    Feature(
        "packed sequences on context-parallel ranks",
        lambda s: (s.context_parallel_size or 1) > 1 and (s.sft or s.dataloader_inter_document_masking),
        "Transformer Engine deals out the parts of each packed sequence, which it does on GPUs alone; keys and values "
        "that buffers of its ring hold stay, and the rest moves",
        "use --context-parallel-size 1, or drop --sft / --dataloader-inter-document-masking",
        State.GUARDED,
        "test_a_buffer_that_somebody_holds_stays",
        moving=True,
    ),
    Feature(
        "the flex dispatcher of experts",
        lambda s: has_experts(s) and s.moe_token_dispatcher_type == "flex",
        "tokens in DeepEP's and HybridEP's communication buffers are held by these and stay; what experts make of them "
        "moves",
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
        "what leaves and comes back is marked as used on the stream of shared experts too, so that nobody gets its "
        "memory before that stream is done with it",
        "drop --moe-shared-expert-overlap",
        State.GUARDED,
        "test_what_another_stream_computes_moves_in_its_order",
        moving=True,
    ),
    Feature(
        "hybrid context parallelism",
        lambda s: s.hybrid_context_parallel,
        "with hybrid context parallelism the number of micro-batches follows from the data, and a program is made "
        "before they are seen",
        "drop --hybrid-context-parallel",
    ),
    Feature(
        "distributed saved activations",
        lambda s: s.distribute_saved_activations,
        "saved activations already distributed over tensor-parallel ranks live in a shared buffer",
        "drop --distribute-saved-activations",
    ),
    Feature(
        "recomputation of the MLP with biases",
        lambda s: s.recompute_granularity == "selective" and "mlp" in (s.recompute_modules or ()) and s.add_bias_linear,
        "Megatron's own recomputation of the MLP hangs when its linear layers have biases",
        "use --disable-bias-linear, or drop mlp from --recompute-modules",
    ),
    Feature(
        "partial recomputation of micro-batches",
        lambda s: s.num_microbatches_with_partial_activation_checkpoints is not None,
        "our own loop tells no micro-batch to recompute otherwise than the others",
        "leave num_microbatches_with_partial_activation_checkpoints unset, or leave the schedule to Megatron's loop",
        own_loop=True,
    ),
    Feature(
        "overlapped tensor-parallel communication",
        lambda s: s.tp_comm_overlap,
        "what is gathered into userbuffers is memory without an allocator of torch's, which cannot be given back and stays",
        "drop --tp-comm-overlap",
        State.GUARDED,
        "test_memory_without_an_allocator_stays",
        moving=True,
    ),
    Feature(
        "weights sharded beyond tensor parallelism",
        lambda s: (s.gtp_weight_remat_size or 1) > 1 or (s.expert_gtp_weight_remat_size or 1) > 1,
        "weights that are gathered for a step are saved like activations, and moving those was never tried",
        "drop --tensor-parallel-num-weight-shards / --expert-tensor-parallel-num-weight-shards",
    ),
    Feature(
        "ring exchange",
        lambda s: s.use_ring_exchange_p2p,
        "the ring exchange of a custom torch was never tried beside the transfers",
        "drop --use-ring-exchange-p2p",
    ),
    Feature(
        "FSDP",
        lambda s: s.use_megatron_fsdp or s.use_torch_fsdp2,
        "FSDP frees parameters that saved tensors share",
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
        "reinforcement learning generates text between its iterations, which was never tried",
        "drop --perform-rl-step",
    ),
    Feature(
        "a fake process group",
        lambda s: s.fake_process_group,
        "a fake process group sends nothing, so activations would not come back",
        "drop --fake-process-group",
    ),
    Feature(
        "a YAML configuration",
        lambda s: s.yaml_cfg,
        "Megatron reads the file in place of the command line, and drops the flags of this project with the rest",
        "give the flags on the command line instead of --yaml-cfg",
    ),
)


def _predicts_apart(settings: Settings) -> bool:
    """Whether a layout has layers that predict further tokens on another stage than the loss."""
    layout = settings.pipeline_model_parallel_layout
    stages = layout.split("|") if isinstance(layout, str) else []
    return bool(settings.mtp_num_layers) and any("m" in stage and "L" not in stage for stage in stages)


# What a placement that is not Megatron's own cannot do besides: ranks have other layers there, and one has the first
# stage and the last.
PLACED: tuple[Feature, ...] = (
    Feature(
        "checkpoints by rank",
        lambda s: (s.save or s.load) and s.ckpt_format != "torch_dist",
        "only checkpoints of the format torch_dist file weights by layer; others file them by rank, and ranks have "
        "other layers here",
        "use --ckpt-format torch_dist",
    ),
    Feature(
        "local checkpoints",
        lambda s: s.non_persistent_ckpt_type == "local",
        "local checkpoints file weights by rank, and ranks have other layers here",
        "use --non-persistent-ckpt-type global",
    ),
    Feature(
        "further tokens apart from the loss",
        _predicts_apart,
        "layers that predict further tokens on another stage than the loss read data that Megatron gives by pipeline "
        "rank, and ranks have other layers here",
        "put all m of --pipeline-model-parallel-layout on the stage of L, or drop --mtp-num-layers",
    ),
    Feature(
        "skipped iterations",
        lambda s: s.iterations_to_skip,
        "Megatron skips iterations on one data iterator a rank, and here a rank has one per chunk",
        "drop --iterations-to-skip",
    ),
)
# What shards of the vocabulary cannot do besides: no rank has all logits, and every rank has other rows than it has
# without.
SHARDED: tuple[Feature, ...] = (
    Feature(
        "further tokens without a whole embedding",
        lambda s: s.mtp_num_layers and (s.untie_embeddings_and_output_weights is False or s.bpipe_vocabulary_input),
        "the last stage looks further tokens up in the embedding, of whose weight every rank has some rows",
        "use --untie-embeddings-and-output-weights without --bpipe-vocabulary-input, or drop --mtp-num-layers",
    ),
    Feature(
        "heads of further tokens that train alone",
        lambda s: s.mtp_num_layers and s.mtp_detach_heads,
        "one product makes the logits of all tokens, and gives the output layer the gradients of all",
        "drop --mtp-detach-heads",
    ),
    Feature(
        "further tokens in slices and shards",
        lambda s: s.mtp_num_layers and (s.bpipe_slices or 1) > 1,
        "further tokens' losses become whole rows in the last stage's forward, and shards know them later",
        "drop --bpipe-vocabulary, --bpipe-slices or --mtp-num-layers",
    ),
    Feature(
        "variable lengths in shards",
        lambda s: s.variable_seq_lengths,
        "what shards make together tells its shape once, for all micro-batches",
        "leave variable_seq_lengths at False, or drop --bpipe-vocabulary",
    ),
    Feature(
        "deferred gradients of the output layer",
        lambda s: s.defer_embedding_wgrad_compute,
        "Megatron defers the output layer's weight gradient on the last stage, where here is but a part of it",
        "drop --defer-embedding-wgrad-compute",
    ),
    Feature(
        "models without weights at first",
        lambda s: s.init_model_with_meta_device,
        "rows are dealt out as soon as a model is built, and on the meta device it has none",
        "drop --init-model-with-meta-device",
    ),
    Feature(
        "checkpoints by rank of shards",
        lambda s: (s.save or s.load) and s.ckpt_format not in (None, "torch_dist"),
        "only checkpoints of the format torch_dist file rows by their place in the vocabulary; others file them by "
        "rank",
        "use --ckpt-format torch_dist",
    ),
    Feature(
        "local checkpoints of shards",
        lambda s: s.non_persistent_ckpt_type == "local",
        "local checkpoints file weights by rank",
        "use --non-persistent-ckpt-type global",
    ),
)
