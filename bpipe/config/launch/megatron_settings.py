"""Settings of a Megatron training, as far as predictions depend on them, from its flags or its parsed arguments.

Read are the flags in `config.flags.trainer.READ`. Of the others, tables say which are refused, or without
influence. Megatron's names are in `megatron_flags.txt`, one per line: those of the version that this package
installs, to whose parser a test holds them and the tables. Imports no Megatron.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from typing import Any

from bpipe.config.flags.flag import Flag, Options, parser_of_launch
from bpipe.config.flags.trainer import READ, SWITCHED_OFF, TRAINER, argument_of
from bpipe.config.flags.values import MemoryBudget
from bpipe.names import nearest

# Types of the optimizer's state, which Megatron's validation makes types of torch.
_TYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.uint8": "fp8"}


@dataclass(frozen=True)
class MegatronSettings:
    """Settings of one training.

    Attributes:
        values: By the names of Megatron's parser, the values of the flags in `READ`.
        others: Further flags, each with its first value or "".
    """

    values: Options
    others: tuple[tuple[str, str], ...]

    def __hash__(self) -> int:
        return hash((repr(self.values), self.others))

    @classmethod
    def from_flags(cls, flags: Sequence[str]) -> MegatronSettings:
        """Parse a command line's flags. Raises ValueError for what Megatron's parser would refuse."""
        values, rest = parser_of_launch(READ.values()).parse_known_args(flags, Options())
        others: list[tuple[str, str]] = []
        for word in rest:
            if word.startswith("--"):
                flag, _, value = word.partition("=")
                others.append((flag, value))
            elif not others:
                raise ValueError(f"{word!r} comes before any flag")
            elif not others[-1][1]:
                others[-1] = (others[-1][0], word)
        return cls(values, tuple(others))

    @classmethod
    def from_args(cls, args: object) -> MegatronSettings:
        """Read Megatron's arguments, validated or not. Those that are missing have Megatron's defaults."""
        values = Options(**{flag.field: _value(flag, args) for flag in READ.values()})
        others = {flag: getattr(args, argument_of(flag), None) for flag in REFUSED if flag not in SWITCHED_OFF}
        for flag, size in _sizes_by_default(values):
            if others[flag] == size:
                others[flag] = None
        others |= {flag: True for flag in REFUSED if _is_switched_off(flag, args)}
        _undo_validation(values, args)
        texts = {flag: "" if value is True else _text(value) for flag, value in others.items() if value}
        return cls(values, tuple(texts.items()))

    def without(self, flags: Collection[str]) -> MegatronSettings:
        """Return the settings without some of the `others`."""
        return MegatronSettings(self.values, tuple(entry for entry in self.others if entry[0] not in flags))


def _sizes_by_default(values: Options) -> tuple[tuple[str, int], ...]:
    """Return refused flags that Megatron's validation sets to a parallel size, and that size."""
    tensor = values.tensor_model_parallel_size
    return (
        (GROUP, values.pipeline_model_parallel_size),
        ("--tensor-parallel-num-weight-shards", tensor),
        ("--expert-tensor-parallel-num-weight-shards", values.expert_tensor_parallel_size or tensor),
    )


def _is_switched_off(flag: str, args: object) -> bool:
    return flag in SWITCHED_OFF and getattr(args, SWITCHED_OFF[flag], True) is False


def _text(value: object) -> str:
    """Write a value as its flag has it: an enumeration's `AttnBackend.flash` by its name."""
    text = str(value)
    return _TYPES.get(text) or re.sub(r"^[A-Z]\w*\.", "", text)


def _value(flag: Flag, args: object) -> Any:
    """Return the value of a flag as our parser of launches would read it."""
    if flag.names in SWITCHED_OFF:
        return _is_switched_off(flag.names, args)
    value = getattr(args, argument_of(flag.names), None)
    value = flag.default if value is None else value
    if flag.is_switch:
        return bool(value)
    if value is None or isinstance(value, MemoryBudget):
        return value
    if flag.count is not None:
        return [str(word) for word in value] if isinstance(value, (list, tuple)) else [str(value)]
    text = ",".join(map(str, value)) if isinstance(value, tuple) else _text(value)
    if flag.choices is not None and text not in flag.choices:
        raise ValueError(f"{flag.names} {text[:40]}: choose from {', '.join(flag.choices)}")
    return text if flag.read is None else flag.read(text)


