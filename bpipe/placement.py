"""Placement of pipeline stages so that the two stages of a pair share a node.

Every place (a GPU, counted over the nodes) gets its part of the model. Tensor and context parallelism are innermost,
then the pipeline, then data parallelism; within a pipeline, stages come as pairs: 0, p-1, 1, p-2, ... Source: Kim et
al. 2023, section 3.3.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# The trainer's placements: pairs on one node, or Megatron's own rank order.
PLACEMENTS = ("adjacent", "none")


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes to place: a world of tensor * context * pipeline * data ranks on nodes of `gpus_per_node` GPUs."""

    tensor: int
    context: int
    pipeline: int
    data: int
    gpus_per_node: int

    def __post_init__(self) -> None:
        for name in ("tensor", "context", "pipeline", "data", "gpus_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 1")

    @property
    def world(self) -> int:
        return self.block * self.pipeline * self.data

    @property
    def block(self) -> int:
        """Number of GPUs that share one stage of one replica; a placement never separates them."""
        return self.tensor * self.context


class Part(NamedTuple):
    """Part of the model that one GPU holds."""

    stage: int
    replica: int
    context: int
    tensor: int


def pair_adjacent(topology: Topology, partners: Sequence[int] | None = None) -> tuple[Part, ...]:
    """Return `parts[place]` for every GPU, with every pair on one node if twice a stage's GPUs divide a node's.

    A node is filled with whole pairs, then with stages without a partner (an odd pipeline has one in the middle), and
    only then with halves of pairs, whose other halves follow on the next node. The first place always has the first
    stage of the first replica.

    Args:
        topology: The GPUs of a node, and the sizes of the pipeline and its replicas.
        partners: By stage, the other stage of its pair or, without one, itself; by default the one opposite.
    """
    order = _order(topology, partners or _opposite(topology))
    return tuple(Part(*block, *divmod(inner, topology.tensor)) for block in order for inner in range(topology.block))


def _opposite(topology: Topology) -> Sequence[int]:
    """Return the default partners: the first with the last, and so on."""
    return range(topology.pipeline - 1, -1, -1)


def _order(topology: Topology, partners: Sequence[int]) -> list[tuple[int, int]]:
    """Return the (stage, replica) blocks in order of their places."""
    replicas = range(topology.data)
    pairs = deque(((s, r), (other, r)) for r in replicas for s, other in enumerate(partners) if s < other)
    middles = deque((s, r) for r in replicas for s, other in enumerate(partners) if s == other)
    order: list[tuple[int, int]] = []
    if middles and not middles[0][0]:
        # Rank 0 stays with its store.
        order.append(middles.popleft())
    while pairs or middles:
        room = topology.gpus_per_node - len(order) * topology.block % topology.gpus_per_node
        # If no node has room for a pair, a middle stage need not wait.
        if pairs and (room >= 2 * topology.block or not middles or 2 * topology.block > topology.gpus_per_node):
            order.extend(pairs.popleft())
        else:
            order.append(middles.popleft())
    return order


def pairs_apart(
    topology: Topology, parts: tuple[Part, ...], partners: Sequence[int] | None = None
) -> set[tuple[int, int]]:
    """Return the stages of pairs of which some GPUs would transfer between two nodes.

    Args:
        topology: As in `pair_adjacent`.
        parts: What each GPU computes, by place.
        partners: As in `pair_adjacent`.
    """
    others = partners or _opposite(topology)
    node_of = {part: place // topology.gpus_per_node for place, part in enumerate(parts)}
    return {
        (part.stage, other)
        for part, node in node_of.items()
        if part.stage < (other := others[part.stage]) and node != node_of[part._replace(stage=other)]
    }
