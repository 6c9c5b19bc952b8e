"""Take the place in Megatron's rank order that puts pipeline pairs on one node.

In: Megatron's parsed arguments and the launcher's environment, before the process group exists. Out: another `RANK`, and one table in
the log. Megatron orders ranks by dimension and cannot express pairs, so which process takes which rank is permuted; `LOCAL_RANK`, and
with it the GPU, stays.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from bpipe.placement import Part, Topology, pair_adjacent, pairs

PLACEMENTS = ("adjacent", "none")


def apply(args: Any) -> None:
    """Change this process's rank as `--bpipe-placement` says. Does nothing without `--bpipe`, or where there are no pairs."""
    # A YAML configuration replaces the command line, and ours with it; it is refused later.
    if not getattr(args, "bpipe", False) or args.bpipe_placement == "none" or args.pipeline_model_parallel_size < 4:
        return
    topology = topology_of(args)
    if topology is None:
        return
    place = args.rank
    parts = pair_adjacent(topology)
    args.rank = rank_of(parts[place], topology, pipeline_before_data=args.use_tp_pp_dp_mapping)
    os.environ["RANK"] = str(args.rank)
    if place == 0:
        print(describe(topology, parts), flush=True)


def topology_of(args: Any) -> Topology | None:
    """The run's sizes; None where they do not fit the world, which Megatron refuses itself, or another dimension takes part."""
    block = args.tensor_model_parallel_size * args.context_parallel_size * args.pipeline_model_parallel_size
    if args.world_size % block or args.tensor_parallel_num_weight_shards is not None:
        return None
    return Topology(
        tensor=args.tensor_model_parallel_size,
        context=args.context_parallel_size,
        pipeline=args.pipeline_model_parallel_size,
        data=args.world_size // block,
        gpus_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size)),
    )


def rank_of(part: Part, topology: Topology, pipeline_before_data: bool) -> int:
    """The rank Megatron gives to a part: tensor innermost, then context, then data and pipeline in either order."""
    inner = part.tensor + topology.tensor * part.context
    if pipeline_before_data:
        return inner + topology.block * (part.stage + topology.pipeline * part.replica)
    return inner + topology.block * (part.replica + topology.data * part.stage)


def describe(topology: Topology, parts: tuple[Part, ...]) -> str:
    """Which node holds which stages, and over what each pair will talk."""
    lines = [f"bpipe: placement adjacent: {topology.world} ranks on nodes of {topology.gpus_per_node}"]
    for first in range(0, topology.world, topology.gpus_per_node):
        held = [str(part.stage) for part in parts[first : first + topology.gpus_per_node]]
        lines.append(f"bpipe:   node {first // topology.gpus_per_node}: stages {' '.join(held)}")
    apart = Counter(pair.stages for pair in pairs(topology, parts) if pair.nodes[0] != pair.nodes[1])
    if apart:
        named = ", ".join(f"{a}-{b}" for a, b in sorted(apart))
        lines.append(
            f"bpipe:   pairs {named} stand on two nodes and will use the network: a pair needs {2 * topology.block} GPUs "
            f"of one node, and a node has {topology.gpus_per_node}"
        )
    return "\n".join(lines)