def _undo_validation(values: Options, args: object) -> None:
    """Set back what validation derives from the flags and would be read as another one."""
    pipes = getattr(args, "bpipe_num_pipes", 1)
    pipes = pipes if isinstance(pipes, int) and pipes > 0 else 1
    values.pipeline_model_parallel_size *= pipes
    if values.num_virtual_stages_per_pipeline_rank is not None:
        values.num_virtual_stages_per_pipeline_rank //= pipes
    if values.bf16:
        # Implied, and without an effect on predictions.
        values.accumulate_allreduce_grads_in_fp32 = False
    if not values.disable_bias_linear:
        # All linear layers have biases.
        values.add_qkv_bias = False
    if values.hybrid_layer_pattern is not None:
        values.hybrid_override_pattern = None
    if getattr(args, "virtual_pipeline_model_parallel_size", None) is None:
        # Megatron itself switches the overlap off.
        values.no_overlap_p2p_communication = False


# Similarity from which a flag is taken for a mistyped one. Additions of scripts and of newer Megatrons are less similar.
_TYPO, _TYPO_OF_OURS = 0.87, 0.66
_MOST_FLAGS = 20


@cache
def names() -> frozenset[str]:
    of_megatron = resources.files("bpipe.config.launch").joinpath("megatron_flags.txt").read_text(encoding="utf-8")
    return frozenset((*of_megatron.split(), *(flag.in_launch for group in TRAINER for flag in group.flags)))


def unknown_flags(flags: Sequence[str]) -> list[str]:
    """Return the names of flags that neither Megatron nor this project has. Raises ValueError for one like ours."""
    flag_names = dict.fromkeys(word.partition("=")[0] for word in flags if word.startswith("--"))
    unknown = [flag for flag in flag_names if flag not in names()]
    for flag in unknown:
        if flag.startswith("--bpipe-"):
            meant = nearest(flag, [name for name in names() if name.startswith("--bpipe")], _TYPO_OF_OURS)
            raise ValueError(f"unknown flag {flag[:60]}{meant and ','}{meant or ': leave it out'}")
    return unknown


def unknown_note(unknown: Sequence[str]) -> str:
    """Return the warning of flags that may be the training script's own."""
    shown = []
    for flag in unknown[:_MOST_FLAGS]:
        meant = nearest(flag, sorted(names()), _TYPO).strip()
        shown.append(f"{flag[:60]} ({meant})" if meant else flag[:60])
    shown += [f"{len(unknown) - _MOST_FLAGS} more"] if unknown[_MOST_FLAGS:] else []
    them = "them" if unknown[1:] else "it"
    return f"Megatron's parser does not know {', '.join(shown)}; ignore this if your script adds {them}"


