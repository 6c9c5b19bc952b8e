"""Say on which nodes and NVLink domains the ranks of a setup lie. In: a Setup. Out: nodes by rank or by copy."""

from __future__ import annotations

from bpipe.predict.layout import Setup
from bpipe.predict.places import Grid, Places, nodes_of_copies, paired_places, places


def rank_nodes(setup: Setup) -> tuple[int, ...]:
    """Return the node of every rank of the first pipeline.

    Where the last stage is not on the last rank, Megatron's ranks are these reversed: the loss stays on its last one.
    """
    return _in_order(setup, _places(setup, setup.cluster.devices_per_node).first)


def rank_domains(setup: Setup) -> tuple[int, ...]:
    """Return the NVLink domain of every rank of the first pipeline."""
    return _in_order(setup, _places(setup, setup.cluster.devices_per_domain).first)


def replicas_share_nodes(setup: Setup) -> bool:
    """Return whether gradients are reduced within a node, or within nodes that are joined as one."""
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
