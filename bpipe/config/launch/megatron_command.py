"""Read a Megatron command line as this package's own options.

In: the command's words. Out: a `Reading`: options, and what is left out.

`config.flags.launches.READ` says what is read; `other_flags` what would change the result and is not modelled, so an error,
and what changes neither memory nor time. Any other flag is listed as not considered. Imports no Megatron; a test holds
the tables to the parser of the installed one. Knows no cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bpipe.balance.config import BALANCES
from bpipe.config.flags.configurations import MODEL_SWITCHES
from bpipe.config.flags.flag import Options
from bpipe.config.flags.launches import SAME
from bpipe.config.flags.schedules import ORDER
from bpipe.config.flags.values import AUTO
from bpipe.config.launch.expert_flags import parts_of_flags
from bpipe.config.launch.hybrid_flags import hybrid_of_flags, layers_of, settle_pattern
from bpipe.config.launch.layer_split import Split
from bpipe.config.launch.megatron_names import unknown_flags, unknown_note
from bpipe.config.launch.megatron_settings import MegatronSettings
from bpipe.config.launch.other_flags import PREDICTED_WITHOUT, REFUSED, is_without_influence, refused_for
from bpipe.predict.choices import CP_COMM_TYPES
from bpipe.predict.fp8 import RECIPES
from bpipe.predict.layer_counts import output_in_layers, padded_vocabulary, redistribute_layers
from bpipe.predict.recompute import MODULES, Recompute
from bpipe.predict.state_types import FIELDS as STATE_FIELDS
from bpipe.predict.switches import SWITCHES, flag_of
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.layout import REDISTRIBUTE

# Fields that a launch says as they are.
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

# Where the flags do not say it.
VOCABULARIES = {"GPT2BPETokenizer": 50257}


@dataclass(frozen=True, slots=True)
class Reading:
    """A launch as read. `options` are those of `bpipe simulate`, by their names there.

    `unmodelled`: by option, what of its flags is not modelled.

    `devices`: nodes and GPUs of each, where the launcher says so. `flags`: all of its flags. `others`: those that no
    option covers, with values. `refused` and `trainer`: why Megatron and this project's trainer would end the launch at
    its start, where they were asked.
    """

    options: dict[str, Any]
    unmodelled: dict[str, str]
    not_considered: tuple[str, ...]
    notes: tuple[str, ...]
    devices: tuple[int, int] | None = None
    others: tuple[tuple[str, str], ...] = ()
    flags: tuple[str, ...] = ()
    refused: str | None = None
    trainer: tuple[str, ...] = ()


def read_command(words: Sequence[str], unknown: Sequence[str] | None = None) -> Reading:
    """Read `torchrun ... script.py FLAGS`, or the flags alone.

    Args:
        words: the command line.
        unknown: flags that Megatron's parser was asked for and does not have; None if it was not asked.
    """
    launcher, flags = split_command(words)
    if unknown is None:
        unknown = unknown_flags(flags)
    reading = read_settings(MegatronSettings.from_flags(flags), unknown)
    return replace(reading, devices=devices_of(launcher), flags=tuple(flags))


def read_settings(settings: MegatronSettings, unknown: Sequence[str] = ()) -> Reading:
    """Read the settings of a training. Raises ValueError for what is not modelled.

    Args:
        settings: from flags, parsed arguments or a log.
        unknown: flags that Megatron's parser does not have.
    """
    found, others = Options(**vars(settings.values)), settings.others
    for flag, value in others:
        reason = refused_for(flag, value, str(found.pipeline_model_parallel_size))
        if reason is not None:
            said = f"{flag} {value}".rstrip()
            raise ValueError(f"{said} is not modelled: {reason}; leave the flag out to predict the run without it")
    notes: list[str] = []
    settle_pattern(found, notes)
    options = {**_model(found, notes), **_parallel(found), **_training(found, notes)}
    _sizes_that_differ(found, notes)
    # The vocabulary may be the tokenizer's.
    vocabulary = next((VOCABULARIES.get(value) for flag, value in others if flag == "--tokenizer-type"), None)
    if vocabulary is not None:
        options.setdefault("vocabulary", vocabulary)
    scope, unmodelled = _recomputation(found, notes)
    named = sorted({flag for flag, _ in others})
    notes += [f"{flag} {PREDICTED_WITHOUT[flag]}" for flag in named if flag in PREDICTED_WITHOUT]
    known = (*REFUSED, *PREDICTED_WITHOUT)
    left = [flag for flag in named if flag not in known and not is_without_influence(flag)]
    notes += [unknown_note(unknown)] if unknown else []
    options["recompute"] = scope
    return Reading(options, unmodelled, tuple(left), tuple(notes), others=others)


def split_command(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the launcher's words, which are none for flags alone, and the flags of the script."""
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
    """Return the nodes of torchrun and the processes on each, or None if it does not give both as numbers.

    Without --nnodes it is one node.
    """
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
    nodes, each = int(values["nnodes"]), int(values["nproc_per_node"])
    return (nodes, each) if nodes and each else None


