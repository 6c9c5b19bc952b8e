"""A `Setup` from options, named as in `bpipe simulate`, and from a launch of Megatron.

An option that is given replaces what the launch says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from bpipe.balance.config import BALANCES, BalanceConfig
from bpipe.config.flags.configurations import DEFAULTS, PREDICTED, SIZES, SWITCHED
from bpipe.config.flags.flag import Options
from bpipe.config.flags.schedules import schedule_fields
from bpipe.config.flags.values import TIME
from bpipe.config.launch.megatron_command import Reading, read_settings, split_command
from bpipe.config.launch.megatron_settings import OF_A_CPU, MegatronSettings
from bpipe.predict.cluster import Cluster, parse_cluster
from bpipe.predict.costs import lengths_of_equal_seconds
from bpipe.predict.hugging_face import find_model
from bpipe.predict.layer_variants import Routing
from bpipe.predict.layout import Setup, split_layers
from bpipe.predict.model import Model
from bpipe.predict.slices import slice_bounds
from bpipe.predict.training import FP8_RECIPES, IMPLEMENTATIONS, STATE_FIELDS, SWITCHES, Fp8, StateTypes, Switches
from bpipe.schedule.families.families import FAMILIES, default_family
from bpipe.schedule.hosts import PAIR
from bpipe.schedule.layout import EVEN
from bpipe.schedule.program import Exchange

_SIZES = tuple(flag.field for flag in SIZES)
_SETUP_FIELDS = {field.name for field in fields(Setup)}
# Fields of a Model that only a launch can set.
PARTS = ("window", "window_pattern", "experts", "latent", "hybrid", "no_positions")
# Routing of tokens to experts: options, and fields of `Routing`.
ROUTING = {
    "expert": "expert",
    "expert_tensor": "expert_tensor",
    "dispatcher": "dispatcher",
    "capacity_factor": "capacity",
}
# Every field of a configuration with its value when unset.
_UNSET = {flag.field: False if flag.is_switch else None for group in PREDICTED for flag in group.flags}


def model_of(options: Options) -> Model:
    """Return the model that the flags describe. Raises ValueError if they describe none."""
    changes: dict[str, Any] = {
        name: getattr(options, name)
        for name in (*_SIZES, "sequence", "vocabulary")
        if getattr(options, name) is not None
    }
    changes |= {name: getattr(options, name) for name in PARTS if getattr(options, name, None) is not None}
    changes |= {field: value for name, (field, value) in SWITCHED.items() if getattr(options, name)}
    if options.model is not None:
        return replace(find_model(options.model), **changes)
    needed = ("num_layers", "hidden_size", "num_attention_heads", "sequence", "vocabulary")
    missing = [_name(name) for name in needed if name not in changes]
    if missing:
        raise ValueError(f"no --model, and {', '.join(missing)} missing: name a model, or give all its sizes")
    heads, hidden = changes["num_attention_heads"], changes["hidden_size"]
    if hidden % heads and "kv_channels" not in changes:
        raise ValueError(
            f"--num-attention-heads {heads} does not divide --hidden-size {hidden}: give other numbers, or "
            f"--kv-channels, the size of a head"
        )
    sizes = {
        "name": "custom",
        "num_query_groups": heads,
        "kv_channels": hidden // heads,
        "ffn_hidden_size": 4 * hidden,
        **changes,
    }
    return Model(**{field.name: sizes[field.name] for field in fields(Model) if field.name in sizes})


def filled(options: Options, reading: Reading | None, needed: tuple[str, ...]) -> Options:
    """Return the options, filled from the launch, then with defaults. Raises ValueError for what is missing."""
    values = vars(options)
    if reading is None:
        missing = [_name(name) for name in needed if values[name] is None]
        if missing:
            raise ValueError(
                f"{', '.join(missing)} missing: give {'them' if missing[1:] else 'it'}, or a launch of Megatron after -- "
                "or with --launch"
            )
    else:
        for name, feature in reading.unmodelled.items():
            if values.get(name) is None:
                raise ValueError(f"{feature} is not modelled: choose what to predict instead with {_name(name)}")
    launch = _said(values, {} if reading is None else reading.options)
    result = {
        **DEFAULTS,
        **launch,
        **{name: value for name, value in values.items() if value is not None and value is not False},
    }
    if reading and options.model is None and "vocabulary" not in result:
        raise ValueError("only the tokenizer of the launch knows the size of the vocabulary: give --vocab-size N")
    return Options(**{**values, **result})


def _said(values: Mapping[str, Any], launch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the launch, without layers and chunks if `values` set other stages."""
    rest = dict(launch)
    for name in ("pipeline", "chunks"):
        if values.get(name) is not None and values[name] != rest.get(name):
            for cut in ("layers", "chunks", "mtp_stage"):
                rest.pop(cut, None)
    if values.get("chunks") is None:
        chunks = rest.get("chunks", DEFAULTS["chunks"])
        fewest = _fewest_chunks(values.get("schedule"), rest.get("schedule"), chunks)
        if fewest != chunks:
            rest.pop("layers", None)
            rest.pop("mtp_stage", None)
            rest["chunks"] = fewest
    return rest


