"""The table's rows on models, trainings and how they are cut: what predictions and launches have alike, and what a
search chooses from.

Names are Megatron's for what is Megatron's.
"""

from __future__ import annotations

from bpipe.balance.config import BALANCES
from bpipe.flags import schedules
from bpipe.flags.budgets import MINIMUM_BYTES, read_budget
from bpipe.flags.flag import APPENDED, Flag, Group, InLaunch
from bpipe.flags.state_types import STATE_TYPES
from bpipe.flags.values import factor, layers, positive, predicted_slice_lengths, slice_lengths, tokens
from bpipe.generate.families import FAMILIES, SEARCHED
from bpipe.ir.hosts import ARRANGEMENTS, PAIR
from bpipe.ir.layout import EVEN, Vocabulary
from bpipe.models.choices import ATTENTION, CP_COMM_TYPES, KEPT_HALVES, KERNELS, PRECISIONS
from bpipe.models.cluster import DEVICES, RACKS
from bpipe.models.flops import FORMULAS
from bpipe.models.fp8 import FORMATS, RECIPES
from bpipe.models.model import PRESETS
from bpipe.models.parts import DISPATCHERS
from bpipe.models.recompute import BLOCK, FORMS, RECOMPUTE, read_recompute, read_scope
from bpipe.models.switches import HELP, flag_of

# Where the words of a launch are kept, and by what name a parser knows that one is taken.
REST = "megatron"


def recomputation(text: str) -> str:
    """Read a text of `bpipe.models.recompute`, as short as it can be."""
    return read_recompute(text).text


def _size(field: str, default: int | None = None) -> Flag:
    return Flag(field, flag_of(field), "as Megatron's flag has it", "N", positive, launch=InLaunch(default=default))


def _switch(field: str, text: str, *, megatrons: bool = True) -> Flag:
    return Flag(field, flag_of(field), text, launch=InLaunch() if megatrons else None)


# -- the model
# ----------------------------------------------------------------------------------------------------------------------

MODEL_NAME = Flag("model", "--model", f"{', '.join(PRESETS)}, or a config.json of Hugging Face on disk", "NAME|PATH")
SEQUENCE = Flag(
    "sequence",
    "--seq-length --seq",
    "sequence length, such as 8192 or 8k (default: the model's)",
    "N",
    tokens,
    launch=InLaunch(read=positive),
)
VOCABULARY_SIZE = Flag(
    "vocabulary", "--vocab-size", "tokens of the vocabulary, padded as Megatron pads them (default: the "
    "model's)", "N", positive,
    launch=InLaunch(),
)  # fmt: skip
SIZES = (
    *map(_size, ("num_layers", "hidden_size", "num_attention_heads")),
    _size("num_query_groups", 1),
    *map(_size, ("kv_channels", "ffn_hidden_size")),
)
MODEL_SWITCHES = (
    _switch("swiglu", "the MLP is a SwiGLU"),
    _switch("rms_norm", "norms have a weight and no bias", megatrons=False),
    _switch("disable_bias_linear", "linear layers have no bias"),
    _switch("squared_relu", "the MLP is a squared ReLU, without a gate"),
    _switch("add_qkv_bias", "of linear layers those of Q, K and V have biases, with --disable-bias-linear"),
    _switch("qk_layernorm", "every head's queries and keys are normed"),
    _switch("rotary", "positions are not learned", megatrons=False),
    _switch("untie_embeddings_and_output_weights", "the output layer has weights of its own"),
    _switch("no_dropout", "no dropout, and so no masks to save", megatrons=False),
)
MODEL = Group(
    "model",
    (MODEL_NAME, SEQUENCE, VOCABULARY_SIZE, *SIZES, *MODEL_SWITCHES),
    "a preset or a config.json; sizes given besides replace its own, and do without it",
)

# -- the training

