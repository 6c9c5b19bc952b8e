"""Bound the seconds of configurations from below, many of one space.

In: Setups, a Profile. Out: seconds no iteration is shorter than.

No pipeline is faster than a rank's own work, what comes before its first computation and after its last, and the
update. Setups of one `Space` share most of it: layers take as long whatever the schedule, updates whatever the
micro-batch, so each is asked for once. Makes no schedule, and knows no memory.
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import NamedTuple

from bpipe.plan.predict import costs_of
from bpipe.predict.activations import held_of
from bpipe.predict.costs import PartSeconds, PartsOfSetups, stage_cost
from bpipe.predict.layers.ends import shard_seconds
from bpipe.predict.layout import Setup
from bpipe.predict.profile import Profile
from bpipe.predict.recompute import StageLayers
from bpipe.predict.replicas import update_seconds
from bpipe.predict.slices import slice_setups
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.layout import Vocabulary
from bpipe.simulate.cost import ShardCost, StageCost, scaled

_NO_SHARDS = ShardCost()


class _Work(NamedTuple):
    """By stage a micro-batch's forward and backward, and whatever rank its shards.

    `begins`: the forward that comes first, of the first slice; `ends`: the backward that comes last, of the first
    slice, too.
    """

    forwards: Sequence[float]
    backwards: Sequence[float]
    shard: ShardCost
    begins: Sequence[float]
    ends: Sequence[float]


def lower_bound_s(setup: Setup, profile: Profile | None = None) -> float:
    """Return a lower bound for one setup."""
    return _bound(setup, _work_of(setup, profile)) + _update_s(setup, profile)


def resident_seconds(setup: Setup, profile: Profile | None = None) -> float:
    """Return another lower bound, by Little's law, of a setup without balancing; 0 where it says nothing.

    A rank holds a micro-batch of a stage from its forward to its backward, at least as long as all later stages take in
    both directions, and no more of them at a time than its order says.
    """
    if setup.balance is not None or setup.slices > 1 or setup.num_pipes > 1 or FAMILIES[setup.schedule].fill is None:
        return 0.0
    costs = costs_of(setup, profile)
    last_first = (costs.of(stage) for stage in reversed(range(setup.num_stages)))
    passes = (
        float(cost.whole_forward_s + (cost.whole_input_s if setup.splits else cost.whole_backward_s))
        for cost in last_first
    )
    stays = [*accumulate(passes)][::-1]
    return setup.num_microbatches * max(
        sum(stays[stage] for stage in held.stages) / held.most_saved for held in held_of(setup)
    )


def last_load(setup: Setup, profile: Profile | None = None) -> float:
    """Return how many times as long as the mean of the others the last stage's rank computes, on one micro-batch."""
    return _load(setup, _work_of(setup, profile))


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
    forwards, backwards = [one for one, _ in first], [one for _, one in first]
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
    """Lower bounds of setups that differ only in what a `Space` varies; equal to `lower_bound_s` to the bit."""

    def __init__(self, profile: Profile | None = None) -> None:
        self._profile = profile
        self._parts = PartsOfSetups()
        self._stages: dict[object, tuple[float, float]] = {}
        self._updates: dict[object, float] = {}
        self._known: dict[object, tuple[float, float]] = {}

    def seconds(self, setup: Setup) -> float:
        return self.pipeline_s(setup) + self._update(setup)

    def pipeline_s(self, setup: Setup) -> float:
        """Return the same without the update."""
        return self._pipeline(setup)[0]

    def load(self, setup: Setup) -> float:
        """Return the last rank's load, as `last_load` does."""
        return self._pipeline(setup)[1]

    def _pipeline(self, setup: Setup) -> tuple[float, float]:
        # Balanced ones lie elsewhere, where only experts and parts of a sequence have something to exchange while they
        # compute.
        elsewhere = setup.balance if setup.model.experts is not None or setup.context > 1 else None
        size = _grid(setup), elsewhere, _size(setup)
        key = size, _cut(setup)
        if key not in self._known:
            # What a profile says of a stage is not made of parts.
            work = self._work(setup, size) if self._profile is None else _work_of(setup, self._profile)
            self._known[key] = _bound(setup, work), _load(setup, work)
        return self._known[key]

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

    def _work(self, setup: Setup, size: object) -> _Work:
        of_slices = [self._stages_of(part, (size, part.span)) for part in slice_setups(setup)]
        shard = scaled(shard_seconds(setup), setup.time_factor) if setup.is_sharded else _NO_SHARDS
        return _together(of_slices, shard)

    def _stages_of(self, setup: Setup, size: object) -> list[tuple[float, float]]:
        """By stage, the forward and backward of a micro-batch, or of one slice."""
        layers, last = setup.stage_layers, setup.num_stages - 1
        parts = self._parts.of(setup)
        stage = partial(self._stage, setup, size, parts)
        between = {of_stage: stage(of_stage, False, False) for of_stage in set(layers)}
        both = [between[of_stage] for of_stage in layers]
        both[last] = stage(layers[last], False, not setup.is_sharded)
        both[0] = stage(layers[0], not setup.input_shards, last == 0 and not setup.is_sharded)
        return both

    def _stage(
        self, setup: Setup, size: object, parts: PartSeconds, layers: StageLayers, first: bool, last: bool
    ) -> tuple[float, float]:
        key = size, setup.splits, layers, first, last
        if key not in self._stages:
            cost = scaled(stage_cost(parts, layers, first, last), setup.time_factor)
            self._stages[key] = _both(cost, setup.splits)
        return self._stages[key]