def _model(found: Options, notes: list[str]) -> dict[str, Any]:
    needed = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    missing = [flag_of(name) for name in needed if getattr(found, name) is None]
    if missing:
        raise ValueError(f"Megatron's flags lack {', '.join(missing)}")
    hidden, heads = found.hidden_size, found.num_attention_heads
    if found.kv_channels is None and hidden % heads:
        raise ValueError(f"--num-attention-heads {heads} does not divide --hidden-size {hidden}: give --kv-channels")
    ffn = found.ffn_hidden_size or (int(4 * hidden * 2 / 3 / 64) * 64 if found.swiglu else 4 * hidden)
    position = _position(found, notes)
    options = {
        "num_layers": found.num_layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": found.num_query_groups if found.group_query_attention else heads,
        "kv_channels": found.kv_channels or hidden // heads,
        "ffn_hidden_size": ffn,
        "sequence": found.seq_length,
        **{flag.field: getattr(found, flag.field) for flag in MODEL_SWITCHES if flag.launch is not None},
        "rms_norm": found.normalization == "RMSNorm",
        "rotary": position != "learned_absolute",
        "no_dropout": not _has_dropout(found, notes),
    }
    options |= {**parts_of_flags(found, ffn, notes), **hybrid_of_flags(found, position)}
    vocabulary = found.padded_vocab_size or found.vocab_size
    return {**options, "vocabulary": vocabulary} if vocabulary else options


def _position(found: Options, notes: list[str]) -> str:
    position: str = "rope" if found.use_rotary_position_embeddings else found.position_embedding_type
    if position not in ("rope", "learned_absolute", "none"):
        notes.append(f"--position-embedding-type {position} is predicted as rope")
    return position


def _has_dropout(found: Options, notes: list[str]) -> bool:
    dropouts = {found.attention_dropout > 0, found.hidden_dropout > 0}
    if len(dropouts) > 1:
        notes.append("one of --attention-dropout and --hidden-dropout is 0: predicted as if neither were")
    return True in dropouts


def _parallel(found: Options) -> dict[str, Any]:
    pipeline = found.pipeline_model_parallel_size
    said = (
        found.num_layers_per_virtual_pipeline_stage,
        found.num_virtual_stages_per_pipeline_rank,
        found.pipeline_model_parallel_layout,
    )
    split = Split(
        layers_of_a_chunk=found.num_layers_per_virtual_pipeline_stage,
        chunks=found.num_virtual_stages_per_pipeline_rank if any(said) else _own_chunks(found.bpipe_schedule),
        first=found.decoder_first_pipeline_num_layers,
        last=found.decoder_last_pipeline_num_layers,
        count_embedding=found.account_for_embedding_in_pipeline_split,
        count_loss=found.account_for_loss_in_pipeline_split,
        layout=found.pipeline_model_parallel_layout,
    )
    redistributed = found.bpipe_vocabulary == REDISTRIBUTE
    layers = _redistributed(found, split) if redistributed else layers_of(found, split)
    options = {
        **{field: getattr(found, SAME[field]) for field in _CUT},
        "pipeline": pipeline,
        **_context(found),
        "chunks": len(layers) // pipeline,
        "layers": layers,
        "no_sequence_parallel": not found.sequence_parallel,
        "balance": BALANCES[found.bpipe],
        **{flag.field: getattr(found, SAME[flag.field]) for flag in ORDER},
        "vocabulary_parallel": None if redistributed else found.bpipe_vocabulary,
        "input_shards": found.bpipe_vocabulary_input or None,
        "slice_lengths": found.bpipe_slice_lengths if (found.bpipe_slices or 1) > 1 else None,
    }
    return {name: value for name, value in options.items() if value not in (None, AUTO)}


def _context(found: Options) -> dict[str, Any]:
    """Raises ValueError where ranks exchange in a way that is not modelled."""
    if found.context_parallel_size == 1:
        return {}
    ways = set(found.cp_comm_type)
    if len(ways) > 1 or not ways <= set(CP_COMM_TYPES):
        said = " ".join(found.cp_comm_type)[:60]
        raise ValueError(
            f"--cp-comm-type {said}: only one of {', '.join(CP_COMM_TYPES)} for all layers is modelled; give one of "
            "them"
        )
    return {"context": found.context_parallel_size, "cp_comm_type": ways.pop()}


