"""Nodes and NVLink domains of ranks and of their copies.

A copy of a rank is a device with the same weights: one for every replica and every context-parallel part. In Megatron's
order of ranks tensor parallelism is innermost, then context, data and pipeline parallelism.
"""

from collections import Counter
from functools import lru_cache
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
def places(grid: Grid, adjacent: bool, partners: tuple[int, ...] | None) -> Places:
    """Return the places of ranks: pairs are adjacent in a balanced run; any other has Megatron's own order."""
    nodes = nodes_of_copies(grid, adjacent, partners)
    groups = [[nodes[rank, copy] for copy in range(grid.data * grid.context)] for rank in range(grid.pipeline)]
    return Places(tuple(nodes[rank, 0] for rank in range(grid.pipeline)), *_spread(groups))


@lru_cache(maxsize=1024)
def nodes_of_copies(grid: Grid, adjacent: bool, partners: tuple[int, ...] | None) -> dict[tuple[int, int], int]:
    """Return the node of every rank and copy. Parts of one sequence are copies that follow each other."""
    tensor, context, pipeline, data, per_node, domain = grid
    if adjacent:
        parts = pair_adjacent(Topology(tensor, context, pipeline, data, per_node), partners)
        place_of = {
            (part.stage, part.replica * context + part.context): place
            for place, part in enumerate(parts)
            if part.tensor == 0
        }
    else:
        copies = data * context
        place_of = {(rank, copy): (rank * copies + copy) * tensor for rank in range(pipeline) for copy in range(copies)}
    return {key: place // domain for key, place in place_of.items()}


@lru_cache(maxsize=1024)
def paired_places(grid: Grid) -> Places:
    """Return the places with two pipes: to Megatron a pipeline of half as many ranks with twice as many adjacent
    replicas.

    Ranks r and p - 1 - r have the same weights and are adjacent; those with the first stage come last.
    """
    tensor, context, pipeline, data, _, domain = grid
    half = pipeline // 2
    nodes: dict[tuple[int, int], int] = {}
    for rank in range(pipeline):
        position = half - 1 - min(rank, pipeline - 1 - rank)
        for copy in range(data * context):
            replica, part = divmod(copy, context)
            place = (((position * data + replica) * 2 + (rank >= half)) * context + part) * tensor
            nodes[rank, copy] = place // domain
    groups = [
        [nodes[partner, copy] for copy in range(data * context) for partner in (rank, pipeline - 1 - rank)]
        for rank in range(half)
    ]
    return Places(tuple(nodes[rank, 0] for rank in range(pipeline)), *_spread(groups))


def _spread(groups: list[list[int]]) -> tuple[bool, int]:
    """Whether every group lies on one node, and the fewest copies of a group on any node."""
    counts = [Counter(group) for group in groups]
    return all(len(of_group) == 1 for of_group in counts), min(min(of_group.values()) for of_group in counts)


def rank_nodes(setup: Setup) -> tuple[int, ...]:
    """Return the node of every rank of the first pipeline, in reverse order of Megatron's if the last stage is not on
    the last."""
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
    """Return the nodes, or domains, of the first rank's copies, in the order of these: of each replica all parts of
    the sequence."""
    nodes = nodes_of_copies(_grid(setup, setup.cluster.devices_per_domain), setup.balance is not None, setup.partners)
    return tuple(nodes[0, copy] for copy in range(setup.data * setup.context))


def _in_order(setup: Setup, nodes: tuple[int, ...]) -> tuple[int, ...]:
    ends_last = setup.num_pipes > 1 or setup.placements[0][-1] == setup.pipeline - 1
    return nodes if ends_last else tuple(reversed(nodes))


def _grid(setup: Setup, joined: int) -> Grid:
    return Grid(setup.tensor, setup.context, setup.pipeline, setup.data, setup.cluster.devices_per_node, joined)


def _places(setup: Setup, joined: int) -> Places:
    grid = _grid(setup, joined)
    return paired_places(grid) if setup.num_pipes > 1 else places(grid, setup.balance is not None, setup.partners)
