"""Predict seconds of every stage from sizes.

In: a Setup. Out: `Costs` for the simulator. A roofline: products at a share of the peak, all else at a share of the
memory's bandwidth, tensor-parallel collectives at a share of the links'. Knows no schedule.

How far the result is from measurements is in docs/validation.md. Where a measured profile is given, it replaces what it
measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import lcm
from operator import mul
from typing import NamedTuple

from bpipe.build import BALANCES, unchecked
from bpipe.generate.families import exchange_of
from bpipe.ir.hosts import HOST_MEMORY, PAIR, Hosts, halved_pairs, in_pairs, mirrored_pairs, other_ranks
from bpipe.ir.layout import EVEN, Vocabulary
from bpipe.ir.program import Exchange
from bpipe.models import scan
from bpipe.models.casts import cast_seconds
from bpipe.models.context_parallel import with_exchange
from bpipe.models.expert_parallel import exchange, replicas_of_experts
from bpipe.models.layout import Setup
from bpipe.models.memory import parameter_bytes, shard_parameters, stage_experts, stage_matrices, stage_parameters
from bpipe.models.parameters import layer_parameters
from bpipe.models.parts import LayerKind
from bpipe.models.products import latent_up_products, layer_products, matrix_products, shared_products
from bpipe.models.rates import KERNEL_S, LINK_EFFICIENCY, LINK_LATENCY_S, MEMORY_EFFICIENCY, Rates
from bpipe.models.recompute import LayerScope, StageLayers
from bpipe.models.routed import routed_tokens
from bpipe.models.saved import STATISTICS, STATISTICS_BYTES, after_input_bytes, norms_alone, shard_bytes, stage_bytes
from bpipe.models.sizes import element_bytes, num_keys, num_tokens, sent_bytes
from bpipe.models.slice_lengths import Growth, equal_bounds, lengths_of
from bpipe.models.slices import SUM_BYTES, kept_memory, slice_setups
from bpipe.models.tensor_parallel import exposed, gather_s
from bpipe.simulate.cost import CollectiveCost, Costs, Link, Links, ShardCost, StageCost

FLASH_BACKWARD = 2.5
# In a layer of two parts; of a hybrid model's layers, which are one, half as many.
FORWARD_KERNELS, BACKWARD_KERNELS = 20, 35
# Of a forward's: two products and what is between; two products up, two norms before and both rotations behind them.
MLP_KERNELS, LATENT_KERNELS = 3, 6
# Of these the products for weights, in a layer of four matrices.
WEIGHT_KERNELS = 4

# Bytes read and written for every attention score: by the fused kernel, and by separate ones in 32 bit (convert, scale,
# mask, softmax, convert back). Megatron fuses only where micro-batch * heads / t is a multiple of 4 and the sequence is
# at most 4096 (`FusedScaleMaskSoftmax.is_kernel_available`): for GPT-3 96B at t=4, micro-batch 1 is not fused and 2 is,
# which is most of what Kim et al. 2023 gained, and what Huang et al. 2024 could not repeat with flash attention.
FUSED_FORWARD, FUSED_BACKWARD = 4, 6
SEPARATE_FORWARD, SEPARATE_BACKWARD = 33, 40
DROPOUT_FORWARD, DROPOUT_BACKWARD = 5, 5
PRODUCT_BYTES = 4
# Bytes for every logit: the loss in 32 bit and its gradient.
LOSS_FORWARD, LOSS_BACKWARD = 38, 14
# A tanh of each, between a division and a product, fused.
CAPPED = 4
# The same of a shard, which torch's own kernels go through in 32 bit and in place: statistics in S, the gradient in T,
# and what of the input's gradient algorithm 2 computes in S.
SHARD_STATISTICS, SHARD_GRADIENT, SHARD_EARLY = 32, 42, 36
# Putting tokens in the order of their experts and back: copied to be sent, sorted there, sorted back, and summed, each
# read and written.
ORDERINGS = 8
ROUTING_KERNELS = 30
# Adam in 32 bit reads and writes main weight and both moments, reads the gradient, writes the weight.
UPDATE_BYTES = 30


def is_softmax_fused(setup: Setup) -> bool:
    """Return whether Megatron's fused softmax takes these sizes: of slices it does not, which have more keys than
    queries."""
    heads = setup.micro_batch * setup.model.num_attention_heads // setup.tensor
    return setup.span is None and heads % 4 == 0 and setup.sequence <= 4096


def core_seconds(setup: Setup, rates: Rates, window: int | None = None) -> tuple[float, float]:
    """Return the attention core of one layer, forward and backward, with what context-parallel ranks exchange for
    it, and what slices add to keys and values that are kept."""
    forward, backward = _core_alone(setup, rates, window)
    if setup.span is not None:
        forward, backward = _with_kept(setup, rates, forward, backward)
    return (forward, backward) if setup.context == 1 else with_exchange(setup, forward, backward)


def _with_kept(setup: Setup, rates: Rates, forward_s: float, backward_s: float) -> tuple[float, float]:
    """A slice's own keys and values are copied to where all are. Backward the gradients of all so far are read and
    added to what is kept, and the slice's own are copied from there."""
    element, size = element_bytes(setup), setup.model.key_value_size / setup.tensor
    own, every = num_tokens(setup) * size, num_keys(setup) * setup.micro_batch * size
    copied = 2 * element * own
    added = (element + 2 * max(SUM_BYTES, element)) * every + (max(SUM_BYTES, element) + element) * own
    return forward_s + copied / rates.memory, backward_s + added / rates.memory


