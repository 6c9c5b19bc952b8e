"""Seconds of the exchanges between tokens and their experts, for one layer.

Every device sends tokens to the devices that have their experts, and gets the results back: two exchanges forward, two
backward, waited for. Loads are taken to be even. What stays in the node takes NVLink, the rest the device's own port,
both at the same time. Ranks that divide an expert gather its tokens and scatter the sum. Megatron's dispatchers:
  alltoall   A token is sent once for every expert it goes to.
  allgather  All tokens go to all devices that share the experts, and the sum is scattered.
  flex       A token goes once to each node that has experts for it, and on from there (DeepEP, HybridEP).
"""

from collections import Counter
from functools import lru_cache
from math import ceil, comb
from typing import NamedTuple

from bpipe.predict.layout import Setup
from bpipe.predict.nodes import copy_nodes
from bpipe.predict.sizes import LINK_EFFICIENCY, LINK_LATENCY_S, element_bytes, num_tokens, shard_size


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
    copies = _copies(setup)
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


def _copies(setup: Setup) -> float:
    experts, capacity = setup.model.experts, setup.routing.capacity
    assert experts is not None
    share = 1.0 if capacity is None else capacity if setup.routing.padded else min(1.0, capacity)
    return experts.top_k * share


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
