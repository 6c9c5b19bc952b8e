"""Candidates as rows of tables, by column, and as the JSON of `bpipe simulate` and `bpipe plan` (docs/planning.md)."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from bpipe.balance.config import name_of
from bpipe.plan.predict import Candidate
from bpipe.predict.cluster import gib_text, range_words
from bpipe.predict.layout import Setup
from bpipe.predict.memory import RankMemory
from bpipe.predict.slices import lengths_of, slice_bounds
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.families.family import TAKEN
from bpipe.schedule.hosts import ALL, HOST, PAIR, POOL
from bpipe.schedule.layout import EVEN

# Half of the published runs of one model are further from their prediction than this, in either direction
# (docs/validation.md).
CLEARLY = 1.05

# What follows "balanced" in a row or a heading.
HOSTS = {PAIR: "", POOL: " in a pool", HOST: " with node memory", ALL: " in a pool with node memory"}


# The letters of `describe`.
_LETTERS = {
    "t": "tensor",
    "c": "context",
    "p": "pipeline",
    "d": "data parallelism",
    "ep": "expert parallelism",
    "etp": "its tensor parallelism",
    "b": "micro-batch size",
    "v": "chunks per rank",
    "g": "micro-batches per group",
    "k": "slices per sequence",
}
EXPOSED = "exposed: time in which computation waits for evictions and loads"


# The cell of a row by column title; the second argument is the row to compare with.
COLUMNS: dict[str, Callable[[Candidate, Candidate], str]] = {
    "": lambda row, base: row.name,
    "what": lambda row, base: row.name,
    "iteration s": lambda row, base: f"{row.iteration_s:.3f}",
    "range s": lambda row, base: range_words(row.setup.error_bars, row.iteration_s),
    "speed-up": lambda row, base: "" if row is base else f"{base.iteration_s / row.iteration_s:.2f}x",
    "ratio": lambda row, base: f"{row.iteration_s / base.iteration_s:.2f}",
    "MFU %": lambda row, base: f"{100 * row.mfu:.2f}",
    "bubble %": lambda row, base: f"{100 * row.timing.bubble_of_makespan:.1f}",
    "exposed s": lambda row, base: f"{max(row.timing.exposed_s):.3f}",
    "peak GiB": lambda row, base: gib_text(row.peak_bytes),
    "saved GiB": lambda row, base: gib_text(base.peak_bytes - row.peak_bytes),
    "of GiB": lambda row, base: gib_text(row.limit_bytes),
    "evictions": lambda row, base: str(sum(row.transfers)),
    "state": lambda row, base: row.state,
    "configuration": lambda row, base: describe(row.setup),
}


def cells(titles: Iterable[str], rows: Sequence[Candidate], base: Candidate | None = None) -> list[list[str]]:
    """Return the cells of each row, compared with `base`, or else with the first row."""
    return [[COLUMNS[title](row, base or rows[0]) for title in titles] for row in rows]


def is_level(seconds: float, other: float) -> bool:
    """Whether predictions cannot tell `seconds` to be longer than `other`."""
    return seconds < CLEARLY * other


def grid_of(setup: Setup) -> str:
    """Return the parallel sizes of a setup as text."""
    context = (
        f" c={setup.context}{'' if setup.cp_comm_type == 'p2p' else f' by {setup.cp_comm_type}'}"
        if setup.context > 1
        else ""
    )
    return f"t={setup.tensor}{context} p={setup.pipeline} d={setup.data}"


def describe(setup: Setup) -> str:
    """Describe one configuration in a few words."""
    chunks = f" v={setup.num_chunks}" if setup.num_chunks > 1 else ""
    group = f" g={setup.group_size}" if setup.group_size else ""
    lengths = "" if setup.slice_lengths == EVEN else " uneven"
    slices = f" k={setup.slices}{lengths}" if setup.slices > 1 else ""
    delay = f" delay={setup.delay}" if setup.delay else ""
    halves = " W at once" if setup.splits and not setup.keeps_halves else ""
    balance = f" balanced{HOSTS[setup.hosts]}" if setup.balance is not None else ""
    layers = f" layers {min(setup.layers)}-{max(setup.layers)}" if len(set(setup.layers)) > 1 else ""
    shards = f" vocabulary {setup.vocabulary.value}{' and input' * setup.input_shards}" if setup.is_sharded else ""
    divided = f" etp={setup.expert_tensor}" if setup.expert_tensor > 1 else ""
    experts = f" ep={setup.routing.expert}{divided}" if setup.model.experts else ""
    grid = f"{grid_of(setup)}{experts} b={setup.micro_batch}"
    return f"{grid} recompute {setup.recompute} {setup.schedule}{chunks}{group}{delay}{slices}{layers}{shards}{halves}{balance}"


def legend(setups: Iterable[Setup]) -> str:
    """Return the meaning of the letters in the descriptions of these configurations."""
    letters = re.findall(r"\b([a-z]+)=", " ".join(map(describe, setups)))
    return ", ".join(f"{letter}: {_LETTERS[letter]}" for letter in _LETTERS if letter in letters)


# Fields of every rank's memory.
_OF_MEMORY = (
    *("weights_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "hosted_bytes", "working_bytes"),
    *("fragmentation_bytes", "overhead_bytes", "peak_bytes", "limit_bytes", "fits", "is_tight"),
)


def configuration(setup: Setup) -> dict[str, Any]:
    """Return the configuration, named as the command's flags are, without what does not apply to it."""
    cluster, family, hybrid = setup.cluster, FAMILIES[setup.schedule], setup.model.hybrid
    bounds = None if setup.balance is None else setup.balance.bounds
    experts, routing = setup.model.experts, {**asdict(setup.routing), "expert_tensor": setup.expert_tensor}
    has_groups = setup.group_size is not None or (family.takes_groups and family.splits)
    types = setup.state_types
    return {
        "model": setup.model.name,
        "cluster": f"{cluster.device.name}:{cluster.num_nodes}x{cluster.devices_per_node}",
        **_if(cluster.nodes_per_domain > 1, gpus_per_domain=cluster.devices_per_domain),
        "tensor": setup.tensor,
        **_if(setup.context > 1, context=setup.context, cp_comm_type=setup.cp_comm_type),
        **_same(setup, "pipeline data micro_batch global_batch num_microbatches sequence"),
        "vocabulary": setup.padded_vocabulary,
        **_if(experts is not None, **routing),
        "layers": list(setup.layers),
        **({} if hybrid is None else {"pattern": hybrid.with_stages(setup.layers)}),
        **_same(setup, "recompute attention schedule"),
        "chunks": setup.num_chunks,
        "balance": name_of(setup.balance),
        **({} if bounds is None else {"bound": list(bounds)}),
        **_if(setup.hosts != PAIR, hosts=setup.hosts),
        "precision": setup.precision,
        **({} if setup.fp8 is None else {f"fp8_{name}": value for name, value in asdict(setup.fp8).items()}),
        **_if(types.use_precision_aware_optimizer, **asdict(types)),
        **_if(
            setup.model.further is not None,
            mtp_num_layers=setup.model.mtp_num_layers,
            mtp_use_repeated_layer=setup.model.mtp_use_repeated_layer,
            mtp_stage=setup.further_stage,
        ),
        **_same(setup, "distributed_optimizer sequence_parallel kernels"),
        **_if(cluster.factor != 1, calibration_factor=cluster.factor),
        **asdict(setup.switches),
        **_if(has_groups, group=setup.turn_size),
        **{name: getattr(setup, name) for name in TAKEN if name not in ("group_size", "slices") and family.takes(name)},
        **({} if setup.slices == 1 else {"slices": setup.slices, "slice_lengths": lengths_of(slice_bounds(setup))}),
        **_if(family.splits, keep_weights_halves=setup.keep_weights_halves),
        **_if(setup.is_sharded, vocabulary_parallel=setup.vocabulary.value, input_shards=setup.input_shards),
    }


def _same(setup: Setup, names: str) -> dict[str, Any]:
    return {name: getattr(setup, name) for name in names.split()}


def _if(holds: bool, **values: Any) -> dict[str, Any]:
    return values if holds else {}


def document(row: Candidate) -> dict[str, Any]:
    """Return one prediction as JSON values. `stages` has one entry for each pipeline rank."""
    setup, timing = row.setup, row.timing
    return {
        "iteration_time_s": timing.iteration_s,
        "range_s": row.range_s,
        "simulated_microbatches": timing.simulated,
        "mfu_percent": 100 * row.mfu,
        "peak_flops_per_s": setup.peak_flops_per_s,
        "bubble_percent": 100 * timing.bubble_of_makespan,
        "exposed_transfer_s": max(timing.exposed_s),
        "fits": row.fits,
        "balanced": setup.balance is not None,
        "stages": [_stage(row, rank) for rank in row.memory],
        "configuration": configuration(setup),
    }


def _stage(row: Candidate, memory: RankMemory) -> dict[str, Any]:
    return {
        "stage": memory.rank,
        **{name: getattr(memory, name) for name in _OF_MEMORY},
        "evictions": row.transfers[memory.rank],
        "exposed_transfer_s": row.timing.exposed_s[memory.rank],
    }
