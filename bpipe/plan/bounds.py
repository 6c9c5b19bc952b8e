"""Lower bounds of iteration times, for many configurations of one space, or for all of a branch before any is made.

In: Setups or a Branch, a Profile. Out: seconds that no iteration is shorter than, and of a branch bytes.

An iteration takes at least a rank's own work, what precedes its first computation and follows its last, and the update.
Setups of one `Space` share most of it: a layer's time does not depend on the schedule, nor an update's on the
micro-batch, so each is computed once. No schedule is built, and memory is ignored.

Of a branch, the ranks' mean computing time is at most that of the slowest rank, and their mean memory at most that of the
fullest. By Little's law ranks hold, on average, the bytes that enter per second times the seconds that they stay: from a
layer's forward to its backward, at least as long as all later layers take in both directions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import inf
from typing import NamedTuple

from bpipe.plan.predict import costs_of
from bpipe.plan.space import Branch, Space, plainest
from bpipe.predict.activations import layers_bytes
from bpipe.predict.costs import PartSeconds, PartsOfSetups, stage_cost, update_seconds
from bpipe.predict.layers.ends import shard_seconds
from bpipe.predict.layout import Setup
from bpipe.predict.memory import rank_states, with_state
from bpipe.predict.profile import Profile
from bpipe.predict.recompute import StageLayers
from bpipe.predict.slices import slice_setups
from bpipe.schedule.hosts import IN_NODES
from bpipe.schedule.layout import Vocabulary
from bpipe.simulate.cost import ShardCost, StageCost, scaled

_NO_SHARDS = ShardCost()


class _Work(NamedTuple):
    """Seconds of a micro-batch: forward and backward by stage, and its shards, the same on every rank.

    `begins`: forwards of the first slice, which run first; `ends`: backwards of the first slice, which run last.
    """

    forwards: Sequence[float]
    backwards: Sequence[float]
    shard: ShardCost
    begins: Sequence[float]
    ends: Sequence[float]


def _work_of(setup: Setup, profile: Profile | None) -> _Work:
    costs = costs_of(setup, profile)
    shard = costs.shards[0] if costs.shards else _NO_SHARDS
    of_slices = [
        [_both(costs.of(stage, part), setup.splits) for stage in range(costs.num_stages)]
        for part in range(costs.slices)
    ]
    return _together(of_slices, shard)


def _together(of_slices: Sequence[Sequence[tuple[float, float]]], shard: ShardCost) -> _Work:
    """Add up the forwards and backwards of every stage, slice by slice."""
    first, *later = of_slices
    forwards, backwards = [forward for forward, _ in first], [backward for _, backward in first]
    begins, ends = tuple(forwards), tuple(backwards)
    for part in later:
        for stage, (forward, backward) in enumerate(part):
            forwards[stage] += forward
            backwards[stage] += backward
    return _Work(forwards, backwards, shard, begins, ends)


def _update_s(setup: Setup, profile: Profile | None) -> float:
    costs = costs_of(setup, profile)
    return _longest(setup, [float(costs.of(stage).optimizer_s) for stage in range(costs.num_stages)])


class Bounds:
    """Lower bounds of setups that differ only in what a `Space` varies, bit-identical to those by `costs_of`."""

    def __init__(self, profile: Profile | None = None) -> None:
        self._profile = profile
        self._parts = PartsOfSetups()
        self._stages: dict[object, tuple[float, float]] = {}
        self._updates: dict[object, float] = {}
        self._pipelines: dict[object, tuple[float, float]] = {}

    def seconds(self, setup: Setup) -> float:
        """Return a lower bound of the seconds of an iteration."""
        return self.pipeline_s(setup) + self._update(setup)

    def pipeline_s(self, setup: Setup) -> float:
        """Return the bound without the update."""
        return self._pipeline(setup)[0]

    def load(self, setup: Setup) -> float:
        """Return the computing time of the last stage's rank per micro-batch, as a multiple of the other ranks' mean."""
        return self._pipeline(setup)[1]

    def _pipeline(self, setup: Setup) -> tuple[float, float]:
        # Balanced ranks are on other devices, which matters only to experts and parts of a sequence: these communicate
        # during computations.
        balance = setup.balance if setup.model.experts is not None or setup.context > 1 else None
        size = _grid(setup), balance, _size(setup)
        key = size, _cut(setup)
        if key not in self._pipelines:
            # A profile measures whole stages, so they are not added up from parts.
            if self._profile is not None:
                work = _work_of(setup, self._profile)
            else:
                of_slices = [self._stages_of(part, (size, part.span)) for part in slice_setups(setup)]
                shard = scaled(shard_seconds(setup), setup.time_factor) if setup.is_sharded else _NO_SHARDS
                work = _together(of_slices, shard)
            self._pipelines[key] = _bound(setup, work), _load(setup, work)
        return self._pipelines[key]

    def _update(self, setup: Setup) -> float:
        """Return the longest update of a rank."""
        key = _grid(setup), setup.balance, _cut(setup), None if self._profile is None else _size(setup)
        if key not in self._updates:
            if self._profile is None:
                self._updates[key] = _longest(
                    setup, [setup.time_factor * update for _, update in update_seconds(setup)]
                )
            else:
                self._updates[key] = _update_s(setup, self._profile)
        return self._updates[key]

    def _stages_of(self, setup: Setup, size: object) -> list[tuple[float, float]]:
        """Return each stage's forward and backward of a micro-batch, or of one slice."""
        layers, last = setup.stage_layers, setup.num_stages - 1
        parts = self._parts.of(setup)
        stage = partial(self._stage, setup, size, parts)
        inner_seconds = {counts: stage(counts, False, False) for counts in set(layers)}
        seconds = [inner_seconds[counts] for counts in layers]
        seconds[last] = stage(layers[last], False, not setup.is_sharded)
        seconds[0] = stage(layers[0], not setup.input_shards, last == 0 and not setup.is_sharded)
        return seconds

    def _stage(
        self, setup: Setup, size: object, parts: PartSeconds, layers: StageLayers, first: bool, last: bool
    ) -> tuple[float, float]:
        key = size, setup.splits, layers, first, last
        if key not in self._stages:
            cost = scaled(stage_cost(parts, layers, first, last), setup.time_factor)
            self._stages[key] = _both(cost, setup.splits)
        return self._stages[key]


