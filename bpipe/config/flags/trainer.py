"""Rows of the table that only the trainer has: the groups of all `--bpipe-...`, and Megatron's own that are read.

Megatron's have its defaults and choices; a test holds them to the parser of the installed one.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

from bpipe.config.flags import configurations, schedules
from bpipe.config.flags.flag import Flag, InLaunch, Read, group
from bpipe.config.flags.values import factor, iterations, positive, seconds
from bpipe.placement import PLACEMENTS
from bpipe.transport import AUTO, NAMES
from bpipe.transport.config import TransferConfig


def _flag(
    name: str,
    text: str,
    value: str = "",
    read: Callable[[str], object] | None = None,
    default: object = None,
    choices: Collection[str] | None = None,
) -> Flag:
    """Return a row without a name in commands."""
    launch = InLaunch(name, default, is_read=name in ("--bpipe", "--bpipe-min-bytes"))
    field = name[2:].replace("-", "_").removeprefix("bpipe_")
    return Flag(field, "", text, value, read, default, choices, launch=launch)


BPIPE = _flag(
    "--bpipe",
    "balance activation memory over the pipeline stages: early stages send activations of some micro-batches to "
    "their partner stage, and load them back before their backward. Changes no result",
)
MIN_BYTES = _flag(
    "--bpipe-min-bytes",
    "leave saved tensors smaller than this where they are: moving them costs more than it frees (default "
    f"{TransferConfig.minimum_bytes})",
    "BYTES",
    positive,
    TransferConfig.minimum_bytes,
)
TRAINER = (
    group(
        "balancing",
        BPIPE,
        configurations.MEMORY,
        configurations.CLUSTER,
        schedules.BOUND,
        schedules.HOSTS,
        _flag(
            "--bpipe-transport",
            f"how activations travel between the two ranks of a pair (default {AUTO}). nccl, gloo: both ranks "
            "send and receive. peer: the evicting rank alone copies, into memory of its partner on the same "
            "machine. host: it copies into its own node's CPU memory. auto: whichever is measured as the "
            "fastest for the pair at the start",
            default=AUTO,
            choices=(AUTO, *NAMES),
        ),
        _flag(
            "--bpipe-placement",
            "adjacent: put the two stages of a pair on GPUs of one node where possible; none: keep Megatron's "
            f"own rank order (default {PLACEMENTS[0]})",
            default=PLACEMENTS[0],
            choices=PLACEMENTS,
        ),
        MIN_BYTES,
        configurations.DIFFERING_SIZES,
        _flag(
            "--bpipe-timeout",
            f"seconds after which a transfer (default {TransferConfig.timeout_s:g}) or a message of this project's own loop "
            "(default: Megatron's --distributed-timeout-minutes) ends the run with an error that names it. Not "
            "for transfers on GPUs: there NCCL's watchdog ends the run and names the process group, and copies "
            "by peer and host have no limit",
            "SECONDS",
            seconds,
        ),
    ),
    group(
        "schedule",
        schedules.SCHEDULE,
        *schedules.ORDER,
        configurations.SLICE_LENGTHS,
        schedules.COSTS,
        schedules.HOP,
        configurations.KEEP_WEIGHTS_HALVES,
        schedules.VOCABULARY,
        schedules.VOCABULARY_INPUT,
        _flag(
            "--bpipe-executor",
            "use this project's own loop also for schedules that Megatron's own loops run. Changes no result",
        ),
    ),
    group(
        "recording",
        _flag(
            "--bpipe-report",
            "record the run in this folder, for `bpipe report DIR`: what every stage really held and what was "
            "predicted, each iteration's exact loss and gradient norm, and some iterations action by action. "
            "Works with and without --bpipe",
            "DIR",
        ),
        _flag(
            "--bpipe-report-iterations",
            "iterations to record action by action: a number, or two with a hyphen between them (default: the "
            "third to the fifth that this program trains)",
            "FIRST-LAST",
        ),
        _flag(
            "--bpipe-peak-tflops",
            "peak dense 16-bit TFLOP/s of one device, for the MFU (default: from a table of devices)",
            "TFLOPS",
            factor,
        ),
    ),
    group(
        "debugging",
        _flag(
            "--bpipe-strict",
            "also refuse guarded features: they should work by design, but never ran on this hardware, and are "
            "checked in the first iterations",
        ),
        _flag(
            "--bpipe-share-gpus",
            "to try everything on fewer GPUs than ranks: the ranks of one node share its GPUs, round robin, and "
            "NCCL talks through loopback sockets. Results are as with a GPU each; no time means anything. Works "
            "with and without --bpipe",
        ),
        _flag(
            "--bpipe-verify",
            "in the first N iterations, compare checksums of everything that is evicted: before it is sent, "
            "before its memory is freed, and before it is used again (default: 2 if anything is guarded, else "
            "0). A difference is named, and ends the run before weights are updated",
            "N|all",
            iterations,
        ),
        _flag(
            "--bpipe-poison",
            "for debugging: fill memory with NaN before it is freed, and before activations are loaded into "
            "it, so that a missing wait shows",
        ),
        _flag("--bpipe-sync-transfers", "for measuring what overlap gains: wait for every transfer where it is issued"),
    ),
)


# What Megatron's parser calls otherwise than the flag.
ARGUMENTS = {
    "--fp8-format": "fp8",
    "--fp4-format": "fp4",
    "--microbatch-group-size-per-virtual-pipeline-stage": "microbatch_group_size_per_vp_stage",
}
# Flags that make an argument of another name false.
SWITCHED_OFF = {
    "--disable-bias-linear": "add_bias_linear",
    "--disable-mamba-mem-eff-path": "use_mamba_mem_eff_path",
    "--no-bias-dropout-fusion": "bias_dropout_fusion",
    "--no-bias-gelu-fusion": "bias_gelu_fusion",
    "--no-bias-swiglu-fusion": "bias_swiglu_fusion",
    "--no-clone-scatter-output-in-embedding": "clone_scatter_output_in_embedding",
    "--no-fp8-wgrad": "fp8_wgrad",
    "--no-masked-softmax-fusion": "masked_softmax_fusion",
    "--no-overlap-p2p-communication": "overlap_p2p_comm",
    "--no-rope-fusion": "apply_rope_fusion",
}


def argument_of(flag: str) -> str:
    """Return the name that Megatron's parser gives the value of a flag."""
    return ARGUMENTS.get(flag, flag[2:].replace("-", "_"))


