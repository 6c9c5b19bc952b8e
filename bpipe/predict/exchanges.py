"""Nodes of ranks, and exchanges inside layers: of tokens with their experts, and of attention's keys and values.

Every device sends tokens to the devices that have their experts, and gets the results back: two exchanges forward, two
backward, waited for. Loads are taken to be even. What stays in the node takes NVLink, the rest the device's own port,
both at the same time. Ranks that divide an expert gather its tokens and scatter the sum. Megatron's dispatchers:
  alltoall   A token is sent once for every expert it goes to.
  allgather  All tokens go to all devices that share the experts, and the sum is scattered.
  flex       A token goes once to each node that has experts for it, and on from there (DeepEP, HybridEP).

With context parallelism each rank has, of 2c equal parts of a sequence, one from the front and one from the back, so causal
loads are even. Its queries need the keys and values of all others, which arrive in one of three ways, as in Transformer
Engine's `context_parallel`:
  p2p        Keys and values pass round a ring, each during the computation of the part before, in c steps of equal work.
             Backward their gradients follow one step later. Every step's result is kept, and all are summed in 32 bit.
  all_gather All keys and values are gathered before, and their gradients scattered after; both are waited for.
  a2a        Every rank gets the whole sequence for its part of the heads, and returns the result; waited for.
Kernels are taken to reach the same share of the peak on shorter sequences, and not to be slowed by a ring's messages.

A copy of a rank is a device with the same weights: one for every replica and every context-parallel part. In Megatron's
order of ranks tensor parallelism is innermost, then context, data and pipeline parallelism.
"""

from collections import Counter
from functools import lru_cache
from itertools import product
from math import ceil, comb
from typing import NamedTuple

from bpipe.placement import Topology, pair_adjacent
from bpipe.predict.layout import Setup
from bpipe.predict.sizes import LINK_EFFICIENCY, LINK_LATENCY_S, Rates, element_bytes, num_tokens, shard_size


class Grid(NamedTuple):
    """Parallel sizes of a training, devices of a node, and devices that have a node's links."""

    tensor: int
    context: int
    pipeline: int
    data: int
    devices_per_node: int
    devices_per_domain: int


class Places(NamedTuple):
    """Nodes of ranks."""

    first: tuple[int, ...]
    """Nodes of the first copy of every rank."""
    share_node: bool
    """Whether all copies of every rank share a node."""
    ports: int
    """Fewest copies of a rank on any node that has some."""


@lru_cache(maxsize=1024)
def nodes_of_copies(
    grid: Grid, adjacent: bool, partners: tuple[int, ...] | None, two_pipes: bool = False
) -> dict[tuple[int, int], int]:
    """Return the node of every rank and copy: in Megatron's own order, or with adjacent pairs, as in a balanced run.

    Parts of one sequence are copies that follow each other. Two pipes are to Megatron a pipeline of half as many ranks
    with twice as many adjacent replicas: ranks r and p - 1 - r have the same weights, and those with the first stage
    come last.
    """
    tensor, context, pipeline, data, per_node, domain = grid
    if adjacent and not two_pipes:
        parts = pair_adjacent(Topology(tensor, context, pipeline, data, per_node), partners)
        return {
            (part.stage, part.replica * context + part.context): place // domain
            for place, part in enumerate(parts)
            if part.tensor == 0
        }
    nodes, half = {}, pipeline // 2
    for rank, copy in product(range(pipeline), range(data * context)):
        replica, part = divmod(copy, context)
        position = (half - 1 - min(rank, pipeline - 1 - rank)) * data + replica
        number = 2 * position + (rank >= half) if two_pipes else rank * data + replica
        nodes[rank, copy] = (number * context + part) * tensor // domain
    return nodes


@lru_cache(maxsize=1024)
def _places_of(grid: Grid, adjacent: bool, partners: tuple[int, ...] | None, two_pipes: bool) -> Places:
    nodes, copies, ranks = nodes_of_copies(grid, adjacent, partners, two_pipes), grid.data * grid.context, grid.pipeline
    # With two pipes, two ranks have the same weights.
    alike = [(rank, ranks - 1 - rank) if two_pipes else (rank,) for rank in range(ranks)]
    counts = [Counter(nodes[rank, copy] for rank in of_group for copy in range(copies)) for of_group in alike]
    share_node = all(len(of_group) == 1 for of_group in counts)
    fewest = min(min(of_group.values()) for of_group in counts)
    return Places(tuple(nodes[rank, 0] for rank in range(ranks)), share_node, fewest)


def rank_nodes(setup: Setup) -> tuple[int, ...]:
    """Return the node of every rank of the first pipeline, reversed if the last stage is on the first rank."""
    return _in_order(setup, _places(setup, setup.cluster.devices_per_node).first)