def _grid(setup: Setup) -> object:
    # Our own loop does not overlap gathers.
    gathers = setup.tensor, setup.switches.tp_comm_overlap
    return gathers, setup.context, setup.pipeline, setup.routing, setup.vocabulary, setup.input_shards


def _cut(setup: Setup) -> object:
    # Groups change the order of computations, but not the bound.
    return setup.schedule, setup.num_chunks, setup.layers


def _size(setup: Setup) -> object:
    return setup.micro_batch, setup.recompute, setup.keep_weights_halves, setup.slices, setup.slice_lengths


def _both(cost: StageCost, splits: bool) -> tuple[float, float]:
    """Return a stage's forward and backward."""
    backward = cost.whole_input_s + (cost.weight_s or 0) if splits else cost.whole_backward_s
    return float(cost.whole_forward_s), float(backward)


def _longest(setup: Setup, updates: Sequence[float]) -> float:
    return max(sum(updates[stage] for stage in setup.stages_of(rank)) for rank in range(setup.pipeline))


def _load(setup: Setup, work: _Work) -> float:
    rank_seconds = [
        sum(work.forwards[stage] + work.backwards[stage] for stage in setup.stages_of(rank))
        for rank in range(setup.pipeline)
    ]
    last_ranks = {placement[-1] for placement in setup.placements}
    others = [seconds for rank, seconds in enumerate(rank_seconds) if rank not in last_ranks]
    return max(rank_seconds[rank] for rank in last_ranks) * len(others) / sum(others) if others else 1.0


def _bound(setup: Setup, work: _Work) -> float:
    """Return the longest rank's own work plus what precedes its first computation and follows its last."""
    forwards, backwards, shard, begins, ends = work
    p, m, pipes = setup.pipeline, setup.num_microbatches, setup.placements
    shard_s = float(shard.forward_s + shard.backward_s)
    # With algorithm 2, T may wait until all backwards have run. Input shards precede a rank's first forward and follow
    # its last backward.
    shard_before_end_s = float(shard.forward_s) if setup.vocabulary is Vocabulary.TWO else shard_s
    shard_after_start_s = shard_s + float(shard.input_backward_s)
    all_shards_s = shard_after_start_s + float(shard.input_forward_s)
    bound = 0.0
    for rank_pipes in _stages_by_pipe(pipes, p):
        own_s = sum(forwards[stage] + backwards[stage] for of_pipe in rank_pipes for stage in of_pipe)
        # Whichever pipe starts first, and whichever ends last.
        before_s = min(sum(begins[: of_pipe[0]]) for of_pipe in rank_pipes)
        # The last weights' halves of a split backward may run while other ranks compute what follows.
        after_s = 0.0 if setup.splits else min(sum(ends[: of_pipe[0]]) for of_pipe in rank_pipes)
        bound = max(bound, before_s + m / len(pipes) * (own_s + shard_before_end_s) + after_s)
        if setup.is_sharded:
            bound = max(bound, before_s + m * (own_s + shard_after_start_s), m * (own_s + all_shards_s))
    return bound


@lru_cache(maxsize=1024)
def _stages_by_pipe(pipes: tuple[tuple[int, ...], ...], num_ranks: int) -> list[list[list[int]]]:
    """Return the stages that each rank computes, by pipe."""
    return [
        [[stage for stage, owner in enumerate(placement) if owner == rank] for placement in pipes]
        for rank in range(num_ranks)
    ]


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
        return _branch_bounds(space, bounds, self._parts)


def _branch_bounds(space: Space, state_bounds: BranchBounds, seconds: PartsOfSetups) -> BranchBounds:
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
