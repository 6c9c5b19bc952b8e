"""Predictions as the JSON of `bpipe simulate` and `bpipe plan` (docs/planning.md)."""

from dataclasses import asdict
from typing import Any

from bpipe.balance.config import name_of
from bpipe.plan.predict import Candidate
from bpipe.predict.layout import Setup
from bpipe.predict.memory import RankMemory
from bpipe.predict.slice_lengths import lengths_of
from bpipe.predict.slices import slice_bounds
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.families.family import TAKEN
from bpipe.schedule.hosts import PAIR

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
        "pipeline": setup.pipeline,
        "data": setup.data,
        "micro_batch": setup.micro_batch,
        "global_batch": setup.global_batch,
        "num_microbatches": setup.num_microbatches,
        "sequence": setup.sequence,
        "vocabulary": setup.padded_vocabulary,
        **_if(experts is not None, **routing),
        "layers": list(setup.layers),
        **({} if hybrid is None else {"pattern": hybrid.with_stages(setup.layers)}),
        "recompute": setup.recompute,
        "attention": setup.attention,
        "schedule": setup.schedule,
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
        "distributed_optimizer": setup.distributed_optimizer,
        "sequence_parallel": setup.sequence_parallel,
        "kernels": setup.kernels,
        **_if(cluster.factor != 1, calibration_factor=cluster.factor),
        **asdict(setup.switches),
        **_if(has_groups, group=setup.turn_size),
        **{name: getattr(setup, name) for name in TAKEN if name not in ("group_size", "slices") and family.takes(name)},
        **({} if setup.slices == 1 else {"slices": setup.slices, "slice_lengths": lengths_of(slice_bounds(setup))}),
        **_if(family.splits, keep_weights_halves=setup.keep_weights_halves),
        **_if(setup.is_sharded, vocabulary_parallel=setup.vocabulary.value, input_shards=setup.input_shards),
    }


def _if(holds: bool, **values: Any) -> dict[str, Any]:
    return values if holds else {}


def document(row: Candidate) -> dict[str, Any]:
    """Return one prediction as JSON values. `stages` has one entry for each pipeline rank."""
    setup, timing, bandwidth = row.setup, row.timing, row.bandwidth
    return {
        "iteration_time_s": timing.iteration_s,
        "range_s": row.range_s,
        "simulated_microbatches": timing.simulated,
        "mfu_percent": 100 * row.mfu,
        "mfu_formula": row.formula,
        "peak_flops_per_s": setup.peak_flops_per_s,
        "bubble_percent": 100 * timing.bubble_of_makespan,
        "bubble_of_pipeline_percent": 100 * timing.bubble_of_pipeline,
        "bubble_of_span_percent": 100 * timing.bubble_of_span,
        "exposed_transfer_s": max(timing.exposed_s),
        "transfer_bytes": bandwidth.transfer_bytes if bandwidth else 0,
        "required_bytes_per_s": bandwidth.required_bytes_per_s if bandwidth else 0,
        "required_steady_bytes_per_s": bandwidth.steady_bytes_per_s if bandwidth else 0,
        "available_bytes_per_s": bandwidth.available_bytes_per_s if bandwidth else None,
        "fits": row.fits,
        "balanced": setup.balance is not None,
        "stages": [_stage(row, rank) for rank in row.memory],
        **({"at_once": asdict(row.at_once)} if row.at_once else {}),
        "configuration": configuration(setup),
    }


def _stage(row: Candidate, memory: RankMemory) -> dict[str, Any]:
    return {
        "stage": memory.rank,
        **{name: getattr(memory, name) for name in _OF_MEMORY},
        "evictions": row.transfers[memory.rank],
        "exposed_transfer_s": row.timing.exposed_s[memory.rank],
    }