def rank_domains(setup: Setup) -> tuple[int, ...]:
    """Return the NVLink domain of every rank of the first pipeline."""
    return _in_order(setup, _places(setup, setup.cluster.devices_per_domain).first)


def replicas_share_nodes(setup: Setup) -> bool:
    """Whether gradients are reduced within a node, or within nodes that are joined as one."""
    return _places(setup, setup.cluster.devices_per_domain).share_node


def replica_ports(setup: Setup) -> int:
    """Return over how many ports a node's replicas of a rank reach other nodes: the fewest that any node has."""
    return _places(setup, setup.cluster.devices_per_domain).ports


def copy_nodes(setup: Setup) -> tuple[int, ...]:
    """Return the domains of the first rank's copies: for each replica, all parts of the sequence."""
    nodes = nodes_of_copies(_grid(setup, setup.cluster.devices_per_domain), setup.balance is not None, setup.partners)
    return tuple(nodes[0, copy] for copy in range(setup.data * setup.context))


def _in_order(setup: Setup, nodes: tuple[int, ...]) -> tuple[int, ...]:
    ends_last = setup.num_pipes > 1 or setup.placements[0][-1] == setup.pipeline - 1
    return nodes if ends_last else tuple(reversed(nodes))


def _grid(setup: Setup, joined: int) -> Grid:
    return Grid(setup.tensor, setup.context, setup.pipeline, setup.data, setup.cluster.devices_per_node, joined)


def _places(setup: Setup, joined: int) -> Places:
    return _places_of(_grid(setup, joined), setup.balance is not None, setup.partners, setup.num_pipes > 1)


class Reach(NamedTuple):
    """The worst case over groups of devices."""

    here: int
    """Fewest of a group on one node."""
    devices: int
    """Devices of a group."""
    nodes: int
    """Nodes of a group."""


class Trip(NamedTuple):
    """One way of tokens there or back, for one layer and micro-batch."""

    seconds: float
    between_s: float
    """Part of it that the port between nodes is busy."""


def exchange(setup: Setup) -> Trip:
    """Return seconds of the exchange of tokens; none where every device has all experts whole."""
    experts, device = setup.model.experts, setup.cluster.device
    if experts is None:
        return Trip(0.0, 0.0)
    ep, divided = setup.routing.expert, setup.expert_tensor
    if ep * divided == 1:
        return Trip(0.0, 0.0)
    token = element_bytes(setup) * setup.model.hidden_size
    between = device.between_bytes_per_s * LINK_EFFICIENCY
    if setup.routing.dispatcher == "allgather":
        group = reach(setup, ep * divided)
        others, beyond = group.devices - 1, group.devices - group.here
        # A ring: what comes from beyond passes as many ports as there are devices of the node in it.
        gathered, crossed = local_tokens(setup) * token * others, local_tokens(setup) * token * beyond / group.here
        between_s = crossed / between
        return Trip(max(gathered / (device.among(group.here) * LINK_EFFICIENCY), between_s) + LINK_LATENCY_S, between_s)
    group = reach(setup, ep, divided)
    capacity = setup.routing.capacity
    copies = experts.top_k * (1.0 if capacity is None else capacity if setup.routing.padded else min(1.0, capacity))
    sent = local_tokens(setup) * token * copies / ep
    stays, leaves = sent * (group.here - 1), sent * (ep - group.here)
    if setup.routing.dispatcher == "flex" and group.nodes > 1:
        # Once to each other node, and there on to the devices.
        leaves = (
            local_tokens(setup)
            * token
            * _nodes_of_a_token(experts.num_experts, experts.top_k, group.nodes)
            * (1 - 1 / group.nodes)
        )
        stays += sent * (ep - group.here)
    between_s = leaves / between
    seconds = max(stays / (device.among(group.here) * LINK_EFFICIENCY), between_s) + LINK_LATENCY_S * (ep > 1)
    if divided > 1:
        seconds += (
            local_tokens(setup) * token * copies * (divided - 1) / (device.among(divided) * LINK_EFFICIENCY)
            + LINK_LATENCY_S
        )
    return Trip(seconds, between_s)


def _nodes_of_a_token(num_experts: int, top_k: int, nodes: int) -> float:
    """Expected number of nodes with a token's experts, if all choices are equally likely."""
    per_node = num_experts // nodes
    return nodes * (1 - comb(num_experts - per_node, top_k) / comb(num_experts, top_k))


def reach(setup: Setup, number: int, step: int = 1) -> Reach:
    """Return the worst reach of groups of `number` devices of a stage that are `step` apart."""
    return _worst(tuple(node for node in copy_nodes(setup) for _ in range(setup.tensor)), number, step)


@lru_cache(maxsize=1024)
def _worst(nodes: tuple[int, ...], number: int, step: int) -> Reach:
    groups = {
        tuple(nodes[base + offset + place * step] for place in range(number))
        for base in range(0, len(nodes), number * step)
        for offset in range(step)
    }
    spreads = [(min(Counter(group).values()), len(set(group))) for group in groups]
    here, spread = min(spreads)
    return Reach(here, number, spread)