CLUSTER = Flag(
    "cluster",
    "--cluster",
    f"such as a100-80g:4x8, or a .json or .toml file; devices: {', '.join((*DEVICES, *RACKS))}; a launch with "
    f"torchrun may say NODESxGPUS",
    "DEVICE:NODESxGPUS|FILE",
    required=True,
    launch=InLaunch(
        "--bpipe-cluster",
        value="DEVICE|FILE",
        help="with --bpipe-memory: what `bpipe simulate --cluster` is told, such as h100-80g. By its links and "
        "seconds, transfers that "
        "would not end in time are issued earlier, as the command plans it, with auto by measured bytes. Without it "
        "plans are by bytes",
    ),
)
ATTENTION_KIND = Flag(
    "attention",
    "--attention",
    "default flash; it needs a GPU and Transformer Engine",
    default="flash",
    choices=ATTENTION,
)
CP_COMM = Flag(
    "cp_comm_type",
    "--cp-comm-type",
    "with --cp: how attention reaches the rest of a sequence (default p2p, a ring)",
    default=CP_COMM_TYPES[0],
    choices=CP_COMM_TYPES,
)
PRECISION = Flag(
    "precision",
    "--precision",
    "bf16 has 32-bit gradients, fp16 16-bit ones (default bf16)",
    default="bf16",
    choices=PRECISIONS,
)
NO_DISTRIBUTED_OPTIMIZER = _switch(
    "no_distributed_optimizer", "every replica holds the whole optimizer state (default: ZeRO-1)", megatrons=False
)
NO_SEQUENCE_PARALLEL = _switch(
    "no_sequence_parallel", "tensor parallelism leaves norms and dropout whole", megatrons=False
)
SWITCHES = tuple(
    Flag(field, flag_of(field), text, launch=InLaunch())
    for field, text in HELP.items()
    if field != "bpipe_differing_sizes"
)  # fmt: skip
DIFFERING_SIZES = Flag(
    "bpipe_differing_sizes",
    "--bpipe-differing-sizes",
    HELP["bpipe_differing_sizes"],
    launch=InLaunch(
        help="micro-batches of one stage may save differing sizes: host buffers get a reserve and grow between "
        "iterations, and a "
        "micro-batch that is too large for its own stays where it is, which is reported. Follows from dropless "
        "experts, packed sequences, "
        "variable lengths and partial recomputation by itself; a model of one's own has to say so"
    ),
)
TRAINING = Group(
    "training",
    (
        CLUSTER,
        schedules.GLOBAL_BATCH,
        ATTENTION_KIND,
        CP_COMM,
        PRECISION,
        Flag(
            "kernels",
            "--kernels",
            "cpu: what Megatron saves without a GPU, where nothing is fused (default gpu)",
            default="gpu",
            choices=KERNELS,
        ),
        NO_DISTRIBUTED_OPTIMIZER,
        Flag(
            "fp8_format", "--fp8-format", "products of the layers' matrices in FP8", choices=FORMATS, launch=InLaunch()
        ),
        Flag(
            "fp8_recipe",
            "--fp8-recipe",
            f"with --fp8-format: where scales come from (default {RECIPES[0]})",
            choices=RECIPES,
            launch=InLaunch(default=RECIPES[0], choices=(*RECIPES, "custom")),
        ),
        _switch("fp8_param_gather", "with --fp8-format: weights are kept and gathered in FP8 alone"),
        *STATE_TYPES,
        *SWITCHES,
        DIFFERING_SIZES,
        Flag(
            "flops_formula",
            "--flops-formula",
            "whose FLOPs MFU counts (default megatron)",
            default="megatron",
            choices=FORMULAS,
        ),
    ),
)
EXPERTS = Group(
    "experts",
    (
        Flag(
            "expert",
            "--expert-model-parallel-size --ep",
            "expert parallel: so many devices share a layer's experts (default 1; plan tries all)",
            "N",
            positive,
            launch=InLaunch(default=1),
        ),
        Flag(
            "expert_tensor",
            "--expert-tensor-parallel-size --etp",
            "so many devices divide each expert (default: tensor parallel; plan 1)",
            "N",
            positive,
            launch=InLaunch(),
        ),
        Flag(
            "dispatcher",
            "--moe-token-dispatcher-type",
            "how tokens come to experts (default alltoall)",
            choices=DISPATCHERS,
            launch=InLaunch(default="allgather"),
        ),
        Flag(
            "capacity_factor",
            "--moe-expert-capacity-factor",
            "no expert takes more than so many times its even share",
            "X",
            factor,
            launch=InLaunch(),
        ),
        Flag("pad_to_capacity", "--moe-pad-expert-input-to-capacity", "and each takes as many", launch=InLaunch()),
    ),
    "of a model that has them; their loads are taken to be even",
)