def without(unknown: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Return the flags of a launch without unknown ones and their values."""
    kept: list[str] = []
    is_known = True
    for word in flags:
        if word.startswith("--"):
            is_known = word.partition("=")[0] not in unknown
        kept += [word] if is_known else []
    return kept


_OFFLOAD, _FSDP = "offloading", "sharding by FSDP"
_LOW = "4-bit training, or 8-bit training of only some layers or of more than matrices"
GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
GRAPHS = "CUDA graphs, which keep what they capture in memory of their own"
# Values with which a refused flag may be given; further ones by flag.
_NEUTRAL = ("0", "None", "none")
_NEUTRAL_OF = {
    "--tensor-parallel-num-weight-shards": "1",
    "--expert-tensor-parallel-num-weight-shards": "1",
    "--num-distributed-optimizer-instances": "1",
    "--optimizer": "adam",
    "--muon-scalar-optimizer": "adam",
    "--cross-entropy-fusion-impl": "native",
    "--mlp-chunks-for-training": "1",
}
REFUSED = {
    "--moe-layer-recompute": "an old name of the supported --recompute-granularity selective --recompute-modules moe",
    "--moe-latent-size": "experts of a smaller hidden size",
    "--expert-tensor-parallel-num-weight-shards": "weights sharded beyond tensor parallelism",
    **dict.fromkeys(("--cpu-offloading-num-layers", "--fine-grained-activation-offloading"), _OFFLOAD),
    **dict.fromkeys(("--use-megatron-fsdp", "--use-torch-fsdp2"), _FSDP),
    **dict.fromkeys(("--fp4-format", "--first-last-layers-bf16", "--fp8-output-proj"), _LOW),
    "--hybrid-context-parallel": "context parallelism whose size differs by sequence",
    "--tensor-parallel-num-weight-shards": "weights sharded beyond tensor parallelism",
    "--distribute-saved-activations": "distributed saved activations",
    **dict.fromkeys(("--experimental-attention-variant", "--use-kitchen-attention"), "another attention"),
    "--qk-l2-norm": "norms of queries and keys that compute in 32 bit",
    "--mtp-hybrid-override-pattern": "multi-token prediction by hybrid layers",
    **dict.fromkeys(
        ("--heterogeneous-layers-config-path", "--heterogeneous-layers-config-encoded-json"),
        "layers of different kinds",
    ),
    "--disable-mamba-mem-eff-path": "kernels of Mamba layers that keep more",
    "--attention-output-gate": "a gate after attention",
    "--quick-geglu": "this activation function",
    "--use-checkpoint-args": "sizes from a checkpoint",
    "--yaml-cfg": "flags from a file",
    GROUP: "larger groups of micro-batches",
    "--optimizer": "an optimizer other than Adam, whose state has another size",
    "--muon-scalar-optimizer": "Muon, whose state has another size",
    **dict.fromkeys(("--enable-cuda-graph", "--external-cuda-graph", "--optimizer-cuda-graph"), GRAPHS),
    "--cross-entropy-fusion-impl": "another loss, which keeps no softmax in 32 bit",
    "--fp16-lm-cross-entropy": "a loss in 16 bit",
    # `MLP.forward` adds an offset to the one half, which makes a tensor of it, too.
    "--no-bias-swiglu-fusion": "a SwiGLU of separate kernels, which keep two more tensors inside the MLP",
    "--fp32-residual-connection": "activations between layers in 32 bit",
    "--defer-embedding-wgrad-compute": "an output layer that keeps the logits' gradients of several micro-batches",
    "--overlap-moe-expert-parallel-comm": "forwards and backwards of two micro-batches at once",
    "--moe-paged-stash": "experts' inputs in pages",
    "--moe-expert-rank-capacity-factor": "a budget of tokens for all experts of a device",
    "--moe-ncclep-static-shape": "experts' inputs in a buffer for the largest of them",
    "--mlp-chunks-for-training": "an MLP in parts of the sequence",
    "--no-clone-scatter-output-in-embedding": "an embedding whose whole output every tensor-parallel rank keeps",
    **dict.fromkeys(("--logits-load-dir", "--logits-save-dir"), "logits of another model, or kept for one"),
    "--ddp-reduce-scatter-with-fp32-accumulation": "gradients that are reduced through a buffer of their size",
    "--no-fp8-wgrad": "gradients of weights by 16-bit products, whose inputs are kept in 16 bit",
    "--num-distributed-optimizer-instances": "optimizer state on only some of the replicas",
    "--ddp-param-name-patterns-for-fp32-local-accumulation": "gradients of some weights in 32 bit",
    "--use-transformer-engine-op-fuser": "an MLP of fused operations",
    "--te-precision-config-file": "precisions from a file",
    "--freeze-all-layers": "layers that are not trained",
    "--perform-rl-step": "reinforcement learning",
}

# Refused flags that describe the kernels `cpu`, which are modelled.
OF_A_CPU = ("--no-bias-swiglu-fusion",)

# Patterns of flags.
WITHOUT_INFLUENCE = """
    --*-data-path --*weight-decay* --adam-* --app-tag-* --async-* --auto-detect-ckpt-format --bpipe-executor
    --bpipe-peak-tflops --bpipe-report* --bpipe-strict --bpipe-timeout --bpipe-verify --ckpt-*
    --clip-grad --cuda-graph-warmup-steps --data-args-path --data-cache-path --data-path --dataloader-type --ddp-average-in-collective
    --decoupled-* --disable-gloo-process-groups --dist-ckpt-* --distributed-backend --distributed-timeout-*
    --eod-mask-loss --eval-i* --exit-* --finetune --fp8-amax-* --fp8-margin --hysteresis --init-method-*
    --initial-loss-scale --load --local-rank --log-* --logging-level --loss-scale* --lr --lr-* --mamba-inference-*
    --manual-gc* --merge-file --min-loss-scale --min-lr --mock-data --mtp-loss-scaling-factor
    --no-check-for-nan-in-loss-and-grad --no-create-attention-mask-in-dataloader --no-initialization --no-load-*
    --no-mmap-bin-files --no-one-logger --no-save-* --non-persistent-* --norm-epsilon --null-tokenizer-*
    --num-dataset-builder-threads --num-workers --one-logger-* --override-opt* --profile* --pytorch-profiler-*
    --rerun-mode --reset-* --rotary-base --save --save-interval --save-retain-interval --seed --sgd-momentum
    --skip-train --split --tensorboard-* --timing-* --tokenizer-* --train-iters --train-samples --trust-remote-code
    --use-checkpoint-opt* --use-cpu-initialization --use-dist-ckpt --use-mcore-models --use-pytorch-profiler
    --vocab-file --wandb-*
""".split()


def refused_for(flag: str, value: str, own_group: str) -> str | None:
    """Return what is not modelled of a flag with this value; None if nothing is.

    `own_group`: the default size of groups of micro-batches, the number of ranks.
    """
    neutral = (*_NEUTRAL, own_group if flag == GROUP else _NEUTRAL_OF.get(flag))
    return None if value in neutral else REFUSED.get(flag)


def is_without_influence(flag: str) -> bool:
    """Whether a flag changes neither memory nor time."""
    return any(fnmatchcase(flag, pattern) for pattern in WITHOUT_INFLUENCE)