def _core_alone(setup: Setup, rates: Rates, window: int | None) -> tuple[float, float]:
    """Of a window flash attention computes no more than lies in it; context-parallel ranks have as much each."""
    model, s, c = setup.model, setup.sequence, setup.context
    kernels, narrow = setup.cluster.kernels, window is not None and window < num_keys(setup)
    queries = num_tokens(setup) * c / setup.micro_batch
    # Of a sequence in parts no kernel was measured but where each rank has all of some heads.
    in_parts = c > 1 and setup.cp_comm_type != "a2a"
    heads = setup.micro_batch * model.num_attention_heads / (setup.tensor * c)
    if kernels is None or narrow or in_parts or model.latent is not None:
        measured = None
    else:
        measured = kernels.attention_s(setup.attention, heads, s, model.kv_channels)
    if measured is not None:
        # A slice's kernel is taken to be as fast as the whole's.
        share = _attended(setup, None) / (s * s / 2)
        return share * measured[0], share * measured[1]
    if setup.attention == "flash":
        product_flops = 4 * setup.micro_batch * _attended(setup, window) * model.core_size / (setup.tensor * c)
        forward = product_flops / rates.flash
        return forward, FLASH_BACKWARD * forward
    product_flops = 4 * setup.micro_batch * queries * num_keys(setup) * model.core_size / (setup.tensor * c)
    scores = heads * queries * num_keys(setup)
    softmax = (FUSED_FORWARD, FUSED_BACKWARD) if is_softmax_fused(setup) else (SEPARATE_FORWARD, SEPARATE_BACKWARD)
    dropout = (DROPOUT_FORWARD, DROPOUT_BACKWARD) if model.dropout else (0, 0)
    forward_bytes = (softmax[0] + dropout[0] + PRODUCT_BYTES) * scores
    backward_bytes = (softmax[1] + dropout[1] + 2 * PRODUCT_BYTES) * scores
    return (
        product_flops / rates.products + forward_bytes / rates.memory,
        2 * product_flops / rates.products + backward_bytes / rates.memory,
    )


def _attended(setup: Setup, window: int | None) -> float:
    """Return how many pairs of a query and an earlier key there are in a sequence, or in a slice of it."""
    begin, end = setup.span or (0, setup.sequence)
    return _causal_pairs(end, window) - _causal_pairs(begin, window)


def _causal_pairs(tokens: int, window: int | None) -> float:
    reach = tokens if window is None else min(window, tokens)
    return reach * reach / 2 + (tokens - reach) * reach


