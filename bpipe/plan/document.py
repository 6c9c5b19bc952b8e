"""Write predictions as the JSON that `bpipe simulate` and `bpipe plan` promise (docs/planning.md).

In: a prediction. Out: plain values.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bpipe.balance.config import name_of
from bpipe.plan.predict import SetupPrediction
from bpipe.predict.layout import Setup
from bpipe.predict.memory import RankMemory
from bpipe.predict.slice_lengths import lengths_of
from bpipe.predict.slices import slice_bounds
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.hosts import PAIR


def configuration(setup: Setup) -> dict[str, Any]:
    """Return the configuration, named as the command's flags are; what only some schedules take is there where they
    do."""
    return {
        "model": setup.model.name,
        "cluster": f"{setup.cluster.device.name}:{setup.cluster.num_nodes}x{setup.cluster.devices_per_node}",
        **_domain(setup),
        "tensor": setup.tensor,
        **_context(setup),
        "pipeline": setup.pipeline,
        "data": setup.data,
        "micro_batch": setup.micro_batch,
        "global_batch": setup.global_batch,
        "num_microbatches": setup.num_microbatches,
        "sequence": setup.sequence,
        "vocabulary": setup.padded_vocabulary,
        **({**asdict(setup.routing), "expert_tensor": setup.expert_tensor} if setup.model.experts else {}),
        "layers": list(setup.layers),
        **_pattern(setup),
        "recompute": setup.recompute,
        "attention": setup.attention,
        "schedule": setup.schedule,
        "chunks": setup.num_chunks,
        "balance": name_of(setup.balance),
        **_balance(setup),
        "precision": setup.precision,
        **_fp8(setup),
        **(asdict(setup.state_types) if setup.state_types.use_precision_aware_optimizer else {}),
        "distributed_optimizer": setup.distributed_optimizer,
        "sequence_parallel": setup.sequence_parallel,
        "kernels": setup.kernels,
        **({"calibration_factor": setup.cluster.factor} if setup.cluster.factor != 1 else {}),
        **asdict(setup.switches),
        **_order(setup),
    }


def _balance(setup: Setup) -> dict[str, Any]:
    bounds = None if setup.balance is None else setup.balance.bounds
    bound = {} if bounds is None else {"bound": list(bounds)}
    return bound if setup.hosts == PAIR else {**bound, "hosts": setup.hosts}


def _order(setup: Setup) -> dict[str, Any]:
    """Return what of the configuration decides the order of computations beside the schedule."""
    family = FAMILIES[setup.schedule]
    said: dict[str, Any] = {}
    if setup.group_size is not None or (family.takes_groups and family.splits):
        said["group"] = setup.turn_size
    if family.takes_delay:
        said["delay"] = setup.delay
    if setup.slices > 1:
        said |= {"slices": setup.slices, "slice_lengths": lengths_of(slice_bounds(setup))}
    if family.splits:
        said["keep_weights_halves"] = setup.keep_weights_halves
    if setup.is_sharded:
        said |= {"vocabulary_parallel": setup.vocabulary.value, "input_shards": setup.input_shards}
    return said


def _pattern(setup: Setup) -> dict[str, Any]:
    hybrid = setup.model.hybrid
    return {} if hybrid is None else {"pattern": hybrid.with_stages(setup.layers)}


def _domain(setup: Setup) -> dict[str, Any]:
    cluster = setup.cluster
    return {"gpus_per_domain": cluster.devices_per_domain} if cluster.nodes_per_domain > 1 else {}


def _fp8(setup: Setup) -> dict[str, Any]:
    return {} if setup.fp8 is None else {f"fp8_{name}": value for name, value in asdict(setup.fp8).items()}


def _context(setup: Setup) -> dict[str, Any]:
    return {"context": setup.context, "cp_comm_type": setup.cp_comm_type} if setup.context > 1 else {}


def document(prediction: SetupPrediction) -> dict[str, Any]:
    """Return one prediction as JSON values. `stages` has one entry for each pipeline rank."""
    setup, timing, bandwidth = prediction.setup, prediction.timing, prediction.bandwidth
    return {
        "iteration_time_s": timing.iteration_s,
        "simulated_microbatches": timing.simulated,
        "mfu_percent": 100 * prediction.mfu,
        "mfu_formula": prediction.formula,
        "peak_flops_per_s": setup.peak_flops_per_s,
        "bubble_percent": 100 * timing.bubble_of_makespan,
        "bubble_of_pipeline_percent": 100 * timing.bubble_of_pipeline,
        "bubble_of_span_percent": 100 * timing.bubble_of_span,
        "exposed_transfer_s": max(timing.exposed_s),
        "transfer_bytes": bandwidth.transfer_bytes if bandwidth else 0,
        "required_bytes_per_s": bandwidth.required_bytes_per_s if bandwidth else 0,
        "required_steady_bytes_per_s": bandwidth.steady_bytes_per_s if bandwidth else 0,
        "available_bytes_per_s": bandwidth.available_bytes_per_s if bandwidth else None,
        "fits": prediction.fits,
        "balanced": setup.balance is not None,
        "stages": [_stage(prediction, rank) for rank in prediction.memory],
        **({"at_once": asdict(prediction.at_once)} if prediction.at_once else {}),
        "configuration": configuration(setup),
    }


def _stage(prediction: SetupPrediction, memory: RankMemory) -> dict[str, Any]:
    return {
        "stage": memory.rank,
        "weights_bytes": memory.weights_bytes,
        "gradients_bytes": memory.gradients_bytes,
        "optimizer_bytes": memory.optimizer_bytes,
        "activations_bytes": memory.activations_bytes,
        "hosted_bytes": memory.hosted_bytes,
        "working_bytes": memory.working_bytes,
        "fragmentation_bytes": memory.fragmentation_bytes,
        "overhead_bytes": memory.overhead_bytes,
        "peak_bytes": memory.peak_bytes,
        "limit_bytes": memory.limit_bytes,
        "fits": memory.fits,
        "is_tight": memory.is_tight,
        "evictions": prediction.transfers[memory.rank],
        "exposed_transfer_s": prediction.timing.exposed_s[memory.rank],
    }
