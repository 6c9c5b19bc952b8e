"""Say how long each kind of computation takes.

In: costs. Out: seconds by kind and stage. Knows no schedule and no clock.
"""

from __future__ import annotations

from bpipe.schedule.action import Kind
from bpipe.simulate.cost import Costs, Number, ShardCost


def durations(costs: Costs, num_ranks: int) -> dict[Kind, list[Number]]:
    """Return the seconds of every kind of computation on every stage, or slice of one, or, of shards, on every
    rank."""
    stages = costs.stages
    shards = costs.shards if len(costs.shards) > 1 else (costs.shards or (ShardCost(),)) * num_ranks
    return {
        Kind.FORWARD: [cost.whole_forward_s for cost in stages],
        Kind.BACKWARD: [cost.whole_backward_s for cost in stages],
        Kind.BACKWARD_INPUT: [cost.whole_input_s for cost in stages],
        Kind.BACKWARD_WEIGHT: [cost.weight_s or 0 for cost in stages],
        Kind.SHARD_FORWARD: [shard.forward_s for shard in shards],
        Kind.SHARD_BACKWARD: [shard.backward_s for shard in shards],
        Kind.INPUT_FORWARD: [shard.input_forward_s for shard in shards],
        Kind.INPUT_BACKWARD: [shard.input_backward_s for shard in shards],
    }
