"""Lower bounds for all configurations of a branch at once, before any of them is made.

The ranks' mean computing time is at most that of the slowest rank, and their mean memory at most that of the fullest.
By Little's law ranks hold, on average, the bytes that enter per second times the seconds that they stay: from a layer's
forward to its backward, at least as long as all later layers take in both directions.
"""

from dataclasses import dataclass, replace
from math import inf

from bpipe.plan.space import Branch, Space, plainest
from bpipe.predict.costs import PartSeconds, PartsOfSetups, stage_cost
from bpipe.predict.layers.ends import shard_seconds
from bpipe.predict.layout import Setup
from bpipe.predict.memory import rank_states, with_state
from bpipe.predict.saved_tensors import layers_bytes
from bpipe.schedule.hosts import IN_NODES
from bpipe.schedule.layout import Vocabulary
from bpipe.simulate.cost import StageCost


@dataclass(frozen=True, slots=True)
class BranchBounds:
    """Lower bounds for every configuration of a branch."""

    setup: Setup
    """The plainest of them: 1F1B, with nothing of ours."""
    seconds: float
    """Seconds that no iteration is shorter than."""
    state_bytes: int
    """Bytes that a rank holds throughout, on average."""
    saved_bytes: float
    """Bytes that a rank holds of activations when the first backward begins, on average."""
    held_byte_seconds: float
    """Bytes that a rank holds of activations times the seconds it holds them, on average, per iteration."""

    def bytes_within(self, seconds: float = inf) -> int:
        """Return the fewest bytes that the fullest rank can need if an iteration takes at most these seconds."""
        activation_bytes = max(self.saved_bytes, self.held_byte_seconds / seconds)
        return with_state(self.setup, self.state_bytes, int(activation_bytes))


class Bounder:
    """Bounds of one space's branches. All branches of a grid hold the same bytes throughout."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._states: dict[object, int] = {}
        self._parts = PartsOfSetups()

    def of(self, branch: Branch) -> BranchBounds:
        """Return a branch's bounds: only those of its state if stages were measured or the state alone does not fit."""
        space, setup = self._space, plainest(self._space, branch)
        grid = branch.tensor, branch.context, branch.pipeline, branch.routing
        if grid not in self._states:
            self._states[grid] = sum(rank_states(setup)) // branch.pipeline
        bounds = BranchBounds(setup, 0.0, self._states[grid], 0.0, 0.0)
        is_measured = space.profile is not None or space.traced is not None
        if is_measured or bounds.bytes_within() > space.cluster.limit_bytes:
            return bounds
        return _bound(space, bounds, self._parts)


def _bound(space: Space, state_bounds: BranchBounds, seconds: PartsOfSetups) -> BranchBounds:
    setup, state = state_bounds.setup, state_bounds.state_bytes
    p = setup.pipeline
    # Balanced ranks lie on other nodes, which matters only to layers that communicate between devices.
    lie_apart = p > 1 and (setup.model.experts is not None or setup.context > 1)
    balances = [balance for balance in space.balancing if balance is not None and lie_apart]
    variants = [setup, *(replace(setup, balance=balance) for balance in balances)]
    parts = [seconds.of(variant) for variant in variants]
    costs = [_stage_costs(setup, part_seconds) for part_seconds in parts]
    factor = setup.time_factor * setup.num_microbatches
    computed_s = min(sum(map(_whole_s, of_stages)) for of_stages in costs)
    held_s = min(([*map(_held_s, of_stages)] for of_stages in costs), key=sum)
    # If CPU memory may host, nothing has to be on any device.
    may_leave = any(balance is not None and balance.hosts in IN_NODES for balance in space.balancing)
    # Block recomputation recomputes a number of layers per chunk, so more chunks recompute more.
    smallest = replace(setup, recompute="full") if setup.recomputed.method == "block" else setup
    saved = [0.0] * p if may_leave else [size / max(space.slices) for size in layers_bytes(smallest)]
    return BranchBounds(
        setup,
        factor * (computed_s / p + _ends_seconds(space, setup, parts[0])),
        state,
        sum(saved) / p,
        factor * _byte_seconds(setup, held_s, saved) / p,
    )


def _stage_costs(setup: Setup, parts: PartSeconds) -> list[StageCost]:
    """Return the cost of each stage's layers, without embedding and output layer."""
    costs = {layers: stage_cost(parts, layers, first=False, last=False) for layers in set(setup.stage_layers)}
    return [costs[layers] for layers in setup.stage_layers]


def _whole_s(cost: StageCost) -> float:
    """Seconds of a stage, forward and backward, the latter whole or in halves."""
    return float(cost.whole_forward_s + min(cost.whole_backward_s, cost.whole_input_s + (cost.weight_s or 0)))


def _held_s(cost: StageCost) -> float:
    """Seconds of a stage without weights' halves, which an earlier stage need not wait for."""
    return float(cost.whole_forward_s + min(cost.whole_backward_s, cost.whole_input_s))


def _ends_seconds(space: Space, setup: Setup, parts: PartSeconds) -> float:
    """Return the mean seconds per rank of the output layer and the embedding, whole or in shards."""
    whole = (sum(parts.output) + sum(parts.embedding)) / setup.pipeline
    if setup.pipeline == 1:
        return whole
    modes = [Vocabulary(name) for name in space.vocabularies if name != Vocabulary.WHOLE.value]
    shards = (shard_seconds(replace(setup, vocabulary=vocabulary)) for vocabulary in modes)
    return min([whole, *(float(shard.forward_s + shard.backward_s) for shard in shards)])


def _byte_seconds(setup: Setup, stages: list[float], saved: list[float]) -> float:
    """Return bytes times the seconds that they stay, for one micro-batch, summed over all stages."""
    total_byte_s = later_s = 0.0
    for layers, own_s, size in zip(*map(reversed, (setup.stage_layers, stages, saved)), strict=True):
        number = sum(number for *_, number in layers)
        # Half of the other identical layers come later, on average.
        total_byte_s += size * (later_s + (own_s * (number - 1) / (2 * number) if len(layers) == 1 else 0.0))
        later_s += own_s
    return total_byte_s
