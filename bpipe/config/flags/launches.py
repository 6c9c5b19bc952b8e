"""Rows of the table that a launch of Megatron has: those that only it has, with Megatron's own defaults and choices, and
all that are read of a launch or written for one.

A test holds the rows to the parser of the installed Megatron.
"""

from collections.abc import Mapping, Sequence

from bpipe.config.flags.configurations import CONFIGURATION, EXPERTS, MODEL, TRAINING
from bpipe.config.flags.flag import Flag, InLaunch, Read
from bpipe.config.flags.trainer import BPIPE, MIN_BYTES, TRAINER
from bpipe.config.flags.values import positive

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
        *(group.flags for group in (MODEL, TRAINING, EXPERTS, CONFIGURATION, *TRAINER)),
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