def _fewest_chunks(override: object, launched: object, chunks: int) -> int:
    """Return `chunks`, or the schedule's fewest chunks if it cannot have that many.

    What the trainer refuses in the launch itself stays as it is: a wrong number of chunks, or Megatron's interleaved
    schedule with one chunk.
    """
    family = FAMILIES.get(str(override or launched))
    if family is None or chunks in family.chunks(chunks):
        return chunks
    if override is None and (chunks > 1 or family.exchange is not Exchange.POSTED):
        return chunks
    return family.min_chunks


def _name(field: str) -> str:
    return next(flag.name for group in PREDICTED for flag in group.flags if flag.field == field)


def routing_of(options: Options) -> Routing:
    """Return the routing of the launch, changed by options."""
    values = {field: getattr(options, name, None) for name, field in ROUTING.items()}
    changes: dict[str, Any] = {field: value for field, value in values.items() if value is not None}
    changes |= {"padded": True} if getattr(options, "pad_to_capacity", False) else {}
    return replace(getattr(options, "routing", None) or Routing(), **changes)


def fp8_of(options: Options) -> Fp8 | None:
    """Return FP8 settings, or None without a format. Raises ValueError for settings without a format."""
    recipe, gathers = getattr(options, "fp8_recipe", None), getattr(options, "fp8_param_gather", False)
    if getattr(options, "fp8_format", None) is None:
        if gathers:
            raise ValueError("--fp8-param-gather needs FP8: give --fp8-format, too, or leave it out")
        return None
    return Fp8(options.fp8_format, recipe or FP8_RECIPES[0], bool(gathers))


def training_of(options: Options) -> dict[str, Any]:
    """Return the fields of a `Training` that options name differently."""
    types = {name: getattr(options, name, None) for name in STATE_FIELDS}
    return {
        "distributed_optimizer": not options.no_distributed_optimizer,
        "switches": Switches(**{name: getattr(options, name) for name in SWITCHES}),
        "routing": routing_of(options),
        "transformer_impl": getattr(options, "transformer_impl", IMPLEMENTATIONS[0]),
        "fp8": fp8_of(options),
        "state_types": StateTypes(**{name: value for name, value in types.items() if value is not None}),
    }


def setup_of(options: Options, cluster: Cluster) -> Setup:
    """Return the setup of filled options. Without a global batch each replica has one micro-batch, as in Megatron."""
    model = model_of(options)
    schedule = options.schedule or default_family(options.chunks)
    stages = options.pipeline * options.chunks
    layers = options.layers or split_layers(model.num_layers, stages, allow_uneven=True)
    if layers is None:
        sizes = f"--pp {options.pipeline} with {options.chunks} chunks"
        raise ValueError(f"{sizes} makes {stages} stages for {model.num_layers} layers: every stage needs one")
    replicas = max(1, cluster.num_devices // (options.tensor * options.context * options.pipeline))
    # Fields of a setup that options name differently.
    others = {
        "model": model,
        "cluster": cluster,
        "global_batch": options.global_batch or options.micro_batch * replicas,
        "sequence": model.sequence,
        "layers": layers,
        "schedule": schedule,
        "num_chunks": options.chunks,
        "sequence_parallel": not options.no_sequence_parallel,
        **schedule_fields(vars(options)),
        "balance": _balance_of(options),
        **training_of(options),
    }
    is_timed = getattr(options, "slice_lengths", EVEN) == TIME
    if is_timed:
        others["slice_lengths"] = EVEN
    values = {**vars(options), **others}
    setup = Setup(**{name: value for name, value in values.items() if name in _SETUP_FIELDS})
    if is_timed:
        setup = replace(setup, slice_lengths=lengths_of_equal_seconds(setup))
    slice_bounds(setup)
    return setup


def _balance_of(options: Options) -> BalanceConfig | None:
    bounds, hosts = getattr(options, "bound", None), getattr(options, "hosts", PAIR)
    words = hosts if isinstance(hosts, str) else " ".join(hosts)
    flags = [*(["--bound"] if bounds is not None else []), *([f"--hosts {words}"] if hosts != PAIR else [])]
    if flags and options.balance == BALANCES[0]:
        raise ValueError(f"{flags[0]} says how to balance: give --balance bpipe, too, or leave it out")
    return None if options.balance == BALANCES[0] else BalanceConfig(bounds, hosts=hosts)


def setup_from(
    launch: Sequence[str] | MegatronSettings, cluster: str | Cluster, vocabulary: int, kernels: str
) -> Setup:
    """Return the setup of a launch's words or settings on this cluster, as `bpipe simulate -- WORDS` predicts it.

    Raises ValueError for what cannot be predicted.
    """
    settings = launch if isinstance(launch, MegatronSettings) else MegatronSettings.from_flags(split_command(launch)[1])
    values = {**_UNSET, "vocabulary": vocabulary, "kernels": kernels}
    options = filled(Options(**values), read_settings(settings.without(OF_A_CPU if kernels == "cpu" else ())), ())
    return setup_of(options, parse_cluster(cluster) if isinstance(cluster, str) else cluster)
