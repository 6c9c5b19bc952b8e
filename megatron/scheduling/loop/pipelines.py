"""Say which processes are a pipeline of the schedule's, and ask all of one.

In: the positions. Out: the global ranks of every pipeline, and what each of its ranks says, by position. Which ranks
form a pipeline is asked of Megatron's groups, not computed again: with two pipes it is two of Megatron's pipelines, of
neighbouring data-parallel replicas.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron.scheduling.placement.positions import Positions


def gathered(positions: Positions, mine: object) -> tuple[Any, ...]:
    """Gather a value from every rank of this pipeline, by position.

    Collective over the pipeline; with two pipes over all replicas' pipelines.
    """
    by_rank = _of(parallel_state.get_pipeline_model_parallel_group(), mine)
    if not positions.pipes:
        return positions.in_order(by_rank)
    replicas = _of(parallel_state.get_data_parallel_group(), by_rank)
    return positions.in_order(*(replicas[one] for one in positions.pair_of(parallel_state.get_data_parallel_rank())))


def _of(group: Any, mine: object) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group)
    return found


def pipelines(positions: Positions) -> list[tuple[int, ...]]:
    """Return the global ranks of every pipeline of the world, by position, each pipeline once.

    Equal on every rank. Collective over the world.
    """
    return sorted(set(_of(None, gathered(positions, dist.get_rank()))))
