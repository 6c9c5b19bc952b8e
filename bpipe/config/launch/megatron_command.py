"""Read a Megatron launch as this package's own options.

`config.flags.trainer.READ` lists the flags that are read. `megatron_settings` lists those that are refused, because they
would change the result and are not modelled, and those without influence. Any other flag is listed as not considered.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bpipe.balance.config import BALANCES
from bpipe.config.flags.configurations import MODEL_SWITCHES
from bpipe.config.flags.flag import Options
from bpipe.config.flags.schedules import ORDER
from bpipe.config.flags.trainer import SAME
from bpipe.config.flags.values import AUTO
from bpipe.config.launch.layer_flags import (
    CHUNKS,
    LAYERS_OF_A_CHUNK,
    LAYOUT,
    further_stage,
    given,
    hybrid_of_flags,
    layers_of,
    parts_of_flags,
    settle_pattern,
)
from bpipe.config.launch.megatron_settings import (
    GRAPHS,
    REFUSED,
    MegatronSettings,
    is_without_influence,
    refused_for,
    unknown_flags,
    unknown_note,
)
from bpipe.predict.recompute import MODULES, Recompute
from bpipe.predict.training import (
    CP_COMM_TYPES,
    CUDA_GRAPHS,
    FP8_RECIPES,
    IMPLEMENTATIONS,
    STATE_FIELDS,
    SWITCHES,
    flag_of,
)
from bpipe.schedule.families.families import FAMILIES

# Fields whose values a launch gives unchanged.
_CUT = [
    "tensor",
    "micro_batch",
    "global_batch",
    "schedule",
    "bound",
    "memory",
    "hosts",
    "min_bytes",
    "keep_weights_halves",
]

_FP8 = ("fp8_format", "fp8_recipe", "fp8_param_gather")
# Arguments by which micro-batches may differ in size.
_DIFFERING = ("bpipe_differing_sizes", "sft", "dataloader_inter_document_masking")
# Sizes of vocabularies by tokenizer.
VOCABULARIES = {"GPT2BPETokenizer": 50257}


@dataclass(frozen=True, slots=True)
class Reading:
    """A launch as read."""

    options: dict[str, Any]
    """Options of `bpipe simulate`, by their names there."""
    unmodelled: dict[str, str]
    """By option, which of its flags is not modelled."""
    not_considered: tuple[str, ...]
    """Flags without an effect on the prediction that might have one on the training."""
    notes: tuple[str, ...]
    """Lines for the user on assumptions."""
    devices: tuple[int, int] | None = None
    """Nodes, and GPUs of each, if the launcher gives both."""
    others: tuple[tuple[str, str], ...] = ()
    """Flags that no option covers, with values."""
    flags: tuple[str, ...] = ()
    """All flags of the script."""
    refused: str | None = None
    """Why Megatron would end the launch at its start, if it was asked."""
    trainer: tuple[str, ...] = ()
    """Why this project's trainer would, if it was asked."""


def read_command(words: Sequence[str], unknown: Sequence[str] | None = None) -> Reading:
    """Read `torchrun ... script.py FLAGS`, or the flags alone.

    Args:
        words: the command line.
        unknown: flags that Megatron's parser was asked for and does not have; None if it was not asked.

    Returns:
        The launch as options of `bpipe simulate`, and the flags that no option covers.
    """
    launcher, flags = split_command(words)
    if unknown is None:
        unknown = unknown_flags(flags)
    reading = read_settings(MegatronSettings.from_flags(flags), unknown)
    return replace(reading, devices=devices_of(launcher), flags=tuple(flags))


def read_settings(settings: MegatronSettings, unknown: Sequence[str] = ()) -> Reading:
    """Read the settings of a training.

    Args:
        settings: from flags or parsed arguments.
        unknown: flags that Megatron's parser does not have.

    Returns:
        The launch as options of `bpipe simulate`, and the flags that no option covers.

    Raises:
        ValueError: A setting is not modelled.
    """
    args, others = Options(**vars(settings.values)), settings.others
    for flag, value in others:
        reason = refused_for(flag, value, str(args.pipeline_model_parallel_size))
        if reason is not None:
            given = f"{flag} {value}".rstrip()
            raise ValueError(f"{given} is not modelled: {reason}; leave the flag out to predict the run without it")
    notes: list[str] = []
    settle_pattern(args, notes)
    options = {**_model(args, notes), **_parallel(args), **_training(args, notes)}
    # The vocabulary may be the tokenizer's.
    vocabulary = next((VOCABULARIES.get(value) for flag, value in others if flag == "--tokenizer-type"), None)
    if vocabulary is not None:
        options.setdefault("vocabulary", vocabulary)
    options["recompute"], unmodelled = _recomputation(args, notes)
    names = sorted({flag for flag, _ in others})
    not_considered = tuple(flag for flag in names if flag not in REFUSED and not is_without_influence(flag))
    notes += [unknown_note(unknown)] if unknown else []
    return Reading(options, unmodelled, not_considered, tuple(notes), others=others)


