"""Say over which links a setup's ranks reach each other. In: a Setup. Out: `Links`, hosts, seconds of collectives."""

from __future__ import annotations

from operator import mul

from bpipe.build import unchecked
from bpipe.predict.layers.ends import STATISTICS, STATISTICS_BYTES
from bpipe.predict.layout import Setup
from bpipe.predict.nodes import rank_domains, rank_nodes
from bpipe.predict.rates import LINK_EFFICIENCY, LINK_LATENCY_S
from bpipe.predict.sizes import num_tokens, sent_bytes
from bpipe.schedule.hosts import PAIR, Hosts, device_ranks, halved_pairs, in_pairs, mirrored_pairs
from bpipe.simulate.cost import CollectiveCost, Link, Links


def collective_seconds(setup: Setup) -> CollectiveCost:
    """Return the cost of the collective over all shards of a pipeline at its slowest link: a ring brings everybody
    everything once."""
    device = setup.cluster.device
    slowest = (
        device.between_bytes_per_s if len(set(rank_domains(setup))) > 1 else device.among(setup.pipeline)
    ) * LINK_EFFICIENCY
    tokens, sent = num_tokens(setup), sent_bytes(setup)
    statistics = STATISTICS * STATISTICS_BYTES * tokens * setup.vocabulary_shards
    hidden = 4 * tokens * setup.model.hidden_size / setup.sequence_shards
    inputs = sent if setup.input_shards else 0
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
    """What a device's link to its node's memory carries in one direction, when all devices of the node that send
    there do so at once."""
    device, cluster = setup.cluster.device, setup.cluster
    if device.host_node_bytes_per_s is None:
        return device.host_bytes_per_s
    sends = [any(not host.on_device for host in of_rank) for of_rank in hosts_of(setup)]
    nodes = rank_nodes(setup)
    # Of a node's devices as large a part sends as of the ranks that the first pipeline has there: replicas do as it
    # does.
    part = max((sum(map(mul, sends, map(node.__eq__, nodes))) / nodes.count(node) for node in set(nodes)), default=0)
    return min(device.host_bytes_per_s, device.host_node_bytes_per_s / max(1.0, part * cluster.devices_per_node))


def one_sided(nodes: tuple[int, ...], hosts: Hosts) -> frozenset[int]:
    """Return the ranks whose hosts are all on their node.

    There `--bpipe-transport auto` reaches into their memory; between nodes both have to meet, whatever joins these.
    """
    return frozenset(
        rank for rank, of_rank in enumerate(hosts) if all(nodes[host] == nodes[rank] for host in device_ranks(of_rank))
    )