# -- one configuration
# -----------------------------------------------------------------------------------------------------------------

TENSOR = Flag(
    "tensor",
    "--tensor-model-parallel-size --tp",
    "tensor parallel (default 1)",
    "T",
    positive,
    default=1,
    launch=InLaunch(default=1),
)
CONTEXT = Flag(
    "context",
    "--context-parallel-size --cp",
    "context parallel: so many devices have a part of every sequence each (default 1)",
    "C",
    positive,
    default=1,
    launch=InLaunch(default=1),
)
MICRO_BATCH = Flag(
    "micro_batch",
    "--micro-batch-size --mbs",
    "sequences a micro-batch (default 1)",
    "N",
    positive,
    default=1,
    launch=InLaunch(),
)
RECOMPUTED = Flag(
    "recompute",
    "--recompute",
    f"{FORMS}: what is computed again in the backward. selective: the attention core; full: whole layers (default "
    f"none)",
    "TEXT",
    recomputation,
    default="none",
)
KEEP_WEIGHTS_HALVES = Flag(
    "keep_weights_halves",
    "--keep-weights-halves",
    "where backwards are split, what is put off: the weights' gradients of linear layers, or none, so that W runs "
    "with I (default linear)",
    default=KEPT_HALVES[0],
    choices=KEPT_HALVES,
    launch=InLaunch("--bpipe-keep-weights-halves", KEPT_HALVES[0]),
)
MEMORY = Flag(
    "memory",
    "--memory",
    "with --balance bpipe: all that a device may hold, for all ranks or each; only what must leaves. auto: what the "
    "device has",
    "GIB|GIB,GIB,...|auto",
    read_budget,
    launch=InLaunch(
        "--bpipe-memory",
        value="GIB|GIB,GIB,...|auto[:GIB]",
        help="with --bpipe: all that a device may hold, state, activations and what comes and goes, for all ranks or "
        "each; only what must "
        "leaves. By prediction; auto: the first iteration sends as much as helps, then bytes are measured and it is "
        "planned anew. auto "
        "alone: what the device has",
    ),
)
SLICE_LENGTHS = Flag(
    "slice_lengths",
    "--slice-lengths",
    "with --slices: how many tokens each slice has. even: as many as the others. work: ever fewer, so that all have as "
    "many FLOPs, although later ones attend to more. time: so that all take as long, by prediction; what launches it "
    "is a list. Or a list (default even)",
    "even|work|time|N,N,...",
    predicted_slice_lengths,
    default=EVEN,
    launch=InLaunch(
        "--bpipe-slice-lengths",
        EVEN,
        read=slice_lengths,
        value="even|work|N,N,...",
        help="with --bpipe-slices: how many tokens each slice has. even: as many as the others. work: ever fewer, so "
        "that all compute as long, although later ones attend to more; for long sequences. Or a list, such as `bpipe "
        "plan` writes",
    ),
)
LAYERS = Flag(
    "layers",
    "--layers",
    "layers of every stage (default: equal, else one more on those before the last)",
    "N,N,...",
    layers,
)
CONFIGURATION = Group(
    "configuration",
    (
        TENSOR,
        CONTEXT,
        schedules.PIPELINE,
        MICRO_BATCH,
        RECOMPUTED,
        schedules.SCHEDULE,
        schedules.CHUNKS,
        schedules.GROUP,
        schedules.DELAY,
        schedules.SLICES,
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
    ),
)
LAUNCHED = Group(
    "from a launch of Megatron",
    (
        Flag(
            "from_script",
            "--from-script",
            "a bash script that starts the training, read without running it ('-': standard input)",
            "FILE",
        ),
        Flag(
            "set",
            "--set",
            "a variable of that script, any number of times; the environment is not looked at",
            "NAME=VALUE",
            count=APPENDED,
        ),
        Flag(
            REST,
            "",
            "after --: flags of pretrain_gpt.py, or a whole command: torchrun ... script.py ...",
            "FLAGS",
            default=(),
            count="*",
        ),
    ),
    "what it says need not be said again; what is said here replaces it",
)
CALIBRATION = Flag(
    "calibration", "--calibration", "how far this cluster is from predictions, as `bpipe calibrate` found it", "FILE"
)
KERNEL_TIMES = Flag(
    "kernel_times",
    "--kernel-times",
    "seconds of single kernels, as `bpipe profile --time-kernels` measured them, in place of formulas",
    "FILE",
    count="+",
)
PROFILE = Flag(
    "profile",
    "--profile",
    "seconds measured by `bpipe profile` or given; simulate predicts the rest, plan considers only what it covers",
    "FILE",
)
MEASURED = Group("measured", (CALIBRATION, KERNEL_TIMES, PROFILE))

