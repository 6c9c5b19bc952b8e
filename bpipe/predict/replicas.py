"""Seconds to reduce gradients and update weights, for every stage."""

from bpipe.predict.exchanges import replicas_of_experts
from bpipe.predict.layout import Setup
from bpipe.predict.nodes import replica_ports, replicas_share_nodes
from bpipe.predict.sizes import LINK_EFFICIENCY, MEMORY_EFFICIENCY
from bpipe.predict.states import parameter_bytes, shard_parameters, stage_experts, stage_matrices, stage_parameters

# Parameters of a bucket of gradients, in Megatron without --ddp-bucket-size.
LEAST_BUCKET, BUCKET_PER_REPLICA = 40_000_000, 1_000_000


def update_seconds(setup: Setup) -> tuple[tuple[float, float], ...]:
    """Return, for every stage, seconds of reducing gradients and gathering weights, and of updating weights.

    If only reductions are overlapped, weights are still gathered after the update. Overlapped gathers are hidden: the
    first rank waits for its first layers' weights, and the others wait longer for inputs. A rank's shards count with
    its first stage. Of an update on the CPU only the transfers count.
    """
    device, d = setup.cluster.device, setup.replicas
    weight, gradient, state, _ = parameter_bytes(setup)
    # Adam reads and writes main weight, moments, gradient and weight.
    is_wide = setup.state_types.gradient_copy_bytes(setup.fp8)
    parameter_bytes_moved = 2 * state + (4 if is_wide else gradient) + weight * (2 if setup.precision == "fp32" else 1)
    gathers = setup.distributed_optimizer and not setup.switches.overlap_param_gather
    on_cpu, host_bytes_per_s = float(setup.state_types.on_cpu), device.host_among(setup.cluster.devices_per_node)
    bandwidth = _replicas_bytes_per_s(setup, replicas_share_nodes(setup), replica_ports(setup))
    expert_bandwidth = _replicas_bytes_per_s(setup, *replicas_of_experts(setup)) if setup.model.experts else bandwidth
    rows, matrices, memory_bytes_per_s = [], stage_matrices(setup), device.memory_bytes_per_s * MEMORY_EFFICIENCY
    for stage, (own, experts) in enumerate(zip(stage_parameters(setup), stage_experts(setup), strict=True)):
        count = own - experts + (shard_parameters(setup) if stage < setup.pipeline else 0)
        sent = count * (d - 1) / d / bandwidth
        own_count = count / (d if setup.distributed_optimizer else 1)
        if experts:
            copies = setup.expert_replicas
            sent += experts * (copies - 1) / copies / expert_bandwidth
            own_count += experts / (copies if setup.distributed_optimizer else 1)
        reduced = (gradient if setup.distributed_optimizer else 2 * gradient) * sent
        gathered = weight * sent if gathers else 0.0
        updated = parameter_bytes_moved * own_count * (1 - on_cpu) / memory_bytes_per_s
        # Gradients go to the CPU, and weights come back; how long the CPU takes is not known.
        updated += on_cpu * own_count * (gradient + weight) / (host_bytes_per_s * LINK_EFFICIENCY)
        if setup.fp8 is not None:
            gathered *= 1 - matrices[stage] / own * (1 - setup.fp8.gathered_bytes / weight)
            # Every iteration's first micro-batch writes the weights in 8 bit.
            written = weight + setup.fp8.copies(device.fp8_blocks) * float(setup.fp8.value_bytes)
            updated += (not setup.fp8.param_gather) * written * matrices[stage] / memory_bytes_per_s
        rows.append(
            (reduced, gathered + updated) if setup.switches.overlap_grad_reduce else (reduced + gathered, updated)
        )
    return tuple(rows)


def stage_buckets(setup: Setup) -> tuple[int, ...]:
    """Return in how many buckets each stage's gradients are reduced during the last backward.

    Megatron cuts those of the first rank's first chunk alone (`DistributedDataParallel`, `disable_bucketing`).
    """
    is_first = setup.num_pipes == 1 and setup.placements[0][0] == 0 and setup.placements[0][-1] == setup.pipeline - 1
    size = max(LEAST_BUCKET, BUCKET_PER_REPLICA * setup.data * setup.context)
    first = max(1, stage_parameters(setup)[0] // size) if is_first and setup.switches.overlap_grad_reduce else 1
    return (first, *(1,) * (setup.num_stages - 1))


def _replicas_bytes_per_s(setup: Setup, share_node: bool, ports: int) -> float:
    """Bandwidth of a ring through all replicas of a stage: those in a node lead a ring through each of their ports."""
    device = setup.cluster.device
    inside = device.among(ports)
    return (inside if share_node else min(inside, ports * device.between_bytes_per_s)) * LINK_EFFICIENCY
