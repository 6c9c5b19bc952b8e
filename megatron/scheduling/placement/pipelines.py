"""Which processes form a pipeline of the schedule, and values gathered from all of them.

Megatron's groups say which ranks form a pipeline. With two pipes it is two of Megatron's pipelines, of neighbouring
data-parallel replicas.
"""

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from bpipe.transport import distributed
from megatron.scheduling.placement.positions import Positions


def gathered(positions: Positions, value: object) -> tuple[Any, ...]:
    """Gather a value from every rank of this pipeline, by position.

    Collective over the pipeline; with two pipes over all replicas' pipelines.
    """
    by_rank = distributed.gathered(value, parallel_state.get_pipeline_model_parallel_group())
    if not positions.pipes:
        return positions.in_order(by_rank)
    replicas = distributed.gathered(by_rank, parallel_state.get_data_parallel_group())
    pair = positions.pair_of(parallel_state.get_data_parallel_rank())
    return positions.in_order(*(replicas[replica] for replica in pair))


def pipelines(positions: Positions) -> list[tuple[int, ...]]:
    """Return the global ranks of every pipeline of the world, by position, each pipeline once.

    Equal on every rank. Collective over the world.
    """
    return sorted(set(distributed.gathered(gathered(positions, dist.get_rank()))))
