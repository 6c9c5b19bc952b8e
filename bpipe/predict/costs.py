"""Seconds of every stage by a roofline, and links between ranks: the simulator's `Costs`.

Products run at a share of the peak, all else at a share of the memory's bandwidth, collectives at a share of the
links'. docs/validation.md compares the results with measurements.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import lcm
from operator import mul
from typing import NamedTuple

from bpipe.build import unchecked
from bpipe.predict.activations import after_input_bytes, stage_bytes
from bpipe.predict.exchanges import (
    rank_domains,
    rank_nodes,
    reach,
    replica_ports,
    replicas_of_experts,
    replicas_share_nodes,
)
from bpipe.predict.layer_variants import LayerKind
from bpipe.predict.layers.ends import STATISTICS, STATISTICS_BYTES, embedding_seconds, output_seconds, shard_seconds
from bpipe.predict.layers.layer import every_seconds, layer_seconds
from bpipe.predict.layout import Setup
from bpipe.predict.recompute import LayerScope, StageLayers
from bpipe.predict.sizes import (
    LINK_EFFICIENCY,
    LINK_LATENCY_S,
    MEMORY_EFFICIENCY,
    predicted_tokens,
    sent_bytes,
    sent_from,
)
from bpipe.predict.slices import Growth, equal_bounds, kept_memory, lengths_of, slice_setups
from bpipe.predict.states import parameter_bytes, shard_parameters, stage_experts, stage_matrices, stage_parameters
from bpipe.schedule.families.families import exchange_of
from bpipe.schedule.hosts import PAIR, Hosts, device_ranks, halved_pairs, in_pairs, mirrored_pairs
from bpipe.schedule.layout import EVEN
from bpipe.schedule.program import Exchange
from bpipe.simulate.cost import CollectiveCost, Costs, Link, Links, StageCost


def collective_seconds(setup: Setup) -> CollectiveCost:
    """Return the cost of a ring over all shards of a pipeline at its slowest link."""
    device = setup.cluster.device
    slowest = (
        device.between_bytes_per_s if len(set(rank_domains(setup))) > 1 else device.among(setup.pipeline)
    ) * LINK_EFFICIENCY
    tokens, sent = predicted_tokens(setup), setup.model.num_predictions * sent_bytes(setup)
    statistics = STATISTICS * STATISTICS_BYTES * tokens * setup.vocabulary_shards
    hidden = 4 * tokens * setup.model.hidden_size / setup.sequence_shards
    inputs = sent_bytes(setup) if setup.input_shards else 0
    return CollectiveCost(*(num_bytes / slowest for num_bytes in (sent, statistics, hidden, inputs, inputs)))


def hosts_of(setup: Setup) -> Hosts:
    """Return the planned hosts, None for pairs."""
    if setup.hosts != PAIR:
        # As many micro-batches as fill the pipeline tell it, but where rooms are planned for all there are.
        count = setup.num_microbatches if setup.activation_budget else min(setup.num_microbatches, setup.pipeline)
        return unchecked(setup.program(count)).hosts or ()
    # With two pipes mirror images have nothing for each other.
    return in_pairs((halved_pairs if setup.num_pipes > 1 else mirrored_pairs)(setup.pipeline))


def links(setup: Setup) -> Links:
    device = setup.cluster.device
    inside = Link(device.among(2) * LINK_EFFICIENCY, LINK_LATENCY_S, device.inside_gap_s)
    between = Link(device.between_bytes_per_s * LINK_EFFICIENCY, LINK_LATENCY_S, device.between_gap_s)
    return Links(inside, between, rank_domains(setup), Link(_host_bytes_per_s(setup) * LINK_EFFICIENCY, LINK_LATENCY_S))


def _host_bytes_per_s(setup: Setup) -> float:
    """One direction of a device's link to its node's memory, if all senders of the node use theirs at the same time."""
    device, cluster = setup.cluster.device, setup.cluster
    if device.host_node_bytes_per_s is None:
        return device.host_bytes_per_s
    sends = [any(not host.on_device for host in of_rank) for of_rank in hosts_of(setup)]
    nodes = rank_nodes(setup)
    # Of a node's devices as large a part sends as of the ranks that the first pipeline has there: replicas do as it
    # does.
    part = max((sum(map(mul, sends, map(node.__eq__, nodes))) / nodes.count(node) for node in set(nodes)), default=0)
    return device.host_among(part * cluster.devices_per_node)


def one_sided(nodes: tuple[int, ...], hosts: Hosts) -> frozenset[int]:
    """Return the ranks whose hosts are all on their node, whose memory `--bpipe-transport auto` reaches into."""
    return frozenset(
        rank for rank, of_rank in enumerate(hosts) if all(nodes[host] == nodes[rank] for host in device_ranks(of_rank))
    )


# Slices that a device computes well are multiples of the tiles of its products (`predict.matmul`).
_TILE = 256


def _exchange(setup: Setup) -> Exchange:
    if setup.slices > 1:
        # No loop of Megatron's runs slices.
        return Exchange.POSTED
    exchange = exchange_of(setup.schedule)
    blocks = exchange is Exchange.MEGATRON_INTERLEAVED and setup.switches.no_overlap_p2p_communication
    return Exchange.MEGATRON_TURNS if blocks else exchange.predicted


class PartSeconds(NamedTuple):
    """Seconds of one micro-batch by parts, whatever the stages and their order."""

    layers: dict[tuple[LayerKind, LayerScope], tuple[float, float, float, float]]
    """By kind and scope of a layer: forward, backward, and the halves of that."""
    output: tuple[float, float]
    """Output layer, forward and backward."""
    embedding: tuple[float, float]
    """Embedding, forward and backward."""


def part_seconds(setup: Setup) -> PartSeconds:
    """Return seconds of the parts of every stage."""
    return PartsOfSetups().of(setup)


class PartsOfSetups:
    """Seconds of the parts of many setups of one model, sequence and cluster: what they have in common is computed
    once."""

    def __init__(self) -> None:
        self._layers: dict[object, dict[tuple[LayerKind, LayerScope], tuple[float, float, float, float]]] = {}
        self._ends: dict[object, tuple[tuple[float, float], tuple[float, float]]] = {}

    def of(self, setup: Setup) -> PartSeconds:
        size = setup.tensor, setup.context, setup.micro_batch, setup.span, setup.switches.tp_comm_overlap
        # Only these groups exchange anything while layers compute; how long that takes depends on their nodes.
        ep, divided = setup.routing.expert, setup.expert_tensor
        groups = {(ep * divided, 1), (ep, divided)} if setup.model.experts else set()
        groups |= {(setup.context, setup.tensor)} if setup.context > 1 else set()
        reaches = tuple(reach(setup, *group) for group in sorted(groups))
        key = size, setup.recompute, setup.keep_weights_halves, setup.routing, reaches
        layers = self._layers.setdefault(key, {})
        for of_stage in set(setup.stage_layers):
            for kind, scope, _ in of_stage:
                if (kind, scope) not in layers:
                    layers[kind, scope] = every_seconds(setup, kind, scope)
        shards = setup.vocabulary, setup.input_shards, setup.pipeline if setup.is_sharded else None
        if (size, shards) not in self._ends:
            self._ends[size, shards] = output_seconds(setup), embedding_seconds(setup)
        return PartSeconds(layers, *self._ends[size, shards])


def stage_cost(parts: PartSeconds, layers: StageLayers, first: bool, last: bool) -> StageCost:
    """Return the seconds of a stage of these layers, with the embedding or the output layer at the ends."""
    forward, backward, input_half, weight_half = (
        sum(number * parts.layers[kind, scope][place] for kind, scope, number in layers) for place in range(4)
    )
    return StageCost(
        forward_s=forward,
        backward_s=backward,
        weight_s=weight_half,
        input_s=input_half,
        output_forward_s=parts.output[0] if last else 0.0,
        output_backward_s=parts.output[1] if last else 0.0,
        embedding_forward_s=parts.embedding[0] if first else 0.0,
        embedding_backward_s=parts.embedding[1] if first else 0.0,
    )


def predict_costs(setup: Setup) -> Costs:
    """Return the costs of all stages."""
    updates = update_seconds(setup)
    of_slices = [_stage_costs(part, updates) for part in slice_setups(setup)]
    costs = Costs(
        tuple(cost for of_stage in zip(*of_slices, strict=True) for cost in of_stage),
        links(setup),
        _exchange(setup),
        one_sided(rank_nodes(setup), hosts_of(setup)),
        eager=setup.switches.overlap_grad_reduce,
        replicas_apart=not replicas_share_nodes(setup),
        slices=setup.slices,
        kept=kept_memory(setup),
    )
    if setup.is_sharded:
        # No loop of Megatron's runs shards.
        costs = replace(
            costs, exchange=Exchange.POSTED, shards=(shard_seconds(setup),), collectives=collective_seconds(setup)
        )
    return costs if setup.time_factor == 1 else costs.scaled(setup.time_factor)


def _stage_costs(setup: Setup, updates: Sequence[tuple[float, float]]) -> list[StageCost]:
    stage_layers, parts = setup.stage_layers, part_seconds(setup)
    saved = stage_bytes(setup)
    after_input, buckets = after_input_bytes(setup), stage_buckets(setup)
    stages = []
    # Of hundreds of stages nearly all are alike.
    costs: dict[tuple[object, ...], StageCost] = {}
    for stage, layers in enumerate(stage_layers):
        first = stage == 0 and not setup.input_shards
        last = stage == setup.num_stages - 1 and not setup.is_sharded
        reduction, update = updates[stage]
        moved = saved[stage] if setup.balance is None else setup.balance.part_bytes.get(stage, saved[stage])
        sent = sent_from(setup, stage)
        key = (layers, first, last, reduction, update, saved[stage], sent, moved, after_input[stage], buckets[stage])
        if key not in costs:
            costs[key] = replace(
                stage_cost(parts, layers, first, last),
                reduction_s=reduction,
                optimizer_s=update,
                buckets=buckets[stage],
                sent_bytes=sent,
                moved_bytes=moved,
                saved_bytes=saved[stage],
                after_input_bytes=after_input[stage],
            )
        stages.append(costs[key])
    return stages


def lengths_of_equal_seconds(setup: Setup) -> tuple[int, ...]:
    """Return lengths of slices for which a stage's layers take equally long, by prediction.

    Raises ValueError for a sequence too short for them.
    """
    unit, slices = setup.sequence_shards, setup.slices
    if setup.sequence % lcm(unit, _TILE) == 0 and setup.sequence >= 8 * _TILE * slices:
        unit = lcm(unit, _TILE)
    even = slice_setups(replace(setup, slice_lengths=EVEN))
    layers = [layer for of_stage in setup.stage_layers for layer in of_stage]
    first, last = (
        sum(number * sum(layer_seconds(part, kind, scope)) for kind, scope, number in layers)
        for part in (even[0], even[-1])
    )
    square = (last - first) * slices**2 / (2 * (slices - 1)) if slices > 1 else 0.0
    growth = Growth(slices * first - square / slices, square)
    return lengths_of(equal_bounds(setup.sequence, slices, unit, growth))


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
