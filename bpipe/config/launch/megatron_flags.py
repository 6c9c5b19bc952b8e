"""Write a configuration as flags of Megatron 0.19 and of this project.

The size of the vocabulary is for a tokenizer that has none. Data, learning rate and iterations are left to the user. A
row of a plan is launched by changes of a launch, or by the flags in `CHOSEN`; all others are the same in every row.
Imports no Megatron; a test holds the flags to the real parser.
"""

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import NamedTuple

from bpipe.balance.config import BalanceConfig
from bpipe.config.flags.configurations import SWITCHED
from bpipe.config.flags.trainer import READ, SAME, words
from bpipe.config.flags.values import budget_text
from bpipe.config.launch.layer_flags import (
    CHUNKS,
    COUNT_EMBEDDING,
    COUNT_LOSS,
    FIRST,
    LAST,
    LAYERS_OF_A_CHUNK,
    LAYOUT,
    OLD_PATTERN,
    PATTERN,
    flags_of_hybrid,
    flags_of_parts,
    split_flags,
)
from bpipe.config.launch.megatron_command import Reading
from bpipe.predict.layout import Setup
from bpipe.predict.recompute import Recompute
from bpipe.predict.training import CUDA_GRAPHS, SWITCHES, StateTypes, flag_of
from bpipe.schedule.families.families import default_family
from bpipe.schedule.families.family import TAKEN
from bpipe.schedule.hosts import PAIR
from bpipe.schedule.layout import EVEN

# Default of Megatron's --make-vocab-size-divisible-by.
_PADDED = 128


def megatron_flags(setup: Setup) -> list[str]:
    """Return the flags to add to the launch of `pretrain_gpt.py`."""
    return [*_model(setup), *flags_of_parts(setup), *flags_of_hybrid(setup), *_parallel(setup), *_memory(setup)]


def _model(setup: Setup) -> list[str]:
    model = setup.model
    grouped = model.num_query_groups != model.num_attention_heads
    position = "none" if model.no_positions else "rope"
    dropout = None if model.dropout else 0.0
    return words(
        {
            **{
                name: getattr(model, name)
                for name in ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels")
            },
            "group_query_attention": grouped,
            "num_query_groups": model.num_query_groups if grouped else None,
            "vocabulary": model.vocabulary,
            "sequence": setup.sequence,
            "max_position_embeddings": setup.sequence,
            "normalization": "RMSNorm" if model.rms_norm else "LayerNorm",
            "position_embedding_type": "learned_absolute" if model.learned_positions else position,
            "mtp_num_layers": model.mtp_num_layers,
            **{name: getattr(model, field) is value for name, (field, value) in SWITCHED.items() if name in SAME},
            "attention_dropout": dropout,
            "hidden_dropout": dropout,
        }
    )


def _parallel(setup: Setup) -> list[str]:
    cut = {
        "tensor": setup.tensor,
        "pipeline": setup.pipeline,
        "context": setup.context if setup.context > 1 else None,
        "cp_comm_type": setup.cp_comm_type if setup.context > 1 else None,
        "micro_batch": setup.micro_batch,
        "global_batch": setup.global_batch,
        "sequence_parallel": setup.tensor > 1 and setup.sequence_parallel,
    }
    # A hybrid model's pattern has the layers of stages.
    further = setup.model.mtp_num_layers or 0
    layers = split_flags(setup.layers, setup.pipeline, further, setup.mtp_stage) if setup.model.hybrid is None else []
    return [
        *words(cut),
        *layers,
        *words({"bpipe": setup.balance is not None}),
        *(() if setup.balance is None else _balance_flags(setup, setup.balance)),
        *_schedule_flags(setup),
    ]


def _balance_flags(setup: Setup, balance: BalanceConfig) -> list[str]:
    return words(
        {
            "hosts": None if balance.hosts == PAIR else balance.hosts,
            "bound": None if balance.bounds is None else ",".join(map(str, balance.bounds)),
            "memory": None if balance.activation_budget is None else budget_text(setup.limit_bytes),
        }
    )