def _redistributed(found: Options, split: Split) -> tuple[int, ...]:
    """As the trainer chooses them."""
    wanted, vocabulary = f"--bpipe-vocabulary {REDISTRIBUTE}", found.padded_vocab_size or found.vocab_size
    if split != Split() or found.hybrid_layer_pattern is not None:
        raise ValueError(f"{wanted} says where every layer is: drop the other flags that do")
    if not vocabulary:
        raise ValueError(f"{wanted} needs --vocab-size, too")
    padded = padded_vocabulary(vocabulary, found.make_vocab_size_divisible_by, found.tensor_model_parallel_size)
    worth = output_in_layers(padded, found.hidden_size, found.seq_length)
    layers = redistribute_layers(found.num_layers, found.pipeline_model_parallel_size, worth)
    if layers is None:
        raise ValueError(
            f"{wanted}: --num-layers {found.num_layers} is fewer than the other stages, or there are no other stages"
        )
    return layers


def _own_chunks(schedule: str | None) -> int | None:
    """What the trainer gives a schedule that has several chunks and never another number.

    Raises ValueError for a file's schedule.
    """
    if schedule is None:
        return None
    if schedule not in FAMILIES:
        raise ValueError(
            f"--bpipe-schedule {schedule}: only {', '.join(FAMILIES)} can be predicted, not a schedule from a file"
        )
    family = FAMILIES[schedule]
    return family.min_chunks if 1 < family.min_chunks == family.max_chunks else None


def _training(found: Options, notes: list[str]) -> dict[str, Any]:
    if found.fp16 and found.bf16:
        raise ValueError("--fp16 and --bf16 exclude each other: give one of them")
    switches = {name: getattr(found, name) for name in SWITCHES}
    # As Megatron's own configuration does.
    switches["attention_softmax_in_fp32"] |= found.apply_query_key_layer_scaling
    if switches["tp_comm_overlap"] and found.transformer_impl == "local":
        notes.append("--tp-comm-overlap is for Transformer Engine and overlaps nothing with --transformer-impl local")
        switches["tp_comm_overlap"] = False
    return {
        "attention": _attention(found, notes),
        "precision": "fp16" if found.fp16 else "bf16" if found.bf16 else "fp32",
        "no_distributed_optimizer": not found.use_distributed_optimizer,
        **switches,
        **_fp8(found),
        **{name: getattr(found, name) for name in STATE_FIELDS},
        "bpipe_differing_sizes": bool(_differing(found)),
    }


def _fp8(found: Options) -> dict[str, Any]:
    if found.fp8_format is None:
        return {}
    if found.fp8_recipe == "custom":
        raise ValueError(f"--fp8-recipe custom is not modelled: give one of {', '.join(RECIPES)}")
    return {"fp8_format": found.fp8_format, "fp8_recipe": found.fp8_recipe, "fp8_param_gather": found.fp8_param_gather}


def _differing(found: Options) -> list[str]:
    """Return the flags by which micro-batches may differ in size."""
    return [
        flag_of(name)
        for name in ("bpipe_differing_sizes", "sft", "dataloader_inter_document_masking")
        if getattr(found, name)
    ]


def _sizes_that_differ(found: Options, notes: list[str]) -> None:
    """What is assumed of them."""
    given = _differing(found)
    if given:
        notes.append(f"{given[0]}: micro-batches may differ in size; each is predicted as one full sequence")


def _attention(found: Options, notes: list[str]) -> str:
    backend = found.attention_backend
    if backend == "unfused" or (found.transformer_impl == "local" and not found.use_flash_attn):
        return "unfused"
    if backend in ("auto", "fused"):
        notes.append(f"--attention-backend {backend} is predicted as flash")
    return "unfused" if backend == "local" else "flash"


def _recomputation(found: Options, notes: list[str]) -> tuple[str, dict[str, str]]:
    """Return what is recomputed, and what of it is not modelled.

    Raises ValueError where flags contradict each other.
    """
    granularity, modules = found.recompute_granularity, found.recompute_modules or ["core_attn"]
    if found.recompute_activations:
        if granularity == "full":
            raise ValueError(
                "--recompute-activations and --recompute-granularity full exclude each other: give one of them"
            )
        granularity = "selective"
    if granularity == "selective":
        return _recomputed_parts(modules, found.num_experts is not None, notes)
    if granularity != "full":
        return granularity or "none", {}
    if found.recompute_method is None:
        raise ValueError("--recompute-granularity full needs --recompute-method")
    if found.recompute_num_layers is None:
        return "full", {} if found.recompute_method == "uniform" else {
            "recompute": "--recompute-method block without --recompute-num-layers"
        }
    return Recompute(method=found.recompute_method, num_layers=found.recompute_num_layers).text, {}


def _recomputed_parts(modules: list[str], has_experts: bool, notes: list[str]) -> tuple[str, dict[str, str]]:
    """The same of parts of layers."""
    if not set(modules) <= set(MODULES):
        return "selective", {"recompute": f"--recompute-modules {' '.join(modules)}"}
    if "moe" in modules and not has_experts:
        # Megatron takes the name, and it does nothing.
        notes.append("--recompute-modules moe recomputes nothing in a model without experts")
        modules = [name for name in modules if name != "moe"]
    return Recompute(tuple(modules)).text, {}