def _grid(setup: Setup) -> object:
    # What our loop runs has no overlapped gathers.
    gathers = setup.tensor, setup.switches.tp_comm_overlap
    return gathers, setup.context, setup.pipeline, setup.routing, setup.vocabulary, setup.input_shards


def _cut(setup: Setup) -> object:
    # Groups change the order of what is computed, and nothing of the bound.
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
    own = [
        sum(work.forwards[stage] + work.backwards[stage] for stage in setup.stages_of(rank))
        for rank in range(setup.pipeline)
    ]
    last = {placement[-1] for placement in setup.placements}
    others = [seconds for rank, seconds in enumerate(own) if rank not in last]
    return max(own[rank] for rank in last) * len(others) / sum(others) if others else 1.0


def _bound(setup: Setup, work: _Work) -> float:
    """Return a rank's own work, and what comes before its first computation and after its last."""
    forwards, backwards, shard, begins, ends = work
    p, m, pipes = setup.pipeline, setup.num_microbatches, setup.placements
    within = float(shard.forward_s + shard.backward_s)
    # Of algorithm 2 T may wait until everything has gone back. Input shards come before a rank's first forward, and
    # behind its backward.
    until_back = float(shard.forward_s) if setup.vocabulary is Vocabulary.TWO else within
    since_begun = within + float(shard.input_backward_s)
    throughout = since_begun + float(shard.input_forward_s)
    bound = 0.0
    for mine in _stages_by_pipe(pipes, p):
        own = sum(forwards[stage] + backwards[stage] for of_pipe in mine for stage in of_pipe)
        # Whichever pipe comes first, and goes last.
        before = min(sum(begins[: of_pipe[0]]) for of_pipe in mine)
        # Of a split backward the last weights' halves may run beside what follows elsewhere.
        after = 0.0 if setup.splits else min(sum(ends[: of_pipe[0]]) for of_pipe in mine)
        bound = max(bound, before + m / len(pipes) * (own + until_back) + after)
        if setup.is_sharded:
            bound = max(bound, before + m * (own + since_begun), m * (own + throughout))
    return bound


@lru_cache(maxsize=1024)
def _stages_by_pipe(pipes: tuple[tuple[int, ...], ...], num_ranks: int) -> list[list[list[int]]]:
    """Of every rank, by pipe, the stages it computes."""
    return [
        [[stage for stage, owner in enumerate(placement) if owner == rank] for placement in pipes]
        for rank in range(num_ranks)
    ]