def _schedule_flags(setup: Setup) -> list[str]:
    """Return flags of the schedule, as far as it is not the one that Megatron's own loops run."""
    lengths = setup.slice_lengths
    lengths_text = lengths if isinstance(lengths, str) else ",".join(map(str, lengths))
    # Megatron pads to a multiple of 128 per tensor-parallel rank, which not every number of ranks divides.
    pads = setup.is_sharded and _PADDED % setup.pipeline
    of_its_own = setup.schedule != default_family(setup.num_chunks)
    order = {
        name: None if getattr(setup, name) == option.default else getattr(setup, name) for name, option in TAKEN.items()
    }
    return words(
        {
            "slices": order.pop("slices"),
            "slice_lengths": None if lengths == EVEN else lengths_text,
            "vocabulary_parallel": setup.vocabulary.value if setup.is_sharded else None,
            "input_shards": setup.is_sharded and setup.input_shards,
            "make_vocab_size_divisible_by": math.lcm(_PADDED, setup.pipeline) if pads else None,
            "schedule": setup.schedule if of_its_own else None,
            **(order if of_its_own else {}),
            "keep_weights_halves": setup.keep_weights_halves
            if of_its_own and setup.splits and not setup.keeps_halves
            else None,
        }
    )


def _memory(setup: Setup) -> list[str]:
    fp8, types, is_captured = setup.fp8, setup.state_types, setup.cuda_graph_impl != CUDA_GRAPHS[0]
    values = {
        "attention_backend": "flash" if setup.attention == "flash" else "unfused",
        "transformer_impl": "local" if setup.transformer_impl == "local" else None,
        "cuda_graph_impl": setup.cuda_graph_impl if is_captured else None,
        **{name: setup.precision == name for name in ("bf16", "fp16")},
        "fp8_format": None if fp8 is None else fp8.format,
        "fp8_recipe": None if fp8 is None else fp8.recipe,
        "fp8_param_gather": fp8 is not None and fp8.param_gather,
        "use_distributed_optimizer": setup.distributed_optimizer,
        # Only what is not Megatron's default.
        **{name: value for name, value in asdict(types).items() if value != getattr(StateTypes(), name)},
        # One tensor-parallel rank has nothing to overlap, and Megatron refuses the flag.
        **{
            name: getattr(setup.switches, name) and (setup.tensor > 1 or name != "tp_comm_overlap") for name in SWITCHES
        },
    }
    # Without it Megatron refuses the graph: a replay cannot ask whether a loss is a number.
    no_check = ["--no-check-for-nan-in-loss-and-grad"] if is_captured else []
    return [*_recompute_flags(setup.recomputed), *words(values), *no_check]


def _recompute_flags(recompute: Recompute) -> list[str]:
    """Return recomputation flags; none where nothing is recomputed."""
    if recompute.method is not None:
        layers = {"recompute_method": recompute.method, "recompute_num_layers": recompute.num_layers}
        return words({"recompute_granularity": "full", **layers})
    return (
        words({"recompute_granularity": "selective", "recompute_modules": tuple(recompute.modules)})
        if recompute.modules
        else []
    )


_SPLIT = (LAYERS_OF_A_CHUNK, CHUNKS, LAYOUT, FIRST, LAST, PATTERN, OLD_PATTERN, COUNT_EMBEDDING, COUNT_LOSS)
_RECOMPUTED = (
    *("--recompute-granularity", "--recompute-method", "--recompute-num-layers", "--recompute-modules"),
    "--recompute-activations",
)
# A row without these leaves the launch's own: they are the user's as well.
_KEPT = ("--bpipe-min-bytes", "--bpipe-differing-sizes", "--make-vocab-size-divisible-by")
CHOSEN = frozenset(
    (
        *("--tensor-model-parallel-size", "--context-parallel-size", "--cp-comm-type", "--micro-batch-size"),
        *("--pipeline-model-parallel-size", "--sequence-parallel", "--expert-model-parallel-size"),
        *(
            "--expert-tensor-parallel-size",
            "--overlap-grad-reduce",
            "--overlap-param-gather",
            "--no-overlap-p2p-communication",
        ),
        *("--tp-comm-overlap", "--make-vocab-size-divisible-by", *_SPLIT, *_RECOMPUTED),
        *(flag for flag in READ if flag.startswith("--bpipe")),
    )
)

