"""Rows of the table for models, trainings and configurations, in predictions and launches, and for a search.

Megatron's flags have Megatron's names.
"""

from dataclasses import replace

from bpipe.balance.config import BALANCES
from bpipe.config.flags import schedules, values
from bpipe.config.flags.flag import REST, Flag, InLaunch, Read, group, number
from bpipe.config.flags.values import MINIMUM_BYTES, read_budget
from bpipe.predict import training
from bpipe.predict.cluster import DEVICES, RACKS
from bpipe.predict.layer_variants import DISPATCHERS
from bpipe.predict.model import PRESETS
from bpipe.predict.recompute import BLOCK, FORMS, RECOMPUTE, read_recompute, read_scope
from bpipe.schedule.families.families import FAMILIES, SEARCHED
from bpipe.schedule.families.family import TAKEN
from bpipe.schedule.hosts import ARRANGEMENTS, PAIR
from bpipe.schedule.layout import EVEN, Vocabulary


def recomputation(text: str) -> str:
    """Read a text of `bpipe.predict.recompute`, as short as it can be."""
    return read_recompute(text).text


def _size(field: str, text: str, otherwise: str = "", default: int | None = None, launched: Read | None = None) -> Flag:
    text += f" (default: the model's{otherwise and f', or without a model {otherwise}'})"
    return number(field, training.flag_of(field), text, launch=InLaunch(default=default, read=launched))


def _switch(field: str, text: str, *, megatrons: bool = True) -> Flag:
    return Flag(field, training.flag_of(field), text, launch=InLaunch() if megatrons else None)


# -- the model
# ----------------------------------------------------------------------------------------------------------------------

MODEL_NAME = Flag(
    "model",
    "--model",
    f"a preset, or a config.json of Hugging Face on disk. Presets: {', '.join(PRESETS)}",
    "NAME|PATH",
)
SEQUENCE = Flag(
    "sequence",
    "--seq-length --seq",
    "tokens per sequence, such as 8192 or 8k (default: the model's)",
    "N",
    values.tokens,
    launch=InLaunch(read=values.positive),
)
VOCABULARY_SIZE = number(
    "vocabulary",
    "--vocab-size",
    "tokens in the vocabulary, padded as Megatron pads it (default: the model's)",
    launch=InLaunch(),
)
SIZES = (
    _size("num_layers", "number of layers"),
    _size("hidden_size", "hidden size"),
    _size("num_attention_heads", "number of attention heads"),
    _size("num_query_groups", "number of groups of query heads", "the number of heads", 1),
    _size("kv_channels", "size of an attention head", "hidden size / heads"),
    _size("ffn_hidden_size", "hidden size of the MLP", "four times the hidden size"),
    _size(
        "mtp_num_layers",
        "number of further tokens that are predicted (multi-token prediction)",
        "none",
        launched=values.counted,
    ),
)
# Switches of a model, with the field of a `Model` that each sets, and the value.
SWITCHED = {
    "swiglu": ("gated", True),
    "rms_norm": ("rms_norm", True),
    "squared_relu": ("squared_relu", True),
    "disable_bias_linear": ("linear_bias", False),
    "add_qkv_bias": ("qkv_bias", True),
    "qk_layernorm": ("qk_norm", True),
    "rotary": ("learned_positions", False),
    "untie_embeddings_and_output_weights": ("tied_embedding", False),
    "no_dropout": ("dropout", False),
    "mtp_use_repeated_layer": ("mtp_use_repeated_layer", True),
}
MODEL_SWITCHES = (
    _switch("swiglu", "the MLP uses SwiGLU"),
    _switch("rms_norm", "norms have a weight and no bias, as in RMSNorm", megatrons=False),
    _switch("disable_bias_linear", "linear layers have no bias"),
    _switch("squared_relu", "the MLP uses squared ReLU, without a gate"),
    _switch("add_qkv_bias", "with --disable-bias-linear: the projections to Q, K and V have biases"),
    _switch("qk_layernorm", "normalise the queries and keys of every head"),
    _switch("rotary", "positions are not learned, as with rotary embeddings", megatrons=False),
    _switch("untie_embeddings_and_output_weights", "the output layer has its own weights"),
    _switch("no_dropout", "no dropout, so no masks are saved", megatrons=False),
    _switch("mtp_use_repeated_layer", "with --mtp-num-layers: one layer predicts all further tokens, in turn"),
)
MODEL = group(
    "model",
    MODEL_NAME,
    SEQUENCE,
    VOCABULARY_SIZE,
    *SIZES,
    *MODEL_SWITCHES,
    text="a preset or a config.json, with sizes replaced by other flags; or all sizes by flags, without --model",
)

