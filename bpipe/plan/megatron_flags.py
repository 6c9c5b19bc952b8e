"""Write a configuration as Megatron's flags, those of 0.19 and this project's own.

In: a Setup. Out: a list of arguments.

Says nothing of data, learning rate or iterations: those are the user's. Imports no Megatron; a test holds the flags to
the real parser.
"""

from __future__ import annotations

import math

from bpipe.build import BALANCES
from bpipe.generate.families import default_family
from bpipe.ir.hosts import PAIR
from bpipe.models.layout import Setup
from bpipe.models.switches import flag_of
from bpipe.plan.expert_flags import flags_of_parts
from bpipe.plan.fit import budget_text
from bpipe.plan.hybrid_flags import flags_of_hybrid
from bpipe.plan.layer_split import split_flags
from bpipe.plan.recompute_flags import recompute_flags

# Megatron's --make-vocab-size-divisible-by where nobody says another.
_PADDED = 128


def megatron_flags(setup: Setup) -> list[str]:
    """Return the flags to add to the launch of `pretrain_gpt.py`."""
    return [*_model(setup), *flags_of_parts(setup), *flags_of_hybrid(setup), *_parallel(setup), *_memory(setup)]


def _model(setup: Setup) -> list[str]:
    model = setup.model
    flags = [
        "--num-layers",
        model.num_layers,
        "--hidden-size",
        model.hidden_size,
        "--num-attention-heads",
        model.num_attention_heads,
    ]
    flags += ["--ffn-hidden-size", model.ffn_hidden_size, "--kv-channels", model.kv_channels]
    if model.num_query_groups != model.num_attention_heads:
        flags += ["--group-query-attention", "--num-query-groups", model.num_query_groups]
    flags += ["--seq-length", setup.sequence, "--max-position-embeddings", setup.sequence]
    flags += ["--normalization", "RMSNorm" if model.rms_norm else "LayerNorm"]
    flags += [
        "--position-embedding-type",
        "learned_absolute" if model.learned_positions else "none" if model.no_positions else "rope",
    ]
    switches = {
        "--swiglu": model.gated,
        "--squared-relu": model.squared_relu,
        "--disable-bias-linear": not model.linear_bias,
        "--add-qkv-bias": model.qkv_bias,
        "--qk-layernorm": model.qk_norm,
        "--untie-embeddings-and-output-weights": not model.tied_embedding,
    }
    flags += [flag for flag, wanted in switches.items() if wanted]
    if not model.dropout:
        flags += ["--attention-dropout", "0.0", "--hidden-dropout", "0.0"]
    return [str(flag) for flag in flags]


def _parallel(setup: Setup) -> list[str]:
    flags = ["--tensor-model-parallel-size", setup.tensor, "--pipeline-model-parallel-size", setup.pipeline]
    if setup.context > 1:
        flags += ["--context-parallel-size", setup.context, "--cp-comm-type", setup.cp_comm_type]
    flags += ["--micro-batch-size", setup.micro_batch, "--global-batch-size", setup.global_batch]
    if setup.tensor > 1 and setup.sequence_parallel:
        flags.append("--sequence-parallel")
    # A hybrid model's pattern says it.
    flags += split_flags(setup.layers, setup.pipeline) if setup.model.hybrid is None else []
    if setup.balance != "none":
        flags.append("--bpipe")
    return [str(flag) for flag in (*flags, *hosts_flags(setup), *schedule_flags(setup))]


def hosts_flags(setup: Setup) -> list[str]:
    """Return flags of hosts and bounds; none for pairs that hold as little as they can."""
    if setup.balance == "none":
        return []
    flags = [] if setup.how.hosts == PAIR else ["--bpipe-hosts", setup.how.hosts]
    flags += [] if setup.how.bounds is None else ["--bpipe-bound", ",".join(map(str, setup.how.bounds))]
    return flags + ([] if setup.how.activation_budget is None else ["--bpipe-memory", budget_text(setup.limit_bytes)])


def schedule_flags(setup: Setup) -> list[str]:
    """Return flags of a schedule that Megatron's own loops do not run, and of what the trainer must be told; none
    otherwise."""
    flags: list[object] = []
    if is_unproven(setup):
        flags += ["--bpipe-unproven", "fp8"]
    if setup.is_sharded:
        flags += ["--bpipe-vocabulary", setup.vocabulary_parallel]
        flags += ["--bpipe-vocabulary-input"] * setup.input_shards
        # Megatron pads to a multiple of 128 a tensor-parallel rank, of which not every number of ranks has equal parts.
        if _PADDED % setup.pipeline:
            flags += ["--make-vocab-size-divisible-by", math.lcm(_PADDED, setup.pipeline)]
    if setup.schedule == default_family(setup.chunks):
        return [str(flag) for flag in flags]
    flags += ["--bpipe-schedule", setup.schedule]
    if setup.group is not None:
        flags += ["--bpipe-group", setup.group]
    if setup.delay:
        flags += ["--bpipe-delay", setup.delay]
    if setup.splits and not setup.keeps_halves:
        flags += ["--bpipe-keep-weights-halves", setup.keep_weights_halves]
    return [str(flag) for flag in flags]


def is_unproven(setup: Setup) -> bool:
    """Return whether the trainer wants to be told to try it: FP8 where it moves activations or runs its own loop."""
    ours = setup.balance != BALANCES[0] or setup.is_sharded or setup.schedule != default_family(setup.chunks)
    return setup.fp8 is not None and ours


def _memory(setup: Setup) -> list[str]:
    flags = recompute_flags(setup.recomputed)
    flags += ["--attention-backend", "flash" if setup.attention == "flash" else "unfused"]
    if setup.precision != "fp32":
        flags.append(f"--{setup.precision}")
    if setup.fp8 is not None:
        flags += ["--fp8-format", setup.fp8.format, "--fp8-recipe", setup.fp8.recipe]
        flags += ["--fp8-param-gather"] * setup.fp8.param_gather
    if setup.distributed_optimizer:
        flags.append("--use-distributed-optimizer")
    # Of one tensor-parallel rank there is nothing to overlap, and Megatron refuses to.
    said = (flag for flag in setup.switches.flags if setup.tensor > 1 or flag != flag_of("tp_comm_overlap"))
    return [*flags, *said]