def split_command(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words of the launcher, if there is one, and the flags of the script."""
    scripts = [place for place, word in enumerate(words) if word.endswith(".py") and not word.startswith("-")]
    modules = [place + 1 for place, word in enumerate(words) if word == "-m"]
    places = [*scripts[:1], *modules[-1:]]
    if places:
        return list(words[: places[0]]), [word for word in words[places[0] + 1 :] if word != ""]
    if words and not words[0].startswith("-"):
        raise ValueError(
            f"{words[0]!r} is not a flag, and no training script (.py, -m) follows: give a whole command line, flags "
            "alone, or --launch FILE as bpipe capture writes it"
        )
    return [], list(words)


def devices_of(launcher: Sequence[str]) -> tuple[int, int] | None:
    """Return torchrun's nodes, by default one, and processes on each; None if it does not give both as numbers."""
    values = {"nnodes": "1", "nproc_per_node": ""}
    for place, word in enumerate(launcher):
        name, _, value = word.partition("=")
        name = name.lstrip("-").replace("-", "_")
        if name in values:
            values[name] = value or (launcher[place + 1] if place + 1 < len(launcher) else "")
    if not all(value.isdecimal() for value in values.values()):
        return None
    if any(len(value) > 5 for value in values.values()):
        raise ValueError(
            f"{values['nnodes'][:40]} nodes of {values['nproc_per_node'][:40]} processes: give at most 99999 of each"
        )
    nodes, per_node = int(values["nnodes"]), int(values["nproc_per_node"])
    return (nodes, per_node) if nodes and per_node else None


def _model(args: Options, notes: list[str]) -> dict[str, Any]:
    needed = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    missing = [flag_of(name) for name in needed if getattr(args, name) is None]
    if missing:
        raise ValueError(f"Megatron's flags lack {', '.join(missing)}")
    hidden, heads = args.hidden_size, args.num_attention_heads
    if args.kv_channels is None and hidden % heads:
        raise ValueError(f"--num-attention-heads {heads} does not divide --hidden-size {hidden}: give --kv-channels")
    ffn = args.ffn_hidden_size or (int(4 * hidden * 2 / 3 / 64) * 64 if args.swiglu else 4 * hidden)
    position: str = "rope" if args.use_rotary_position_embeddings else args.position_embedding_type
    if position not in ("rope", "learned_absolute", "none"):
        notes.append(f"--position-embedding-type {position} is predicted as rope")
    dropouts = {args.attention_dropout > 0, args.hidden_dropout > 0}
    if len(dropouts) > 1:
        notes.append("one of --attention-dropout and --hidden-dropout is 0: predicted as if neither were")
    options = {
        "num_layers": args.num_layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": args.num_query_groups if args.group_query_attention else heads,
        "kv_channels": args.kv_channels or hidden // heads,
        "ffn_hidden_size": ffn,
        "sequence": args.seq_length,
        **{flag.field: getattr(args, flag.field) for flag in MODEL_SWITCHES if flag.launch is not None},
        "rms_norm": args.normalization == "RMSNorm",
        "rotary": position != "learned_absolute",
        "no_dropout": True not in dropouts,
    }
    options |= {**parts_of_flags(args, ffn, notes), **hybrid_of_flags(args, position)}
    if args.mtp_num_layers:
        options["mtp_num_layers"] = args.mtp_num_layers
    vocabulary = args.padded_vocab_size or args.vocab_size
    return {**options, "vocabulary": vocabulary} if vocabulary else options


def _parallel(args: Options) -> dict[str, Any]:
    pipeline = args.pipeline_model_parallel_size
    if not any(given(args, LAYERS_OF_A_CHUNK, CHUNKS, LAYOUT)):
        args.num_virtual_stages_per_pipeline_rank = _own_chunks(args.bpipe_schedule)
    layers = layers_of(args)
    options = {
        **{field: getattr(args, SAME[field]) for field in _CUT},
        "pipeline": pipeline,
        **_context(args),
        "chunks": len(layers) // pipeline,
        "layers": layers,
        "mtp_stage": further_stage(args.pipeline_model_parallel_layout),
        "no_sequence_parallel": not args.sequence_parallel,
        "balance": BALANCES[args.bpipe],
        **{flag.field: getattr(args, SAME[flag.field]) for flag in ORDER},
        "vocabulary_parallel": args.bpipe_vocabulary,
        "input_shards": args.bpipe_vocabulary_input or None,
        "slice_lengths": args.bpipe_slice_lengths if (args.bpipe_slices or 1) > 1 else None,
    }
    return {name: value for name, value in options.items() if value not in (None, AUTO)}


def _context(args: Options) -> dict[str, Any]:
    if args.context_parallel_size == 1:
        return {}
    ways = set(args.cp_comm_type)
    if len(ways) > 1 or not ways <= set(CP_COMM_TYPES):
        text = " ".join(args.cp_comm_type)[:60]
        raise ValueError(
            f"--cp-comm-type {text}: only one of {', '.join(CP_COMM_TYPES)} for all layers is modelled; give one of "
            "them"
        )
    return {"context": args.context_parallel_size, "cp_comm_type": ways.pop()}


def _own_chunks(schedule: str | None) -> int | None:
    """Return the trainer's number of chunks for a schedule that has always the same, and more than one.

    Raises ValueError for the schedule of a file.
    """
    if schedule is None:
        return None
    if schedule not in FAMILIES:
        raise ValueError(f"--bpipe-schedule {schedule}: a file's cannot be predicted, only {', '.join(FAMILIES)}")
    family = FAMILIES[schedule]
    return family.min_chunks if 1 < family.min_chunks == family.max_chunks else None


def _training(args: Options, notes: list[str]) -> dict[str, Any]:
    if args.fp16 and args.bf16:
        raise ValueError("--fp16 and --bf16 exclude each other: give one of them")
    switches = {name: getattr(args, name) for name in SWITCHES}
    # As Megatron's own configuration does.
    switches["attention_softmax_in_fp32"] |= args.apply_query_key_layer_scaling
    if switches["tp_comm_overlap"] and args.transformer_impl == "local":
        notes.append("--tp-comm-overlap is for Transformer Engine and overlaps nothing with --transformer-impl local")
        switches["tp_comm_overlap"] = False
    if args.fp8_format is not None and args.fp8_recipe == "custom":
        raise ValueError(f"--fp8-recipe custom is not modelled: give one of {', '.join(FP8_RECIPES)}")
    if args.cuda_graph_impl not in CUDA_GRAPHS:
        raise ValueError(
            f"--cuda-graph-impl {args.cuda_graph_impl} is not modelled: {GRAPHS}; leave the flag out to predict the run "
            "without it"
        )
    attention = _attention(args, notes)
    differing = [flag_of(name) for name in _DIFFERING if getattr(args, name)]
    if differing:
        notes.append(f"{differing[0]}: micro-batches may differ in size; each is predicted as one full sequence")
    return {
        "attention": attention,
        # As Megatron itself does with this backend.
        "transformer_impl": "local"
        if "local" in (args.transformer_impl, args.attention_backend)
        else IMPLEMENTATIONS[0],
        "cuda_graph_impl": args.cuda_graph_impl,
        "precision": "fp16" if args.fp16 else "bf16" if args.bf16 else "fp32",
        "no_distributed_optimizer": not args.use_distributed_optimizer,
        **switches,
        **({} if args.fp8_format is None else {name: getattr(args, name) for name in _FP8}),
        **{name: getattr(args, name) for name in STATE_FIELDS},
        "bpipe_differing_sizes": bool(differing),
    }


def _attention(args: Options, notes: list[str]) -> str:
    backend = args.attention_backend
    if backend == "unfused" or (args.transformer_impl == "local" and not args.use_flash_attn):
        return "unfused"
    if backend in ("auto", "fused"):
        notes.append(f"--attention-backend {backend} is predicted as flash")
    return "unfused" if backend == "local" else "flash"


def _recomputation(args: Options, notes: list[str]) -> tuple[str, dict[str, str]]:
    """Return what is recomputed, and what of it is not modelled.

    Raises ValueError where flags contradict each other.
    """
    granularity, modules = args.recompute_granularity, args.recompute_modules or ["core_attn"]
    if args.recompute_activations:
        if granularity == "full":
            raise ValueError("--recompute-activations and --recompute-granularity full exclude each other: give one")
        granularity = "selective"
    if granularity == "selective":
        return _recomputed_parts(modules, args.num_experts is not None, notes)
    if granularity != "full":
        return granularity or "none", {}
    if args.recompute_method is None:
        raise ValueError("--recompute-granularity full needs --recompute-method")
    if args.recompute_num_layers is None:
        return "full", {} if args.recompute_method == "uniform" else {
            "recompute": "--recompute-method block without --recompute-num-layers"
        }
    return Recompute(method=args.recompute_method, num_layers=args.recompute_num_layers).text, {}


def _recomputed_parts(modules: list[str], has_experts: bool, notes: list[str]) -> tuple[str, dict[str, str]]:
    """Return the same for recomputed parts of layers."""
    if not set(modules) <= set(MODULES):
        return "selective", {"recompute": f"--recompute-modules {' '.join(modules)}"}
    if "moe" in modules and not has_experts:
        # Megatron accepts the name, without an effect.
        notes.append("--recompute-modules moe recomputes nothing in a model without experts")
        modules = [name for name in modules if name != "moe"]
    return Recompute(tuple(modules)).text, {}
