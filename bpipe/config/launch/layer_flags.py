"""Write a model's layers and those of every stage as Megatron's flags, and read them.

Layers may have experts, latent attention and windows. A hybrid model's pattern has a symbol per layer and, by `|`, where
stages begin. Other models have four ways to say that: equal chunks, numbers for the first and the last rank, the
embedding and the loss counted as layers, and a layout that lists every stage. A test holds both directions to Megatron's
own layers.
"""

import math
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from bpipe.config.flags.flag import Options
from bpipe.config.flags.trainer import argument_of, words
from bpipe.predict.layer_variants import (
    EVERY_LAYER,
    EXPERTS,
    MOST_LAYERS,
    Experts,
    Hybrid,
    Latent,
    Routing,
    read_pattern,
    shortest,
    split_text,
    write_list,
    write_pattern,
)
from bpipe.predict.layout import Setup, without_layers

# Fields of a `Latent` in the order of the flags.
_LATENT = ("kv_lora_rank", "q_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


def flags_of_parts(setup: Setup) -> list[str]:
    """Return flags of the model's parts; none for layers like GPT's or LLaMA's."""
    model, experts, routing = setup.model, setup.model.experts, setup.routing
    values: dict[str, object] = {}
    if model.latent is not None:
        values = {"multi_latent_attention": True, "qk_layernorm": True}
        values |= {name: getattr(model.latent, name) for name in _LATENT}
    if model.window is not None:
        # A token attends to itself as well.
        values["window_size"] = f"{model.window - 1},0"
        if model.window_pattern != EVERY_LAYER:
            values["window_attn_skip_freq"] = write_list(model.window_pattern, model.num_layers)
    if experts is None:
        return words(values)
    pattern = None if experts.pattern == EVERY_LAYER else write_pattern(experts.pattern, model.num_layers)
    values |= {
        "num_experts": experts.num_experts,
        "moe_router_topk": experts.top_k,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_layer_freq": pattern,
        "moe_shared_expert_intermediate_size": experts.shared_size or None,
        "moe_shared_expert_gate": experts.shared_gate,
        "moe_router_score_function": "sigmoid" if experts.sigmoid else None,
        "moe_grouped_gemm": setup.kernels == "gpu",
        "expert": routing.expert,
        "expert_tensor": setup.expert_tensor,
        "dispatcher": routing.dispatcher,
        "capacity_factor": routing.capacity,
        "pad_to_capacity": routing.padded,
    }
    return words(values)


def parts_of_flags(args: Options, ffn_hidden_size: int, notes: list[str]) -> dict[str, Any]:
    """Return the options by the names of a Model's fields, and `routing`."""
    options: dict[str, Any] = {}
    if args.multi_latent_attention:
        sizes = (args.q_lora_rank, args.kv_lora_rank, args.qk_head_dim, args.qk_pos_emb_head_dim, args.v_head_dim)
        options["latent"] = Latent(*sizes)
        # Here the flag norms the down-projections, not every head.
        options["qk_layernorm"] = False
        if not args.qk_layernorm:
            notes.append(
                "--multi-latent-attention without --qk-layernorm: predicted with norms after the down-projections"
            )
    if args.window_size is not None:
        options["window"], options["window_pattern"] = _window(args.window_size), _skipped(args.window_attn_skip_freq)
    if args.num_experts is None:
        return options
    if args.moe_router_score_function == "sqrtsoftplus":
        notes.append("--moe-router-score-function sqrtsoftplus is predicted as sigmoid")
    if args.transformer_impl != "local" and not args.moe_grouped_gemm:
        notes.append("without --moe-grouped-gemm experts are computed one after the other: predicted as if all at once")
    sizes_of_experts = (args.num_experts, args.moe_router_topk, args.moe_ffn_hidden_size or ffn_hidden_size)
    shared, sigmoid = args.moe_shared_expert_intermediate_size or 0, args.moe_router_score_function != "softmax"
    options["experts"] = Experts(
        *sizes_of_experts, shared, args.moe_shared_expert_gate, read_pattern(str(args.moe_layer_freq)), sigmoid
    )
    parallel = (args.expert_model_parallel_size, args.expert_tensor_parallel_size, args.moe_token_dispatcher_type)
    options["routing"] = Routing(*parallel, args.moe_expert_capacity_factor, args.moe_pad_expert_input_to_capacity)
    notes.append("experts' loads are assumed to be even")
    return options


def _window(text: str) -> int:
    """Return the number of tokens that a token attends to, itself included, of a text such as `127,0`."""
    parts = text.strip("()").replace(" ", "").split(",")
    if len(parts) != 2 or not all(re.fullmatch("[0-9]{1,12}", part) for part in parts) or int(parts[1]):
        raise ValueError(f"--window-size {text[:40]} is not a window of tokens before a token, such as 127,0")
    return int(parts[0]) + 1


def _skipped(text: str | None) -> tuple[int, ...]:
    """Return the pattern of layers with the window. A number N means that every N-th layer has none."""
    if text is None:
        return EVERY_LAYER
    if re.fullmatch("[0-9]{1,12}", text) and int(text) > 1:
        return shortest((*(1,) * (min(int(text), 1000) - 1), 0))
    return read_pattern(text)


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


def layers_of(args: Options) -> tuple[int, ...]:
    """Return the layers of every stage. Raises ValueError for what Megatron would refuse."""
    pipeline = args.pipeline_model_parallel_size
    if args.hybrid_layer_pattern is None:
        return read_split(args)
    _, stages = split_text(args.hybrid_layer_pattern)
    flags = [CHUNKS, LAYERS_OF_A_CHUNK, LAYOUT, COUNT_EMBEDDING, COUNT_LOSS]
    flags += [FIRST, LAST] if stages is not None else []
    if any(given(args, *flags)):
        raise ValueError(f"with {PATTERN} stages begin where it has a |: drop the other flags that place layers")
    if stages is None:
        return read_split(args)
    if len(stages) % pipeline:
        raise ValueError(f"{PATTERN} has {len(stages)} stages, not a multiple of the {pipeline} pipeline ranks")
    refuse_empty(stages)
    return stages


LAYERS_OF_A_CHUNK = "--num-layers-per-virtual-pipeline-stage"
CHUNKS = "--num-virtual-stages-per-pipeline-rank"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
COUNT_EMBEDDING, COUNT_LOSS = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"
LAYOUT = "--pipeline-model-parallel-layout"


def given(args: Options, *flags: str) -> list[Any]:
    """Return the values of flags: None or False where one is not given."""
    return [getattr(args, argument_of(flag)) for flag in flags]


def check_split(args: Options) -> None:
    """Raise ValueError for flags that exclude each other."""
    layers_of_a_chunk, chunks, layout = given(args, LAYERS_OF_A_CHUNK, CHUNKS, LAYOUT)
    if [layers_of_a_chunk, chunks, layout].count(None) < 2:
        raise ValueError(f"{LAYERS_OF_A_CHUNK}, {CHUNKS} and {LAYOUT} exclude each other: give one of them")
    ends, counted = any(given(args, FIRST, LAST)), any(given(args, COUNT_EMBEDDING, COUNT_LOSS))
    if ends and counted:
        raise ValueError(f"{FIRST} / {LAST} and {COUNT_EMBEDDING} / {COUNT_LOSS} exclude each other: give either")
    if layout is not None and (ends or counted):
        raise ValueError(
            f"{LAYOUT} says where every layer is: drop {FIRST}, {LAST}, {COUNT_EMBEDDING} and {COUNT_LOSS}"
        )
    if ends and layers_of_a_chunk is not None:
        raise ValueError(f"with {FIRST} / {LAST} Megatron needs {CHUNKS} instead of {LAYERS_OF_A_CHUNK}")


def split_flags(layers: tuple[int, ...], pipeline: int, further: int = 0, mtp_stage: int | None = None) -> list[str]:
    """Return the shortest flags for these layers, none if there is one stage per rank and all are equal.

    Stage s is on rank s % p. So many layers predict `further` tokens on `mtp_stage`, by default the last.
    """
    chunks = len(layers) // pipeline
    text = layout_text(layers, further, mtp_stage)
    if not layers[-1] or mtp_stage is not None:
        return [LAYOUT, text]
    if len(set(layers)) == 1:
        return [LAYERS_OF_A_CHUNK, str(layers[0])] if chunks > 1 else []
    ends = _first_and_last(layers, pipeline)
    if ends is not None and chunks == 1:
        return ends
    for embedding, loss in ((1, 1), (1, 0), (0, 1)):
        whole = (layers[0] + embedding, *layers[1:-1], layers[-1] + loss)
        if len(set(whole)) == 1:
            # With one stage per rank, numbers for the ends came first.
            return [LAYERS_OF_A_CHUNK, str(whole[0]), *[COUNT_EMBEDDING] * embedding, *[COUNT_LOSS] * loss]
    return ends or [LAYOUT, text]


def _first_and_last(layers: tuple[int, ...], pipeline: int) -> list[str] | None:
    """Return flags for the first and last rank, if each rank's chunks are equal and so are the ranks between."""
    if (
        pipeline < 2
        or any(len(set(layers[rank::pipeline])) > 1 for rank in range(pipeline))
        or len(set(layers[1 : pipeline - 1])) > 1
    ):
        return None
    chunks = len(layers) // pipeline
    first, last = layers[0] * chunks, layers[pipeline - 1] * chunks
    return [*([CHUNKS, str(chunks)] if chunks > 1 else []), FIRST, str(first), LAST, str(last)]


def layout_text(layers: tuple[int, ...], further: int = 0, mtp_stage: int | None = None) -> str:
    """Write a layout such as `Et*3|(t*4|)*6t*3mL`. The last stage may have only the output layer."""
    stages = [_repeated("t", num) for num in layers]
    stages[-1 if mtp_stage is None else mtp_stage] += _repeated("m", further)
    if len(stages) == 1:
        return f"E{stages[0]}L"
    inner = ""
    for stage, run in groupby(stages[1:-1]):
        count = len(list(run))
        inner += f"{stage}|" * count if count < 3 else f"({stage}|)*{count}"
    return f"E{stages[0]}|{inner}{stages[-1]}L"


def _repeated(symbol: str, number: int) -> str:
    return symbol if number == 1 else f"{symbol}*{number}" if number else ""


def read_split(args: Options) -> tuple[int, ...]:
    """Return the layers of every stage as Megatron places them. Raises ValueError for what it would refuse."""
    check_split(args)
    layers_of_a_chunk, chunks, layout = given(args, LAYERS_OF_A_CHUNK, CHUNKS, LAYOUT)
    if layout is not None:
        return _read_layout(layout, args)
    ranks = _rank_layers(args)
    chunks = chunks or 1
    if layers_of_a_chunk is not None:
        if ranks[0] % layers_of_a_chunk:
            raise ValueError(f"{LAYERS_OF_A_CHUNK} {layers_of_a_chunk} does not divide the {ranks[0]} layers of a rank")
        chunks = ranks[0] // layers_of_a_chunk
    for rank, num in enumerate(ranks):
        if num % chunks:
            raise ValueError(f"{CHUNKS} {chunks} does not divide the {num} layers of rank {rank}")
    layers = [num // chunks for num in ranks] * chunks
    count_embedding, count_loss = given(args, COUNT_EMBEDDING, COUNT_LOSS)
    layers[0] -= count_embedding
    layers[-1] -= count_loss
    refuse_empty(layers)
    return tuple(layers)


def _rank_layers(args: Options) -> list[int]:
    """Return the layers of every rank, with embedding and loss if they count as layers."""
    first, last = ([] if end is None else [end] for end in given(args, FIRST, LAST))
    counted = [flag for flag in (COUNT_EMBEDDING, COUNT_LOSS) if any(given(args, flag))]
    left = args.num_layers - sum(first) - sum(last) + len(counted)
    ranks = args.pipeline_model_parallel_size - len(first) - len(last)
    if ranks < 0 or left < 0 or (not ranks and left) or (ranks and left % ranks):
        flags = [f"{flag} {value}" for flag, values in ((FIRST, first), (LAST, last)) for value in values] + counted
        besides = f" with {' '.join(flags)}" if flags else f": say how with {FIRST} and {LAST}, or {LAYOUT}"
        raise ValueError(
            f"--num-layers {args.num_layers} cannot be divided evenly over --pipeline-model-parallel-size "
            f"{args.pipeline_model_parallel_size}{besides}"
        )
    return [*first, *([left // ranks] * ranks if ranks else []), *last]


def further_stage(layout: str | None) -> int | None:
    """Return the stage of a layout that predicts further tokens; None: the last one, or there are none."""
    stages = [] if layout is None else _spelled(layout).split("|")
    return next((stage for stage, layers in enumerate(stages[:-1]) if "m" in layers), None)


def _spelled(text: str) -> str:
    """Return a layout with all its repetitions."""
    if len(text) > MOST_LAYERS:
        raise ValueError(f"{LAYOUT} {text[:40]}... has {len(text)} characters, but a layout has at most {MOST_LAYERS}")
    spelled = text.replace(",", "")
    for repeated in (r"\(([^()]+)\)\*([0-9]+)", r"(.)\*([0-9]+)"):
        lengths = [
            len(match[1]) * int(match[2]) if len(match[2]) < 6 else math.inf for match in re.finditer(repeated, spelled)
        ]
        # Every layer may be followed by a |.
        if sum(lengths) > 2 * MOST_LAYERS:
            raise ValueError(f"{LAYOUT} {text[:40]} repeats more than {MOST_LAYERS} layers, the most of a model")
        spelled = re.sub(repeated, lambda match: match[1] * int(match[2]), spelled)
    return spelled


def _read_layout(text: str, args: Options) -> tuple[int, ...]:
    spelled, further = _spelled(text), args.mtp_num_layers or 0
    if not re.fullmatch(r"E[t|]*m*\|?L", spelled):
        raise ValueError(
            f"{LAYOUT} {text[:60]}: give one E first, then t for every layer with | between stages, m for every further "
            "token, all on the last stage or the one before, and one L last"
        )
    if spelled.count("m") != further:
        raise ValueError(
            f"{LAYOUT} {text[:60]} has {spelled.count('m')} layers for further tokens (m), but --mtp-num-layers is "
            f"{further or 'not given'}"
        )
    layers = [stage.count("t") for stage in spelled.split("|")]
    if len(layers) % args.pipeline_model_parallel_size:
        ranks = f"the {args.pipeline_model_parallel_size} ranks"
        raise ValueError(f"{LAYOUT} {text[:60]} has {len(layers)} stages, not a multiple of {ranks}")
    if sum(layers) != args.num_layers:
        raise ValueError(f"{LAYOUT} {text[:60]} has {sum(layers)} layers, but --num-layers is {args.num_layers}")
    refuse_empty(layers, further_stage(text))
    return tuple(layers)


def refuse_empty(layers: Sequence[int], mtp_stage: int | None = None) -> None:
    """Raise ValueError for a stage without a layer that needs one."""
    empty = without_layers(layers, mtp_stage)
    if empty is not None:
        raise ValueError(f"stage {empty} has no layer, which is modelled of the first and the last stage only")
