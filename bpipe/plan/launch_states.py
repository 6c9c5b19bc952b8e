"""The state of every feature of a launch: supported, guarded or refused, by the trainer's table.

A launch without any flag of this project is judged as with `--bpipe`.
"""

from collections.abc import Sequence
from dataclasses import replace

from bpipe.config.features.feature import Feature, Settings, State, has_experts
from bpipe.config.features.queries import by_state, features_of, settings_of
from bpipe.config.features.table import PLACED, SHARDED, SLICED
from bpipe.plan.space import is_in_order
from bpipe.schedule.families.families import FAMILIES, default_family
from bpipe.schedule.program import Exchange

# Features that train bit-identically with stock Megatron and with this project (tests/gloo).
_PARTS, _FOUND = "every rank moves its own part", "its storages are found as any others"
_KEPT, _SIZES = "what is kept moves, what is computed again does not", "the size of each micro-batch travels with it"
SUPPORTED: tuple[Feature, ...] = tuple(
    Feature(name, applies, reason, "", State.SUPPORTED, proof)
    for name, applies, reason, proof in (
        (
            "virtual stages",
            lambda s: s.num_layers_per_virtual_pipeline_stage or s.num_virtual_stages_per_pipeline_rank,
            "every chunk's activations move to the same partner",
            "interleaved_m8",
        ),
        ("tensor parallelism", lambda s: (s.tensor_model_parallel_size or 1) > 1, _PARTS, "tensor"),
        ("sequence parallelism", lambda s: s.sequence_parallel, _PARTS, "sequence"),
        ("context parallelism", lambda s: (s.context_parallel_size or 1) > 1, _PARTS, "context"),
        (
            "expert parallelism",
            lambda s: has_experts(s) and (s.expert_model_parallel_size or 1) > 1,
            "every rank moves its own experts' part",
            "expert_parallel",
        ),
        (
            "experts without a capacity",
            lambda s: has_experts(s) and not s.moe_pad_expert_input_to_capacity,
            _SIZES,
            "dropless",
        ),
        ("selective recomputation", lambda s: s.recompute_granularity == "selective", _KEPT, "selective"),
        ("full recomputation", lambda s: s.recompute_granularity == "full", _KEPT, "full_uniform"),
        ("latent attention", lambda s: s.multi_latent_attention, _FOUND, "latent_attention"),
        ("multi-token prediction", lambda s: s.mtp_num_layers, _FOUND, "multi_token_prediction"),
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
        ("packed sequences", lambda s: s.sft, _SIZES, "packed"),
        (
            "variable sequence lengths",
            lambda s: s.variable_seq_lengths,
            "every message between stages carries its shape, and every transfer its size",
            "lengths",
        ),
    )
)


def states_of_launch(flags: Sequence[str]) -> list[Feature]:
    """Return the features of a launch, the worst first. Raises ValueError for a schedule file."""
    settings = Settings(settings_of(flags))
    ours = any(flag.startswith("--bpipe") for flag in flags)
    balance = bool(settings.bpipe) or not ours
    slices = _whole(settings.bpipe_slices)
    is_sharded = settings.bpipe_vocabulary is not None
    is_placed, needs_loop = _loop_of(settings)
    features = [
        *features_of(settings, balance, needs_loop or is_sharded or slices > 1 or bool(settings.bpipe_executor)),
        *(
            feature
            for table, wanted in ((PLACED, is_placed), (SHARDED, is_sharded), (SLICED, slices > 1), (SUPPORTED, True))
            if wanted
            for feature in table
            if feature.applies(settings)
        ),
    ]
    if settings.bpipe_strict:
        features = [replace(row, state=State.REFUSED) if row.state is State.GUARDED else row for row in features]
    return by_state(dict.fromkeys(features))


def _whole(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 1


def worst(features: Sequence[Feature]) -> State:
    """Return the state of a launch: that of its worst feature."""
    return max((feature.state for feature in features), key=[*State].index, default=State.SUPPORTED)


def _loop_of(settings: Settings) -> tuple[bool, bool]:
    """Whether stages are placed differently from Megatron's, and whether the schedule needs our own loop."""
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