def replicas_of_experts(setup: Setup) -> tuple[bool, int]:
    """Whether those that have the same experts share a node, and how few of them any node has of one."""
    block = setup.routing.expert * setup.expert_tensor
    group = reach(setup, setup.expert_replicas, block)
    return group.nodes == 1, group.here


def local_tokens(setup: Setup) -> int:
    """Return the tokens that a device routes: with sequence parallelism its part of the sequence."""
    return shard_size(num_tokens(setup), setup.sequence_shards)


def routed_tokens(setup: Setup) -> int:
    """Return the tokens that the experts of a device compute for a micro-batch: one copy for each choice."""
    experts, routing = setup.model.experts, setup.routing
    assert experts is not None
    sent = local_tokens(setup) * experts.top_k
    if routing.capacity is not None and (routing.padded or routing.capacity < 1):
        # Even loads drop nothing from a capacity of 1 on.
        sent = experts.num_experts * ceil(sent / experts.num_experts * routing.capacity)
    return sent * setup.expert_tensor


# What every step gives is read, and added to a sum of 32 bit.
_SUM_BYTES = 4


def with_exchange(setup: Setup, forward_s: float, backward_s: float) -> tuple[float, float]:
    """Return forward and backward seconds of the core with what it waits for and what is copied and added up."""
    c, rates, element = setup.context, Rates.of(setup), element_bytes(setup)
    query, both, output = (element * values for values in _values(setup))
    if setup.cp_comm_type == "p2p":
        hop, step, step_back = _hop_seconds(setup, both), forward_s / c, backward_s / c
        waits = (c - 1) * max(0.0, hop - step)
        # First keys and values alone, last their gradients alone, between both.
        waits_back = 2 * max(0.0, hop - step_back) + (c - 2) * max(0.0, _hop_seconds(setup, 2 * both) - step_back)
        copied, copied_back = c * output * (1 + 2 * _SUM_BYTES / element), 3 * c * (query + both)
    elif setup.cp_comm_type == "all_gather":
        gathered = _gather_seconds(setup, both)
        waits, waits_back = gathered, 2 * gathered
        # Put in the order of the sequence, and taken from it by each of two parts.
        copied, copied_back = 4 * c * both, 8 * c * both
    else:
        waits = waits_back = _to_all_seconds(setup, query + both) + _to_all_seconds(setup, output)
        # Backward the same of the gradients.
        copied = copied_back = 4 * (query + both + output)
    return forward_s + waits + copied / rates.memory, backward_s + waits_back + copied_back / rates.memory


def exchange_bytes(setup: Setup) -> int:
    """Return the bytes of buffers for the exchange: parts and results of a ring, or what is gathered or sent."""
    if setup.context == 1:
        return 0
    element, c = element_bytes(setup), setup.context
    query, both, output = _values(setup)
    if setup.cp_comm_type == "p2p":
        return c * element * (both + output) + _SUM_BYTES * output
    if setup.cp_comm_type == "all_gather":
        return 4 * c * element * both
    return 2 * element * (query + both + output)


def _values(setup: Setup) -> tuple[int, int, int]:
    """Values of a rank's tokens: queries, keys and values together, and attention's output."""
    model, tokens = setup.model, num_tokens(setup)
    query, both, output = (
        shard_size(tokens * size, setup.tensor) for size in (model.query_size, model.key_value_size, model.value_size)
    )
    return query, both, output


def _reach(setup: Setup) -> Reach:
    return reach(setup, setup.context, setup.tensor)


def _hop_seconds(setup: Setup, num_bytes: float) -> float:
    """Seconds to the next rank of the ring, at the pace of its slowest link."""
    device = setup.cluster.device
    link = device.among(2) if _reach(setup).nodes == 1 else device.between_bytes_per_s
    return num_bytes / (link * LINK_EFFICIENCY) + LINK_LATENCY_S


def _gather_seconds(setup: Setup, num_bytes: float) -> float:
    """Data from other nodes passes as many ports as the ring has devices in a node."""
    ring, device = _reach(setup), setup.cluster.device
    inside = num_bytes * (setup.context - 1) / device.among(ring.here)
    between = num_bytes * (setup.context - ring.here) / ring.here / device.between_bytes_per_s
    return max(inside, between) / LINK_EFFICIENCY + LINK_LATENCY_S


def _to_all_seconds(setup: Setup, num_bytes: float) -> float:
    group, device, part = _reach(setup), setup.cluster.device, num_bytes / setup.context
    inside = part * (group.here - 1) / device.among(group.here)
    between = part * (setup.context - group.here) / device.between_bytes_per_s
    return max(inside, between) / LINK_EFFICIENCY + LINK_LATENCY_S
