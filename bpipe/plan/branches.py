"""Lower bounds for all configurations of a branch at once, before any of them is made.

The mean over the ranks of what they compute is no more than the slowest rank's, and the mean of what they hold no more
than the fullest rank's. By Little's law ranks hold, on average, the bytes that enter per second times the seconds that
they stay: from a layer's forward to its backward at least what all later layers take in both directions.
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
        """Return the least bytes of the fullest rank if an iteration takes no more than these seconds."""
        held = max(self.saved_bytes, self.held_byte_seconds / seconds)
        return with_state(self.setup, self.state_bytes, int(held))


class Bounder:
    """Bounds of the branches of one space. What ranks hold throughout is the same for all of a grid's."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._states: dict[object, int] = {}
        self._parts = PartsOfSetups()

    def of(self, branch: Branch) -> BranchBounds:
        """Return the bounds of a branch. What was measured is not made of parts, and has none but its state; nor has
        one whose state alone is too much."""
        space, setup = self._space, plainest(self._space, branch)
        grid = branch.tensor, branch.context, branch.pipeline, branch.routing
        if grid not in self._states:
            self._states[grid] = sum(rank_states(setup)) // branch.pipeline
        bounds = BranchBounds(setup, 0.0, self._states[grid], 0.0, 0.0)
        is_measured = space.profile is not None or space.traced is not None
        if is_measured or bounds.bytes_within() > space.cluster.limit_bytes:
            return bounds
        return _bound(space, bounds, self._parts)


def _bound(space: Space, least: BranchBounds, seconds: PartsOfSetups) -> BranchBounds:
    setup, state = least.setup, least.state_bytes
    p = setup.pipeline
    # Balanced ranks lie on other nodes, which matters only to what layers exchange between devices.
    lie_apart = p > 1 and (setup.model.experts is not None or setup.context > 1)
    balances = [balance for balance in space.balancing if balance is not None and lie_apart]
    ways = [setup, *(replace(setup, balance=balance) for balance in balances)]
    parts = [seconds.of(way) for way in ways]
    costs = [_stage_costs(setup, one) for one in parts]
    times = setup.time_factor * setup.num_microbatches
    computed_s = min(sum(map(_whole_s, of_stages)) for of_stages in costs)
    held_s = min(([*map(_held_s, of_stages)] for of_stages in costs), key=sum)
    # If CPU memory may host, nothing has to be on any device.
    leaves = any(one is not None and one.hosts in IN_NODES for one in space.balancing)
    # With block recomputation some layers of each chunk are recomputed, so with more chunks more are.
    smallest = replace(setup, recompute="full") if setup.recomputed.method == "block" else setup
    saved = [0.0] * p if leaves else [size / max(space.slices) for size in layers_bytes(smallest)]
    return BranchBounds(
        setup,
        times * (computed_s / p + _ends_seconds(space, setup, parts[0])),
        state,
        sum(saved) / p,
        times * _byte_seconds(setup, held_s, saved) / p,
    )


def _stage_costs(setup: Setup, parts: PartSeconds) -> list[StageCost]:
    """Return costs of every stage's layers alone."""
    each = {layers: stage_cost(parts, layers, first=False, last=False) for layers in set(setup.stage_layers)}
    return [each[layers] for layers in setup.stage_layers]


def _whole_s(cost: StageCost) -> float:
    """Seconds of a stage, forward and backward, the latter whole or in halves."""
    return float(cost.whole_forward_s + min(cost.whole_backward_s, cost.whole_input_s + (cost.weight_s or 0)))


def _held_s(cost: StageCost) -> float:
    """The same without weights' halves, which need not have been computed when an earlier stage's turn comes."""
    return float(cost.whole_forward_s + min(cost.whole_backward_s, cost.whole_input_s))


def _ends_seconds(space: Space, setup: Setup, parts: PartSeconds) -> float:
    """Return seconds of the output layer and the embedding, on average over the ranks: whole or in shards."""
    whole = (sum(parts.output) + sum(parts.embedding)) / setup.pipeline
    if setup.pipeline == 1:
        return whole
    split = [Vocabulary(name) for name in space.vocabularies if name != Vocabulary.WHOLE.value]
    shards = (shard_seconds(replace(setup, vocabulary=vocabulary)) for vocabulary in split)
    return min([whole, *(float(shard.forward_s + shard.backward_s) for shard in shards)])


def _byte_seconds(setup: Setup, stages: list[float], saved: list[float]) -> float:
    """Return bytes times the seconds that they stay, of one micro-batch and all stages."""
    total_byte_s = later_s = 0.0
    for layers, own_s, size in zip(*map(reversed, (setup.stage_layers, stages, saved)), strict=True):
        number = sum(number for *_, number in layers)
        # Of layers that are alike half come later, on average.
        total_byte_s += size * (later_s + (own_s * (number - 1) / (2 * number) if len(layers) == 1 else 0.0))
        later_s += own_s
    return total_byte_s