# Further flags that a change of a launch may have (`bpipe fit`); the search leaves them as they are.
_CHANGED = CHOSEN | {
    *("--use-distributed-optimizer", "--grad-reduce-in-bf16", "--fp8-param-gather"),
    *(flag_of(each.name) for each in fields(StateTypes)),
}

# A flag with its values.
Group = tuple[str, tuple[str, ...]]


class LaunchDifference(NamedTuple):
    """Difference of a launch and a row: flags that replace its own, and flags to leave out."""

    given: tuple[str, ...]
    left_out: tuple[str, ...]

    @property
    def text(self) -> str:
        parts = [
            f"{word} {shlex.join(flags)}" for word, flags in (("with", self.given), ("without", self.left_out)) if flags
        ]
        return f"the launch {' and '.join(parts) or 'as it is'}"


def groups(flags: Sequence[str]) -> list[Group]:
    """Return each flag with its values."""
    parts: list[tuple[str, list[str]]] = []
    for word in flags:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            parts.append((flag, [value] if equals else []))
        elif parts:
            parts[-1][1].append(word)
    return [(flag, tuple(values)) for flag, values in parts]


def _joined(parts: Sequence[Group]) -> tuple[str, ...]:
    return tuple(word for flag, values in parts for word in (flag, *values))


def chosen_flags(setup: Setup) -> tuple[str, ...]:
    """Return all flags of a row that the search chose."""
    return _joined([part for part in groups(megatron_flags(setup)) if part[0] in CHOSEN])


def common_flags(setup: Setup) -> tuple[str, ...]:
    """Return the flags that all rows of a plan have in common."""
    return _joined([part for part in groups(megatron_flags(setup)) if part[0] not in CHOSEN])


def difference(setup: Setup, reading: Reading) -> LaunchDifference:
    """Return the changes of a launch that give this setup."""
    same = _equal_parts(setup, reading)
    before = {flag: values for flag, values in groups(reading.flags) if flag in _CHANGED and flag not in same}
    after = {flag: values for flag, values in groups(megatron_flags(setup)) if flag in _CHANGED and flag not in same}
    replaced = [
        (flag, values) for flag, values in after.items() if not _means(before.get(flag, _default(flag)), values)
    ]
    kept = (*_KEPT, *(("--bpipe-cluster",) if "--bpipe-memory" in after else ()))
    left_out = [flag for flag in before if flag not in after and flag not in kept]
    return LaunchDifference(_joined(replaced), tuple(left_out))


def _means(words: tuple[str, ...] | None, values: tuple[str, ...]) -> bool:
    """Whether words mean these values: 70 is 70.0."""
    try:
        return words == values or [float(word) for word in words or ()] == [float(value) for value in values] != []
    except ValueError:
        return False


def _equal_parts(setup: Setup, reading: Reading) -> frozenset[str]:
    """Return the flags of layers and recomputation, if launch and row have the same, however they are written."""
    options = reading.options
    cut = (options.get("pipeline"), options.get("layers")) == (setup.pipeline, setup.layers)
    # Chunks that follow only from the launch's schedule change with it.
    stays = setup.num_chunks == 1 or options.get("schedule") == setup.schedule
    cut &= stays or any(flag in _SPLIT for flag, _ in groups(reading.flags))
    recomputed = options.get("recompute") == setup.recompute
    return frozenset((*(_SPLIT if cut else ()), *(_RECOMPUTED if recomputed else ())))


def _default(flag: str) -> tuple[str, ...] | None:
    """Return the values that a launch has without the flag; None if there is no default."""
    row = READ.get(flag)
    if row is None or row.is_switch or row.default is None:
        return None
    return tuple(row.default) if isinstance(row.default, list) else (str(row.default),)