# -- the training

CLUSTER = Flag(
    "cluster",
    "--cluster",
    "device, nodes and GPUs per node, such as a100-80g:4x8, or a .json or .toml file; for a torchrun launch the "
    f"device is enough. Devices: {', '.join((*DEVICES, *RACKS))}",
    "DEVICE:NODESxGPUS|FILE",
    required=True,
    launch=InLaunch(
        "--bpipe-cluster",
        value="DEVICE|FILE",
        help="with --bpipe-memory: the cluster, as for `bpipe simulate --cluster`, such as h100-80g "
        "(default: plans count bytes only). Transfers that would end late, by its links and "
        "predicted times, are issued earlier; with auto by measured bytes",
    ),
)
ATTENTION_KIND = Flag(
    "attention",
    "--attention",
    "attention kernel (default flash, which needs a GPU and Transformer Engine)",
    default="flash",
    choices=training.ATTENTION,
)
CP_COMM = Flag(
    "cp_comm_type",
    "--cp-comm-type",
    "with --cp: how attention reaches the rest of a sequence (default p2p, a ring)",
    default=training.CP_COMM_TYPES[0],
    choices=training.CP_COMM_TYPES,
)
PRECISION = Flag(
    "precision",
    "--precision",
    "training precision; gradients have 32 bits with bf16 and 16 bits with fp16 (default bf16)",
    default="bf16",
    choices=training.PRECISIONS,
)
NO_DISTRIBUTED_OPTIMIZER = _switch(
    "no_distributed_optimizer",
    "every replica holds the whole optimizer state (default: sharded as in ZeRO-1)",
    megatrons=False,
)
NO_SEQUENCE_PARALLEL = _switch(
    "no_sequence_parallel",
    "no sequence parallelism: every tensor-parallel rank has norms and dropout whole",
    megatrons=False,
)
SWITCHES = tuple(
    Flag(field, training.flag_of(field), text, launch=InLaunch())
    for field, text in training.SWITCH_HELP.items()
    if field != "bpipe_differing_sizes"
)  # fmt: skip
DIFFERING_SIZES = Flag(
    "bpipe_differing_sizes",
    "--bpipe-differing-sizes",
    training.SWITCH_HELP["bpipe_differing_sizes"],
    launch=InLaunch(
        help="micro-batches of one stage may save differing sizes: host buffers get a reserve and "
        "grow between iterations; a micro-batch too large for its buffer stays on its rank, and "
        "the log says so. Only a model of your own needs this flag: it is set for dropless "
        "experts, packed sequences, variable lengths and partial recomputation"
    ),
)
_TYPED = {
    "main_grads_dtype": "gradients",
    "main_params_dtype": "main weights; fp32 is stored as the 16 bits that bf16 weights lack",
    "exp_avg_dtype": "Adam's first moment",
    "exp_avg_sq_dtype": "Adam's second moment",
}
STATE_TYPES = (
    Flag(
        "use_precision_aware_optimizer",
        training.flag_of("use_precision_aware_optimizer"),
        "let Transformer Engine's Adam keep each part of its state in a type of its own",
        launch=InLaunch(),
    ),
    *(
        Flag(
            field,
            training.flag_of(field),
            f"with --use-precision-aware-optimizer: type of {_TYPED[field]} (default {training.WHOLE})",
            choices=choices,
            launch=InLaunch(default=training.WHOLE),
        )
        for field, choices in training.STATE_CHOICES.items()
    ),
    _switch(
        "optimizer_cpu_offload",
        "with --use-precision-aware-optimizer: the CPU keeps the optimizer's state and updates weights; only the "
        "transfers of this are timed",
    ),
    Flag(
        "optimizer_offload_fraction",
        training.flag_of("optimizer_offload_fraction"),
        "with --optimizer-cpu-offload: share of the parameters (default 1)",
        "X",
        values.fraction,
        launch=InLaunch(default=1.0),
    ),
)
TRAINING = group(
    "training",
    CLUSTER,
    schedules.GLOBAL_BATCH,
    ATTENTION_KIND,
    CP_COMM,
    PRECISION,
    Flag(
        "kernels",
        "--kernels",
        "kernels that decide what is saved; cpu: those of Megatron without a GPU, with nothing fused (default gpu)",
        default="gpu",
        choices=training.KERNELS,
    ),
    NO_DISTRIBUTED_OPTIMIZER,
    Flag(
        "fp8_format",
        "--fp8-format",
        "compute the layers' matrix products in FP8, in this format",
        choices=training.FP8_FORMATS,
        launch=InLaunch(),
    ),
    Flag(
        "fp8_recipe",
        "--fp8-recipe",
        f"with --fp8-format: how scales are chosen (default {training.FP8_RECIPES[0]})",
        choices=training.FP8_RECIPES,
        launch=InLaunch(default=training.FP8_RECIPES[0], choices=(*training.FP8_RECIPES, "custom")),
    ),
    _switch("fp8_param_gather", "with --fp8-format: keep and gather weights in FP8 only"),
    *STATE_TYPES,
    *SWITCHES,
    DIFFERING_SIZES,
)
EXPERTS = group(
    "experts",
    number(
        "expert",
        "--expert-model-parallel-size --ep",
        "expert-parallel size: number of devices that share a layer's experts (default 1; plan tries all)",
        launch=InLaunch(default=1),
    ),
    number(
        "expert_tensor",
        "--expert-tensor-parallel-size --etp",
        "number of devices that share each expert (default: the tensor-parallel size; in plan 1)",
        launch=InLaunch(),
    ),
    Flag(
        "dispatcher",
        "--moe-token-dispatcher-type",
        "how tokens reach their experts (default alltoall)",
        choices=DISPATCHERS,
        launch=InLaunch(default="allgather"),
    ),
    Flag(
        "capacity_factor",
        "--moe-expert-capacity-factor",
        "an expert takes at most X times its even share of tokens (default: no limit)",
        "X",
        values.factor,
        launch=InLaunch(),
    ),
    Flag(
        "pad_to_capacity",
        "--moe-pad-expert-input-to-capacity",
        "with --moe-expert-capacity-factor: pad the tokens of every expert to its capacity",
        launch=InLaunch(),
    ),
    text="for models with experts; tokens are assumed to be spread evenly",
)