# What is predicted where nobody says it.
DEFAULTS: dict[str, object] = {
    **{
        flag.field: flag.default
        for group in (MODEL, TRAINING, EXPERTS, CONFIGURATION)
        for flag in group.flags
        if flag.default is not None
    },
    "chunks": 1,
    "hosts": PAIR,
    "delay": 0,
    "slices": 1,
    "min_bytes": MINIMUM_BYTES,
    **dict.fromkeys(("bound", "memory", "group")),
}

# -- what a search chooses from

SEARCHED_FLAGS = Group(
    "search",
    (
        RECOMPUTED.several(
            f"what to recompute, each one of {FORMS}, or {BLOCK}: of every stage the fewest layers with which it fits "
            f"(default "
            f"{' '.join(RECOMPUTE)})",
            RECOMPUTE,
            read=read_scope,
        ),
        TENSOR.several("tensor parallel, such as 4 8 or 4,8 (default: all that divide a node)"),
        schedules.PIPELINE.several("pipeline ranks (default: all that divide the devices)"),
        schedules.CHUNKS.several("model chunks per rank (default: all that the schedules take, up to --max-chunks)"),
        MICRO_BATCH.several("sequences a micro-batch (default: all that divide the batch)"),
        schedules.SCHEDULE.several(f"default {' '.join(SEARCHED)}", SEARCHED, choices=FAMILIES),
        schedules.BALANCE.several("default both", BALANCES),
        MEMORY,
        schedules.HOSTS.several(
            f"of balanced rows, where what leaves may go: {schedules.HOSTS_SAID}", choices=ARRANGEMENTS
        ),
        CONTEXT.several(
            "how many devices may have a part of a sequence each (default 1, of sequences from 32768 on more)"
        ),
        schedules.SLICES.several(
            "into how many slices each sequence may be cut (default 1, of sequences from 8192 on 1 2 4 8)"
        ),
        schedules.VOCABULARY.several(
            "whether the output layer is in shards on all pipeline ranks, and by which algorithm, with the embedding "
            "and without where "
            "that is trained (default: none, and each that lowers the bound of the time where the last rank computes "
            "longer than others)",
            choices=tuple(one.value for one in Vocabulary),
        ),
        Flag(
            "max_micro_batch",
            "--max-micro-batch",
            "largest micro-batch to consider (default 64)",
            "N",
            positive,
            default=64,
        ),
        Flag("max_chunks", "--max-chunks", "most model chunks per rank (default 8)", "V", positive, default=8),
        Flag(
            "even_layers",
            "--even-layers",
            "no unequal stages where the layers do not divide (default: those before the last get one more)",
        ),
    ),
)