def layer_seconds(setup: Setup, kind: LayerKind | None = None, scope: LayerScope | None = None) -> tuple[float, float]:
    """Return seconds of one layer and micro-batch, forward and backward with its recomputation.

    Default: the first layer.
    """
    rates, model, tokens = Rates.of(setup), setup.model, num_tokens(setup)
    kind = model.kind(0) if kind is None else kind
    scope = setup.recomputed.scope(0) if scope is None else scope
    h, element, products, parts = (
        model.hidden_size,
        element_bytes(setup),
        layer_products(setup, kind).total(),
        kind.num_parts,
    )
    between = element * tokens * h / setup.sequence_shards
    inside = _inside_bytes(setup, kind)
    # Norms of queries and keys read and write, as those behind attention and MLP; backward they read what went in and
    # out, and write.
    normed = (
        element
        * tokens
        * (model.query_size + model.key_value_size // 2)
        / setup.tensor
        * (model.qk_norm and kind.attends)
    )
    normed += 2 * between * model.post_norms + element * tokens * model.latent_ranks / setup.sequence_shards
    kernels, kernels_back = _num_kernels(kind)
    # In each part a norm reads and writes; a residual sum reads twice and writes, with dropout a mask too.
    forward = products.forward_s + (5.25 * parts * between + inside + 2 * normed) / rates.memory + kernels * KERNEL_S
    backward = products.input_s + products.weight_s + kernels_back * KERNEL_S
    backward += (7 * parts * between + 1.5 * inside + 3 * normed + _accumulated(setup, kind)) / rates.memory
    casts, casts_back = cast_seconds(setup, kind)
    forward, backward = forward + casts, backward + casts_back
    if kind.experts:
        # There and back, and the same for their gradients.
        there_and_back = 2 * exchange(setup).seconds + ROUTING_KERNELS * KERNEL_S
        forward, backward = forward + there_and_back, backward + there_and_back
    waits = exposed(setup, kind, scope)
    core_forward, core_backward = _core_of(setup, kind, rates)
    forward += core_forward
    backward += core_backward + waits.backward_s
    if scope.whole:
        backward += forward
    elif scope.modules:
        backward += (core_forward if "core_attn" in scope.modules and kind.attends else 0.0) + _parts_again(
            setup, kind, scope.modules
        )
    return forward + waits.forward_s, backward


def _parts_again(setup: Setup, kind: LayerKind, modules: frozenset[str]) -> float:
    """Return the forwards of a layer's parts beside the attention core that are computed again in its backward; what
    of them is waited for on links is in `exposed`."""
    model, memory = setup.model, Rates.of(setup).memory
    between = element_bytes(setup) * num_tokens(setup) * model.hidden_size / setup.sequence_shards
    norm, found = 2 * between / memory + KERNEL_S, 0.0
    if "layernorm" in modules:
        found += norm * (norms_alone(setup, kind) if setup.kernels == "gpu" else kind.num_parts)
    if kind.experts:
        found += _experts_again(setup, kind, modules)
    elif "mlp" in modules and kind.has_mlp:
        products = layer_products(setup, kind)
        found += (
            products.entering[-1].forward_s
            + products.returning[-1].forward_s
            + _inside_bytes(setup, kind) / memory
            + MLP_KERNELS * KERNEL_S
        )
        # Transformer Engine's has the norm in it.
        found += norm if setup.kernels == "gpu" else 0.0
    if model.latent is not None and "mla_up_proj" in modules:
        ups = latent_up_products(setup, model.latent)
        # Norms of what was projected down, and queries, keys and values, which are read and written where their ends
        # are rotated.
        moved = 2.0 * element_bytes(setup) * num_tokens(setup)
        moved *= model.latent_ranks / setup.sequence_shards + (model.query_size + model.key_value_size) / setup.tensor
        found += sum(product.forward_s for product in ups) + moved / memory + LATENT_KERNELS * KERNEL_S
    return found


def _experts_again(setup: Setup, kind: LayerKind, modules: frozenset[str]) -> float:
    """The same of a layer's experts: all that is between the norm and the sum, or parts of it."""
    memory, inside, found = Rates.of(setup).memory, _inside_bytes(setup, kind), 0.0
    if "moe" in modules:
        products = layer_products(setup, kind)
        found += products.entering[-1].forward_s + products.returning[-1].forward_s + inside / memory
        return found + 2 * exchange(setup).seconds + (MLP_KERNELS + ROUTING_KERNELS) * KERNEL_S
    beside = _shared_inside_bytes(setup)
    if "moe_act" in modules:
        # Tokens stay in the order in which they are.
        ordered = ORDERINGS * element_bytes(setup) * routed_tokens(setup) * setup.model.hidden_size
        found += (inside - beside - ordered) / memory + KERNEL_S
    if "shared_experts" in modules:
        found += sum(product.forward_s for product in shared_products(setup)) + beside / memory + MLP_KERNELS * KERNEL_S
    return found


def _num_kernels(kind: LayerKind) -> tuple[float, float]:
    """Forward and backward."""
    if kind.is_mamba:
        return scan.FORWARD_KERNELS, scan.BACKWARD_KERNELS
    return FORWARD_KERNELS * kind.num_parts / 2, BACKWARD_KERNELS * kind.num_parts / 2


def _core_of(setup: Setup, kind: LayerKind, rates: Rates) -> tuple[float, float]:
    """Between a part's two matrices, what is neither of an MLP nor of experts."""
    if kind.is_mamba:
        return scan.scan_seconds(setup)
    return core_seconds(setup, rates, kind.window) if kind.attends else (0.0, 0.0)


def _inside_bytes(setup: Setup, kind: LayerKind) -> float:
    """What activation functions read and write, and what it takes to put tokens in the order of their experts and
    back."""
    model, element, tokens, experts = setup.model, element_bytes(setup), num_tokens(setup), setup.model.experts
    gates = 2 if model.gated else 1
    if not kind.has_mlp:
        return 0.0
    if not kind.experts or experts is None:
        return element * tokens * (model.first_mlp_size + model.ffn_hidden_size) / setup.tensor
    routed = (
        element
        * routed_tokens(setup)
        * ((1 + gates) * experts.ffn_hidden_size / setup.expert_tensor + ORDERINGS * model.hidden_size)
    )
    return routed + _shared_inside_bytes(setup)


def _shared_inside_bytes(setup: Setup) -> float:
    """Of the experts that all tokens go to."""
    gates, experts = 2 if setup.model.gated else 1, setup.model.experts
    assert experts is not None
    return element_bytes(setup) * num_tokens(setup) * (1 + gates) * experts.shared_size / setup.tensor


def _accumulated(setup: Setup, kind: LayerKind) -> float:
    """Return the bytes of a layer's backward: every weight's gradient is read and written once a micro-batch."""
    found = layer_parameters(setup.model, kind)
    return (
        2
        * parameter_bytes(setup)[1]
        * (found.matrices / setup.tensor + found.experts / (setup.routing.expert * setup.expert_tensor))
    )


def halves_seconds(setup: Setup, kind: LayerKind | None = None, scope: LayerScope | None = None) -> tuple[float, float]:
    """Return seconds of the two parts of one layer's backward, dgrad and wgrad. Attention's core has no weights.

    Together they take as long as the whole, and longer under tensor parallelism: no product for weights hides what is
    scattered or summed, and with sequence parallelism the inputs of the matrices behind the norms are gathered again
    before it.
    """
    rates = Rates.of(setup)
    kind = setup.model.kind(0) if kind is None else kind
    _, backward = layer_seconds(setup, kind, scope)
    if not setup.keeps_halves:
        return backward, 0.0
    weight = (
        layer_products(setup, kind).total().weight_s
        + _accumulated(setup, kind) / rates.memory
        + WEIGHT_KERNELS * kind.num_parts / 2 * KERNEL_S
    )
    gathers = kind.num_parts * gather_s(setup) if setup.sequence_shards > 1 else 0.0
    waits = exposed(setup, kind, scope)
    return backward - waits.backward_s + waits.input_half_s - weight, weight + gathers


def output_seconds(setup: Setup) -> tuple[float, float]:
    """Return the output layer and the loss."""
    rows, memory = setup.vocabulary / setup.tensor, Rates.of(setup).memory
    logits = num_tokens(setup) * rows
    product = matrix_products(setup, setup.model.hidden_size, rows)
    capped = CAPPED * setup.model.capped_logits
    forward = product.forward_s + (LOSS_FORWARD + capped) * logits / memory
    return forward, product.input_s + product.weight_s + (LOSS_BACKWARD + capped) * logits / memory


def shard_seconds(setup: Setup) -> ShardCost:
    """Return a rank's shard of the output layer, and of the embedding where that is split, too."""
    rows, memory = setup.vocabulary / setup.vocabulary_shards, Rates.of(setup).memory
    logits = num_tokens(setup) * rows
    product = matrix_products(setup, setup.model.hidden_size, rows)
    # Of three products algorithm 1 has two in T, algorithm 2 two in S.
    early = setup.vocabulary_parallel == Vocabulary.TWO.value
    forward = product.forward_s + product.input_s * early + (SHARD_STATISTICS + SHARD_EARLY * early) * logits / memory
    backward = product.weight_s + product.input_s * (not early) + SHARD_GRADIENT * logits / memory
    lookup, added = embedding_seconds(setup) if setup.input_shards else (0.0, 0.0)
    return ShardCost(forward, backward, lookup, added, shard_bytes(setup))


def collective_seconds(setup: Setup) -> CollectiveCost:
    """Return the cost of the collective over all shards of a pipeline at its slowest link: a ring brings everybody
    everything once."""
    device = setup.cluster.device
    slowest = (
        device.between_bytes_per_s if len(set(setup.domains())) > 1 else device.among(setup.pipeline)
    ) * LINK_EFFICIENCY
    tokens, sent = num_tokens(setup), sent_bytes(setup)
    statistics = STATISTICS * STATISTICS_BYTES * tokens * setup.vocabulary_shards
    hidden = 4 * tokens * setup.model.hidden_size / setup.sequence_shards
    inputs = sent if setup.input_shards else 0
    return CollectiveCost(*(num_bytes / slowest for num_bytes in (sent, statistics, hidden, inputs, inputs)))


def embedding_seconds(setup: Setup) -> tuple[float, float]:
    """Return seconds to look up a micro-batch's tokens, and to add up their gradients.

    The latter makes a gradient of the whole table, mostly zeros, and adds it to what there is: of 256000 rows of 3072
    that was 4.1 ms on an A100, as long as the backward of a layer (Yeung et al. 2024, whose first rank took so much
    longer than the second).
    """
    rates, element = Rates.of(setup), element_bytes(setup)
    tokens = 3 * element * num_tokens(setup) * setup.model.hidden_size / rates.memory
    rows = setup.vocabulary / (setup.vocabulary_shards if setup.input_shards else setup.tensor)
    return tokens, tokens + 2 * (element + parameter_bytes(setup)[1]) * rows * setup.model.hidden_size / rates.memory


def hosts_of(setup: Setup) -> Hosts:
    """Return the planned hosts, None for pairs."""
    if setup.balance != BALANCES[0] and setup.how.hosts != PAIR:
        # As many micro-batches as fill the pipeline tell it, but where rooms are planned for all there are.
        count = setup.num_microbatches if setup.how.activation_budget else min(setup.num_microbatches, setup.pipeline)
        return unchecked(setup.program(count)).hosts or ()
    # With two pipes mirror images have nothing for each other.
    return in_pairs((halved_pairs if setup.num_pipes > 1 else mirrored_pairs)(setup.pipeline))


def links(setup: Setup) -> Links:
    device = setup.cluster.device
    inside = Link(device.among(2) * LINK_EFFICIENCY, LINK_LATENCY_S, device.inside_gap_s)
    between = Link(device.between_bytes_per_s * LINK_EFFICIENCY, LINK_LATENCY_S, device.between_gap_s)
    return Links(inside, between, setup.domains(), Link(_host_bytes_per_s(setup) * LINK_EFFICIENCY, LINK_LATENCY_S))


def _host_bytes_per_s(setup: Setup) -> float:
    """What a device's link to its node's memory carries in one direction, when all devices of the node that send
    there do so at once."""
    device, cluster = setup.cluster.device, setup.cluster
    if device.host_node_bytes_per_s is None:
        return device.host_bytes_per_s
    sends = [HOST_MEMORY in of_rank for of_rank in hosts_of(setup)]
    nodes = setup.nodes()
    # Of a node's devices as large a part sends as of the ranks that the first pipeline has there: replicas do as it
    # does.
    part = max((sum(map(mul, sends, map(node.__eq__, nodes))) / nodes.count(node) for node in set(nodes)), default=0)
    return min(device.host_bytes_per_s, device.host_node_bytes_per_s / max(1.0, part * cluster.devices_per_node))


def one_sided(nodes: tuple[int, ...], hosts: Hosts) -> frozenset[int]:
    """Return the ranks whose hosts are all on their node.

    There `--bpipe-transport auto` reaches into their memory; between nodes both have to meet, whatever joins these.
    """
    return frozenset(
        rank for rank, of_rank in enumerate(hosts) if all(nodes[host] == nodes[rank] for host in other_ranks(of_rank))
    )


def update_seconds(setup: Setup) -> tuple[tuple[float, float], ...]:
    """Return, for every stage, seconds to reduce its gradients over replicas and gather its weights, and seconds to
    update them.

    Where only reductions are overlapped, weights are still gathered behind the update. Where gathering is, too, it
    hides: the first rank waits for the weights of its first layers, the others wait longer for their first input. A
    rank's shards count with its first stage.
    """
    device, d = setup.cluster.device, setup.replicas
    weight, gradient, *_ = parameter_bytes(setup)
    gathers = setup.distributed_optimizer and not setup.switches.overlap_param_gather
    bandwidth = _replicas_bytes_per_s(setup, setup.replicas_share_nodes(), setup.replica_ports())
    rows, matrices = [], stage_matrices(setup)
    for stage, (own, experts) in enumerate(zip(stage_parameters(setup), stage_experts(setup), strict=True)):
        count = own - experts + (shard_parameters(setup) if stage < setup.pipeline else 0)
        sent = count * (d - 1) / d / bandwidth
        mine = count / (d if setup.distributed_optimizer else 1)
        if experts:
            copies = setup.expert_replicas
            sent += experts * (copies - 1) / copies / _replicas_bytes_per_s(setup, *replicas_of_experts(setup))
            mine += experts / (copies if setup.distributed_optimizer else 1)
        reduced = (gradient if setup.distributed_optimizer else 2 * gradient) * sent
        gathered = weight * sent if gathers else 0.0
        updated = UPDATE_BYTES * mine / (device.memory_bytes_per_s * MEMORY_EFFICIENCY)
        if setup.fp8 is not None:
            gathered *= 1 - matrices[stage] / own * (1 - setup.fp8.gathered_bytes / weight)
            # Every iteration's first micro-batch writes the weights in 8 bit.
            written = weight + setup.fp8.copies(device.fp8_blocks) * float(setup.fp8.value_bytes)
            updated += (
                (not setup.fp8.param_gather)
                * written
                * matrices[stage]
                / (device.memory_bytes_per_s * MEMORY_EFFICIENCY)
            )
        rows.append(
            (reduced, gathered + updated) if setup.switches.overlap_grad_reduce else (reduced + gathered, updated)
        )
    return tuple(rows)


def _replicas_bytes_per_s(setup: Setup, share_node: bool, ports: int) -> float:
    """What a ring through all replicas of a stage carries: replicas in one node lead rings through as many ports,
    each its own."""
    device = setup.cluster.device
    inside = device.among(ports)
    return (inside if share_node else min(inside, ports * device.between_bytes_per_s)) * LINK_EFFICIENCY


def _exchange(setup: Setup) -> Exchange:
    if setup.slices > 1:
        # No loop of Megatron's runs slices.
        return Exchange.POSTED
    exchange = exchange_of(setup.schedule)
    blocks = exchange is Exchange.MEGATRON_INTERLEAVED and setup.switches.no_overlap_p2p_communication
    return Exchange.MEGATRON_TURNS if blocks else exchange.predicted


class PartSeconds(NamedTuple):
    """One micro-batch: of every kind and scope of a layer its forward, its backward and the halves of that; output
    layer; embedding.

    How layers are cut into stages, and in which order these are computed, changes none of it.
    """

    layers: dict[tuple[LayerKind, LayerScope], tuple[float, float, float, float]]
    output: tuple[float, float]
    embedding: tuple[float, float]


def part_seconds(setup: Setup) -> PartSeconds:
    """Return seconds of the parts of every stage.

    Raises ValueError where kernels were measured in another precision.
    """
    if setup.cluster.kernels is not None:
        setup.cluster.kernels.check(setup.precision)
    each = dict.fromkeys((kind, scope) for layers in setup.stage_layers for kind, scope, _ in layers)
    layers = {one: (*layer_seconds(setup, *one), *halves_seconds(setup, *one)) for one in each}
    return PartSeconds(layers, output_seconds(setup), embedding_seconds(setup))


def stage_cost(parts: PartSeconds, layers: StageLayers, first: bool, last: bool) -> StageCost:
    """Return the seconds of a stage of these layers, with the embedding if it is the first, and the output layer if
    it is the last."""
    forward, backward, input_half, weight_half = (
        sum(number * parts.layers[kind, scope][one] for kind, scope, number in layers) for one in range(4)
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
    """Return the costs of all stages. Raises ValueError where kernels were measured in another precision."""
    updates = update_seconds(setup)
    of_slices = [_stage_costs(one, updates) for one in slice_setups(setup)]
    costs = Costs(
        tuple(cost for of_stage in zip(*of_slices, strict=True) for cost in of_stage),
        links(setup),
        _exchange(setup),
        one_sided(setup.nodes(), hosts_of(setup)),
        eager=setup.switches.overlap_grad_reduce,
        replicas_apart=not setup.replicas_share_nodes(),
        slices=setup.slices,
        kept=kept_memory(setup),
    )
    if setup.is_sharded:
        # No loop of Megatron's runs shards.
        costs = replace(
            costs, exchange=Exchange.POSTED, shards=(shard_seconds(setup),), collectives=collective_seconds(setup)
        )
    return costs if setup.cluster.factor == 1 else costs.scaled(setup.cluster.factor)


def _stage_costs(setup: Setup, updates: Sequence[tuple[float, float]]) -> list[StageCost]:
    """Costs of every stage for a micro-batch, or for one slice."""
    every, parts = setup.stage_layers, part_seconds(setup)
    saved, sent = stage_bytes(setup), sent_bytes(setup)
    after_input = after_input_bytes(setup)
    stages = []
    # Of hundreds of stages nearly all are alike.
    made: dict[tuple[object, ...], StageCost] = {}
    for stage, layers in enumerate(every):
        first = stage == 0 and not setup.input_shards
        last = stage == setup.num_stages - 1 and not setup.is_sharded
        reduction, update = updates[stage]
        moved = saved[stage] if setup.balance == "none" else setup.how.part_bytes.get(stage, saved[stage])
        known = (layers, first, last, reduction, update, saved[stage], moved, after_input[stage])
        if known not in made:
            made[known] = replace(
                stage_cost(parts, layers, first, last),
                reduction_s=reduction,
                optimizer_s=update,
                sent_bytes=sent,
                moved_bytes=moved,
                saved_bytes=saved[stage],
                after_input_bytes=after_input[stage],
            )
        stages.append(made[known])
    return stages


# Slices that a device computes well are multiples of the tiles of its products (`models.products`).
_TILE = 256


def lengths_of_equal_seconds(setup: Setup) -> tuple[int, ...]:
    """Return lengths of slices that a stage's layers take as long for, by prediction.

    Of slices of one length the last takes so much longer than the first as its tokens attend to more. Raises ValueError
    for a sequence too short for so many.
    """
    unit, slices = setup.sequence_shards, setup.slices
    if setup.sequence % lcm(unit, _TILE) == 0 and setup.sequence >= 8 * _TILE * slices:
        unit = lcm(unit, _TILE)
    even = slice_setups(replace(setup, slice_lengths=EVEN))
    layers = [one for of_stage in setup.stage_layers for one in of_stage]
    first, last = (
        sum(number * sum(layer_seconds(part, kind, scope)) for kind, scope, number in layers)
        for part in (even[0], even[-1])
    )
    square = (last - first) * slices**2 / (2 * (slices - 1)) if slices > 1 else 0.0
    growth = Growth(slices * first - square / slices, square)
    return lengths_of(equal_bounds(setup.sequence, slices, unit, growth))