# -- one configuration
# -----------------------------------------------------------------------------------------------------------------

_FROM_1 = InLaunch(default=1)
TENSOR = number(
    "tensor", "--tensor-model-parallel-size --tp", "tensor-parallel size (default 1)", "T", 1, launch=_FROM_1
)
CONTEXT = number(
    "context",
    "--context-parallel-size --cp",
    "context-parallel size: number of devices that share every sequence (default 1)",
    "C",
    default=1,
    launch=_FROM_1,
)
MICRO_BATCH = number(
    "micro_batch", "--micro-batch-size --mbs", "sequences per micro-batch (default 1)", default=1, launch=InLaunch()
)
RECOMPUTED = Flag(
    "recompute",
    "--recompute",
    f"what the backward computes again (default none): {FORMS}. selective: the attention core; full: whole layers",
    "TEXT",
    recomputation,
    default="none",
)
KEEP_WEIGHTS_HALVES = Flag(
    "keep_weights_halves",
    "--keep-weights-halves",
    "with split backwards: the weight gradients that wait for the second half, W. linear: those of linear layers; "
    "none: none, so the first half, I, is the whole backward (default linear)",
    default=training.KEPT_HALVES[0],
    choices=training.KEPT_HALVES,
    launch=InLaunch("--bpipe-keep-weights-halves", training.KEPT_HALVES[0]),
)
MEMORY = Flag(
    "memory",
    "--memory",
    "with --balance bpipe: memory budget of a device in GiB, all included, for all ranks or for each; only the "
    "excess is evicted. auto: what the device has",
    "GIB|GIB,GIB,...|auto",
    read_budget,
    launch=InLaunch(
        "--bpipe-memory",
        value="GIB|GIB,GIB,...|auto[:GIB]",
        help="with --bpipe: memory budget of a device in GiB for state, activations and transfers, "
        "for all ranks or for each; only the excess is evicted, by prediction. auto: evict as "
        "much as helps in the first iteration, measure bytes, and plan again; without a number "
        "the budget is what the device has",
    ),
)
SLICE_LENGTHS = Flag(
    "slice_lengths",
    "--slice-lengths",
    "with --slices: tokens of each slice (default even). even: equal lengths; work: equal FLOPs, so later slices "
    "are shorter; time: equal predicted time, which is launched as a list; or a list",
    "even|work|time|N,N,...",
    values.predicted_slice_lengths,
    default=EVEN,
    launch=InLaunch(
        "--bpipe-slice-lengths",
        EVEN,
        read=values.slice_lengths,
        value="even|work|N,N,...",
        help="with --bpipe-slices: tokens of each slice (default even). even: equal lengths; work: "
        "equal FLOPs, so later slices are shorter, for long sequences; or a list, such as `bpipe "
        "plan` prints",
    ),
)
LAYERS = Flag(
    "layers",
    "--layers",
    "number of layers of every stage (default: equal, or one more on stages before the last)",
    "N,N,...",
    values.layers,
)
CONFIGURATION = group(
    "configuration",
    TENSOR,
    CONTEXT,
    schedules.PIPELINE,
    MICRO_BATCH,
    RECOMPUTED,
    schedules.SCHEDULE,
    schedules.CHUNKS,
    *schedules.ORDER,
    SLICE_LENGTHS,
    KEEP_WEIGHTS_HALVES,
    schedules.BALANCE,
    schedules.BOUND,
    MEMORY,
    schedules.HOSTS,
    LAYERS,
    schedules.VOCABULARY,
    schedules.VOCABULARY_INPUT,
    NO_SEQUENCE_PARALLEL,
)
# Groups that describe what is predicted, which a launch may give.
PREDICTED = (MODEL, TRAINING, EXPERTS, CONFIGURATION)
LAUNCHED = group(
    "from a Megatron launch",
    Flag(
        "launch",
        "--launch",
        "file of a launch, as `bpipe capture` writes it ('-': standard input); of several, FILE:2 is the second",
        "FILE",
    ),
    Flag(
        REST,
        "",
        "after --: flags of pretrain_gpt.py, or a whole command such as torchrun ... script.py ...",
        "FLAGS",
        default=(),
        count="*",
    ),
    text="its flags need not be repeated; flags given here replace them",
)
PROFILE = Flag(
    "profile",
    "--profile",
    "times of stages from `bpipe profile` or your own, or sizes from `bpipe trace`; simulate predicts the rest, "
    "plan considers only what the times cover",
    "FILE",
)
MEASURED = group("measurements", PROFILE)

