"""Nodes and NVLink domains of ranks and of their copies.

A copy of a rank is a device with the same weights: one for every replica and every context-parallel part. In Megatron's
order of ranks tensor parallelism is innermost, then context, data and pipeline parallelism.
"""

from collections import Counter
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from bpipe.placement import Topology, pair_adjacent
from bpipe.predict.layout import Setup


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
