"""Write a configuration as flags of Megatron 0.19 and of this project.

The size of the vocabulary is for a tokenizer that has none. Data, learning rate and iterations are left to the user.
Imports no Megatron; a test holds the flags to the real parser.
"""

import math
from dataclasses import asdict

from bpipe.balance.config import BalanceConfig
from bpipe.config.flags.budgets import budget_text
from bpipe.config.flags.launches import words
from bpipe.config.launch.layer_flags import flags_of_hybrid, flags_of_parts
from bpipe.config.launch.layer_split import split_flags
from bpipe.predict.layout import Setup
from bpipe.predict.recompute import Recompute
from bpipe.predict.training import CUDA_GRAPHS, SWITCHES, StateTypes
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
            "swiglu": model.gated,
            "squared_relu": model.squared_relu,
            "disable_bias_linear": not model.linear_bias,
            "add_qkv_bias": model.qkv_bias,
            "qk_layernorm": model.qk_norm,
            "untie_embeddings_and_output_weights": not model.tied_embedding,
            "mtp_num_layers": model.mtp_num_layers,
            "mtp_use_repeated_layer": model.mtp_use_repeated_layer,
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