# Defaults of predictions.
DEFAULTS: dict[str, object] = {
    **{flag.field: flag.default for group in PREDICTED for flag in group.flags if flag.default is not None},
    "chunks": 1,
    "hosts": PAIR,
    "min_bytes": MINIMUM_BYTES,
    **{name: option.default for name, option in TAKEN.items()},
    **dict.fromkeys(("bound", "memory")),
}

# -- what a search chooses from

SEARCHED_FLAGS = group(
    "search space",
    RECOMPUTED.several(
        f"what the backward may compute again: one or more of {FORMS}, or {BLOCK}, the fewest layers of every "
        f"stage with which it fits (default {' '.join(RECOMPUTE)})",
        RECOMPUTE,
        read=read_scope,
    ),
    TENSOR.several("tensor-parallel sizes, such as 4 8 or 4,8 (default: all that divide a node)"),
    schedules.PIPELINE.several("numbers of pipeline ranks (default: all that divide the devices)"),
    schedules.CHUNKS.several("model chunks per rank (default: all that the schedules allow, up to --max-chunks)"),
    MICRO_BATCH.several("sequences per micro-batch (default: all that divide the batch)"),
    schedules.SCHEDULE.several(f"schedules to try (default {' '.join(SEARCHED)})", SEARCHED, choices=FAMILIES),
    schedules.BALANCE.several("try without balancing (none), with it (bpipe), or both (default both)", BALANCES),
    replace(
        MEMORY,
        help="memory budget of a device in GiB; balanced rows evict only the excess (default: 95 % of the "
        "device, as a fuller one may be slower than predicted)",
        value="GIB|auto",
    ),
    schedules.HOSTS.several(
        f"where the evicted activations of balanced rows may go. {schedules.HOSTS_SAID}", choices=ARRANGEMENTS
    ),
    CONTEXT.several("context-parallel sizes (default: 1, and larger ones from 32768 tokens on)"),
    schedules.SLICES.several("numbers of slices per sequence (default: 1, and 2 4 8 from 8192 tokens on)"),
    schedules.VOCABULARY.several(
        "how to split the output layer over the pipeline ranks, with the embedding whole and, where that is "
        "trained, in shards (default: none, and each that lowers the bound of the time where the output layer "
        "makes the last rank slower)",
        choices=tuple(kind.value for kind in Vocabulary),
    ),
    number("max_micro_batch", "--max-micro-batch", "largest micro-batch to consider (default 64)", default=64),
    number("max_chunks", "--max-chunks", "largest number of model chunks per rank (default 8)", "V", 8),
    Flag(
        "time_limit",
        "--time-limit",
        "processor seconds after which the search ends, if it has a row, and says how fast what it has not looked at "
        "may be (default 12)",
        "SECONDS",
        values.seconds,
        12.0,
    ),
)
