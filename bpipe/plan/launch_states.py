"""Say in which state every feature of a launch is: supported, guarded or refused.

In: a launch's flags. Out: the rows of the trainer's own table (`bpipe.config.features`) that apply, the worst first, and of
what was trained the commonest. A launch
without any flag of this project's is judged as with `--bpipe`. Predicts nothing, and imports no Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bpipe.config.features.feature import Feature, Settings, State, has_experts
from bpipe.config.features.queries import by_state, features_of, settings_of
from bpipe.config.features.table import PLACED, SHARDED, SLICED
from bpipe.plan.space import is_in_order
from bpipe.schedule.families.families import FAMILIES, default_family
from bpipe.schedule.layout import REDISTRIBUTE
from bpipe.schedule.program import Exchange

# What was trained by stock Megatron and with this project, bit by bit: tests/gloo has the proof.
SUPPORTED: tuple[Feature, ...] = tuple(
    Feature(name, applies, reason, "", State.SUPPORTED, proof)
    for name, applies, reason, proof in (
        (
            "virtual stages",
            lambda s: s.num_layers_per_virtual_pipeline_stage or s.num_virtual_stages_per_pipeline_rank,
            "every chunk's activations move to the same partner",
            "interleaved_m8",
        ),
        (
            "tensor parallelism",
            lambda s: (s.tensor_model_parallel_size or 1) > 1,
            "every rank moves its own part",
            "tensor",
        ),
        ("sequence parallelism", lambda s: s.sequence_parallel, "every rank moves its own part", "sequence"),
        (
            "context parallelism",
            lambda s: (s.context_parallel_size or 1) > 1,
            "every rank moves its own part",
            "context",
        ),
        (
            "expert parallelism",
            lambda s: has_experts(s) and (s.expert_model_parallel_size or 1) > 1,
            "every rank moves its own experts' part",
            "expert_parallel",
        ),
        (
            "experts without a capacity",
            lambda s: has_experts(s) and not s.moe_pad_expert_input_to_capacity,
            "the size of each micro-batch travels with it",
            "dropless",
        ),
        (
            "selective recomputation",
            lambda s: s.recompute_granularity == "selective",
            "what is kept moves, what is computed again does not",
            "selective",
        ),
        (
            "full recomputation",
            lambda s: s.recompute_granularity == "full",
            "what is kept moves, what is computed again does not",
            "full_uniform",
        ),
        (
            "latent attention",
            lambda s: s.multi_latent_attention,
            "its storages are found as any others",
            "latent_attention",
        ),
        (
            "multi-token prediction",
            lambda s: s.mtp_num_layers,
            "its storages are found as any others",
            "multi_token_prediction",
        ),
        (
            "hybrid models",
            lambda s: s.hybrid_layer_pattern,
            "a pattern of layers is dealt out by stage",
            "test_a_pattern_is_dealt_out_by_stage",
        ),
        (
            "the distributed optimizer",
            lambda s: s.use_distributed_optimizer,
            "gradients, weights and the optimizer's state never move",
            "distributed_optimizer",
        ),
        ("packed sequences", lambda s: s.sft, "the size of each micro-batch travels with it", "packed"),
        (
            "variable sequence lengths",
            lambda s: s.variable_seq_lengths,
            "every message between stages carries its shape, and every transfer its size",
            "lengths",
        ),
    )
)


def states_of_launch(flags: Sequence[str]) -> list[Feature]:
    """Return the features of a launch, the worst first.

    Raises ValueError for a schedule of a file, whose stages are not looked at here.
    """
    settings = Settings(settings_of(flags))
    ours = any(flag.startswith("--bpipe") for flag in flags)
    balance = bool(settings.bpipe) or not ours
    slices = _whole(settings.bpipe_slices)
    sharded = settings.bpipe_vocabulary not in (None, REDISTRIBUTE)
    placed, own = _loop_of(settings)
    found = [
        *features_of(settings, balance, own or sharded or slices > 1 or bool(settings.bpipe_executor)),
        *(one for table in _tables(placed, sharded, slices > 1) for one in table if one.applies(settings)),
        *(one for one in SUPPORTED if one.applies(settings)),
    ]
    if settings.bpipe_strict:
        found = [replace(one, state=State.REFUSED) if one.state is State.GUARDED else one for one in found]
    return by_state(found)


def _whole(value: object) -> int:
    """A number of a launch; 1 where it says none."""
    return value if isinstance(value, int) and value > 0 else 1


def worst(features: Sequence[Feature]) -> State:
    """Return the state of a launch: that of its worst feature."""
    return max((one.state for one in features), key=[*State].index, default=State.SUPPORTED)


def _tables(placed: bool, sharded: bool, sliced: bool) -> list[tuple[Feature, ...]]:
    return [table for table, wanted in ((PLACED, placed), (SHARDED, sharded), (SLICED, sliced)) if wanted]


def _loop_of(settings: Settings) -> tuple[bool, bool]:
    """Return whether stages stand otherwise than Megatron has them, and whether our own loop runs for the schedule's
    sake."""
    ranks = _whole(settings.pipeline_model_parallel_size)
    chunks = _whole(settings.num_virtual_stages_per_pipeline_rank)
    if settings.num_layers_per_virtual_pipeline_stage:
        chunks = _whole(settings.num_layers) // (ranks * _whole(settings.num_layers_per_virtual_pipeline_stage)) or 1
    name = settings.bpipe_schedule or default_family(chunks)
    if name not in FAMILIES:
        raise ValueError(
            f"--bpipe-schedule {name}: what is refused depends on where its stages are, but a schedule file is not "
            "read here: name a family, or start the training run"
        )
    return not is_in_order(name, ranks, FAMILIES[name].min_chunks), FAMILIES[name].exchange is Exchange.POSTED