_BACKENDS = ("flash", "fused", "unfused", "local", "auto")
_IMPLEMENTATIONS = ("local", "transformer_engine", "inference_optimized")
_POSITIONS = ("learned_absolute", "rope", "yarn", "mrope", "relative", "none")


def _of(
    read: Read | None,
    *names: str,
    default: object = None,
    choices: Sequence[str] | None = None,
    count: str | None = None,
) -> list[Flag]:
    """Return rows that are read in one way."""
    return [
        Flag(name[2:].replace("-", "_"), "", "", "VALUE", read, None, choices, count, InLaunch(name, default))
        for name in names
    ]


def _switches(*names: str) -> list[Flag]:
    return [Flag(name[2:].replace("-", "_"), "", "", launch=InLaunch(name)) for name in names]


MEGATRON = (
    *_of(positive, "--padded-vocab-size", "--max-position-embeddings", "--num-layers-per-virtual-pipeline-stage"),
    *_of(positive, "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"),
    *_of(positive, "--recompute-num-layers"),
    *_of(positive, "--make-vocab-size-divisible-by", default=128),
    *_of(str, "--pipeline-model-parallel-layout"),
    *_of(str, "--normalization", default="LayerNorm", choices=("LayerNorm", "RMSNorm")),
    *_of(str, "--position-embedding-type", default="learned_absolute", choices=_POSITIONS),
    *_of(float, "--attention-dropout", "--hidden-dropout", default=0.1),
    *_switches("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
    *_switches("--group-query-attention", "--use-rotary-position-embeddings"),
    *_of(str, "--cp-comm-type", default=["p2p"], count="+"),
    *_of(str, "--attention-backend", default="auto", choices=_BACKENDS),
    *_of(str, "--transformer-impl", default="transformer_engine", choices=_IMPLEMENTATIONS),
    *_of(str, "--cuda-graph-impl", default="none", choices=("none", "local", "transformer_engine", "full_iteration")),
    *_of(str, "--recompute-granularity", choices=("full", "selective")),
    *_of(str, "--recompute-method", choices=("uniform", "block")),
    *_of(str, "--recompute-modules", count="+"),
    *_switches("--recompute-activations", "--sequence-parallel", "--fp16", "--bf16", "--use-distributed-optimizer"),
    *_switches("--use-flash-attn"),
    *_switches("--sft", "--dataloader-inter-document-masking", "--apply-query-key-layer-scaling"),
    # Experts.
    *_of(positive, "--num-experts", "--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size"),
    *_of(positive, "--moe-router-topk", default=2),
    *_of(str, "--moe-router-score-function", default="softmax", choices=("softmax", "sigmoid", "sqrtsoftplus")),
    *_of(str, "--moe-layer-freq", default=1),
    *_switches("--moe-shared-expert-gate", "--moe-grouped-gemm"),
    # Latent attention, and windows.
    *_switches("--multi-latent-attention"),
    *_of(positive, "--q-lora-rank"),
    *_of(positive, "--kv-lora-rank", default=32),
    *_of(positive, "--qk-head-dim", "--v-head-dim", default=128),
    *_of(positive, "--qk-pos-emb-head-dim", default=64),
    *_of(str, "--window-size", "--window-attn-skip-freq"),
    # Hybrid models.
    *_of(str, "--hybrid-layer-pattern", "--hybrid-override-pattern"),
    *_of(str, "--spec", count="*"),
    *_of(positive, "--mamba-state-dim", default=128),
    *_of(positive, "--mamba-head-dim", default=64),
    *_of(positive, "--mamba-num-groups", default=8),
    *_of(positive, "--mamba-num-heads"),
    *_switches("--is-hybrid-model"),
)

_ROWS = {
    flag.in_launch: flag
    for flags in (
        MEGATRON,
        (BPIPE, MIN_BYTES),
        *(rows.flags for rows in (*configurations.PREDICTED, *TRAINER)),
    )
    for flag in flags
    if flag.launch is not None
}
_BY_FIELD = {flag.field: flag for flag in _ROWS.values()}
# Rows that are read of a launch, as Megatron's parser has them, by their names there.
READ: dict[str, Flag] = {
    name: flag.of_launch for name, flag in _ROWS.items() if flag.launch is not None and flag.launch.is_read
}
# By the field of a row, the name that Megatron's parser gives its value.
SAME = {flag.field: READ[name].field for name, flag in _ROWS.items() if name in READ}


def words(values: Mapping[str, object]) -> list[str]:
    """Write values, by the fields of the table, as flags in this order. None and False give nothing."""
    written: list[str] = []
    for field, value in values.items():
        flag = _BY_FIELD[field]
        if value is None or value is False:
            continue
        several = value if isinstance(value, tuple) and flag.count is not None else () if flag.is_switch else (value,)
        written += [flag.in_launch, *map(str, several)]
    return written
