"""Write a hybrid model's layers as Megatron's flags, and read them.

The pattern has a symbol per layer and, by `|`, where stages begin.
"""

from typing import Any

from bpipe.config.flags.flag import Options
from bpipe.config.flags.launches import words
from bpipe.config.launch.layer_split import Split, read_split, refuse_empty
from bpipe.predict.hybrid import EXPERTS, Hybrid, split_text
from bpipe.predict.layout import Setup

PATTERN, OLD_PATTERN = "--hybrid-layer-pattern", "--hybrid-override-pattern"
# Specifications of Megatron's own stack, today's first.
_STACKS = (
    ("megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"),
    ("megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"),
)


def flags_of_hybrid(setup: Setup) -> list[str]:
    """Return flags of a hybrid model; none where every layer has both parts."""
    hybrid = setup.model.hybrid
    if hybrid is None:
        return []
    sizes = {
        "mamba_num_heads": hybrid.num_heads,
        "mamba_head_dim": hybrid.head_dim,
        "mamba_state_dim": hybrid.state_dim,
        "mamba_num_groups": hybrid.num_groups,
        # Megatron's stack is Transformer Engine's.
        "spec": _STACKS[0] if setup.kernels == "gpu" else None,
    }
    text = hybrid.with_stages(setup.layers)
    # A pattern that begins with an MLP would be taken for a flag as a word of its own.
    return [*([f"{PATTERN}={text}"] if text.startswith("-") else [PATTERN, text]), *words(sizes)]


def settle_pattern(args: Options, notes: list[str]) -> None:
    """Set the pattern of its old flag and the number of layers, as Megatron does.

    Raises ValueError for flags that need a pattern without one, and for a stack that is not Megatron's.
    """
    if args.hybrid_override_pattern is not None:
        if args.hybrid_layer_pattern is not None:
            raise ValueError(f"{PATTERN} and {OLD_PATTERN} exclude each other: give the first")
        args.hybrid_layer_pattern = args.hybrid_override_pattern
    if args.spec is not None and (tuple(args.spec) not in _STACKS or args.hybrid_layer_pattern is None):
        text = " ".join(args.spec)[:80]
        raise ValueError(f"--spec {text}: layers of a custom specification are not modelled; leave the flag out")
    if args.hybrid_layer_pattern is None:
        if args.is_hybrid_model:
            raise ValueError(f"--is-hybrid-model does not say which layers the model has: give {PATTERN}, too")
        return
    if args.transformer_impl == "inference_optimized":
        raise ValueError("--transformer-impl inference_optimized is for inference and not modelled; leave the flag out")
    if not isinstance(args.hybrid_layer_pattern, str):
        # argparse takes the word `--` for the end of the flags, in Megatron's parser as well.
        raise ValueError(f"{PATTERN} --: two MLPs alone cannot be given, because -- ends the flags: give another")
    symbols, _ = split_text(args.hybrid_layer_pattern)
    if args.num_layers not in (None, len(symbols)):
        notes.append(
            f"{PATTERN} has {len(symbols)} layers, and Megatron uses those instead of --num-layers {args.num_layers}"
        )
    args.num_layers = len(symbols)
    if args.num_experts is not None and EXPERTS not in symbols:
        raise ValueError(
            f"--num-experts {args.num_experts}, but no layer of {PATTERN} has experts ({EXPERTS}): leave the "
            f"experts' flags out"
        )
    # The pattern alone has which layers have experts.
    args.moe_layer_freq = 1


def hybrid_of_flags(args: Options, position: str) -> dict[str, Any]:
    """Return the options by the names of a Model's fields."""
    others = {"no_positions": True} if position == "none" else {}
    if args.hybrid_layer_pattern is None:
        return others
    heads, inner = args.mamba_num_heads, 2 * args.hidden_size
    if heads is None:
        if inner % args.mamba_head_dim:
            raise ValueError(f"--mamba-head-dim {args.mamba_head_dim} does not divide {inner}: give --mamba-num-heads")
        heads = inner // args.mamba_head_dim
    symbols, _ = split_text(args.hybrid_layer_pattern)
    try:
        return {
            **others,
            "hybrid": Hybrid(symbols, heads, args.mamba_state_dim, args.mamba_head_dim, args.mamba_num_groups),
        }
    except ValueError as error:
        raise ValueError(f"{PATTERN} {args.hybrid_layer_pattern[:60]}: {error}") from None


def layers_of(args: Options, split: Split) -> tuple[int, ...]:
    """Return the layers of every stage. Raises ValueError for what Megatron would refuse."""
    pipeline = args.pipeline_model_parallel_size
    if args.hybrid_layer_pattern is None:
        return read_split(split, args.num_layers, pipeline)
    symbols, stages = split_text(args.hybrid_layer_pattern)
    others = [args.num_virtual_stages_per_pipeline_rank, split.layers_of_a_chunk, split.layout]
    others += [split.first, split.last] if stages is not None else []
    if any(value is not None for value in others) or split.count_embedding or split.count_loss:
        raise ValueError(f"with {PATTERN} stages begin where it has a |: drop the other flags that place layers")
    if stages is None:
        return read_split(Split(first=split.first, last=split.last), len(symbols), pipeline)
    if len(stages) % pipeline:
        raise ValueError(f"{PATTERN} has {len(stages)} stages, not a multiple of the {pipeline} pipeline ranks")
    refuse_empty(stages)
    return stages
