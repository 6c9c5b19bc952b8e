"""Which configurations of a space fit, and how many.

Cheap bounds decide first: weights alone, what the first rank holds, what ranks hold when their backwards begin. A setup
that is too large by a bound is predicted exactly only at the end, if its need is reported.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

from bpipe.plan.budget import within_budget_or_none
from bpipe.plan.predict import Candidate
from bpipe.plan.space import OPEN, Space, fewest_layers, stands_still, with_block
from bpipe.predict.activations import moves_anything
from bpipe.predict.layout import Setup
from bpipe.predict.memory import (
    least_bytes,
    least_sharded_bytes,
    least_shared_bytes,
    least_warm_bytes,
    peak_bytes,
    predict_memory,
    rank_states,
)
from bpipe.predict.recompute import BLOCK
from bpipe.schedule.hosts import PAIR

# Planning by a budget takes a second for this many forwards.
_FORWARDS_PLANNED = 10_000
# Host buffers of an even plan are larger than a budget needs by up to this ratio.
_NEARLY = 1.03


class Closest(NamedTuple):
    """The setup that needs the fewest bytes on its fullest rank, preferably one whose state fits."""

    is_state: bool
    """Whether weights, gradients and optimizer state alone are too much."""
    needs_bytes: int
    setup: Setup


@dataclass(slots=True)
class FamilyResult:
    """Result of one family of schedules."""

    schedule: str
    num_fitting: int = 0
    num_large: int = 0
    """Configurations that need too much memory."""
    bound_s: float | None = None
    """Lower bound of the seconds of every configuration that was not simulated."""
    fastest: Candidate | None = None
    """The fastest that was simulated."""

    def left(self, bound_s: float) -> None:
        """Record a configuration that is not simulated and takes at least this long."""
        self.bound_s = bound_s if self.bound_s is None else min(self.bound_s, bound_s)


class Judge:
    """Judge of which setups fit, with counts.

    `needs_bytes`: bytes that the last balanced setup that fits would need without balancing.
    """

    def __init__(self, space: Space, cuts: Counter[str]) -> None:
        self._recompute, self._profile = space.recompute, space.profile
        self._limit, self.cuts = space.cluster.limit_bytes, cuts
        self.families = {name: FamilyResult(name) for name in dict.fromkeys(space.schedules)}
        self.needs_bytes: int | None = None
        self.num_only_balanced = 0
        self._states: dict[object, tuple[int, ...]] = {}
        self._large: list[Closest] = []

    @property
    def closest(self) -> Closest | None:
        """The setup closest to fitting, if nothing fits. The lowest bounds are predicted exactly."""
        if not self._large or any(candidate.num_fitting for candidate in self.families.values()):
            return None
        nearest: Closest | None = None
        for _, candidate in sorted(enumerate(self._large), key=lambda pair: (*pair[1][:2], pair[0])):
            if candidate.is_state or (nearest is not None and candidate.needs_bytes >= nearest.needs_bytes):
                return nearest or candidate
            needs = peak_bytes(candidate.setup)
            if nearest is None or needs < nearest.needs_bytes:
                nearest = candidate._replace(needs_bytes=needs)
        return nearest

    def is_slower(self, setup: Setup, bound_s: float) -> None:
        """Skip a setup that cannot be among the rows."""
        self.cuts["slower"] += 1
        self.families[setup.schedule].left(bound_s)

    def skip_branch(self, bound_s: float) -> None:
        """Skip a branch none of whose setups can be among the rows."""
        self.cuts["skipped"] += 1
        for family in self.families.values():
            family.left(bound_s)

    def cut_branch(self, plainest: Setup, least_bytes: int, is_state: bool) -> None:
        """Drop a branch that needs too much memory whatever its schedule."""
        self.cuts["branches"] += 1
        self._large.append(Closest(is_state, max(self._states_of(plainest)) if is_state else least_bytes, plainest))

    def fitting(self, setup: Setup) -> Setup | None:
        """Return the setup if it fits, else None. An open number of recomputed layers becomes the least that fits."""
        if BLOCK not in self._recompute or setup.recompute != OPEN:
            return self._fitted(setup)
        num_layers, self.needs_bytes = max(setup.layers), None
        if "none" in self._recompute and self._is_enough(replace(setup, recompute="none")):
            self.cuts["layers"] += 1
            return None
        number = fewest_layers(num_layers, lambda count: self._is_enough(with_block(setup, count)))
        if number == num_layers and "full" in self._recompute:
            self.cuts["layers"] += 1
            return None
        return self._fitted(with_block(setup, number or num_layers))

    def _is_enough(self, setup: Setup) -> bool:
        return self._needs(setup) <= self._limit

    def _fitted(self, setup: Setup) -> Setup | None:
        """Return the setup if it fits, balanced by a budget if even shares are not enough."""
        self.needs_bytes = None
        peak = self._needs(setup if setup.balance is None else replace(setup, balance=None))
        if setup.balance is not None:
            # What fits without balancing gains nothing from it.
            if peak <= self._limit:
                self.cuts["unneeded"] += 1
                return None
            needs, result = peak, self._balanced(setup)
            if result is None:
                self.cuts["pairs"] += 1
                return None
            peak, setup = result
            self.needs_bytes = needs
        if peak <= self._limit and stands_still(setup):
            self.cuts["queues"] += 1
            return None
        if peak <= self._limit:
            self.families[setup.schedule].num_fitting += 1
            self.num_only_balanced += self.needs_bytes is not None
            return setup
        self.cuts["memory"] += 1
        self.families[setup.schedule].num_large += 1
        state = max(self._states_of(setup))
        self._large.append(Closest(state > self._limit, state if state > self._limit else peak, setup))
        return None

    def _needs(self, setup: Setup) -> int:
        """Return the bytes needed, or a lower bound above the limit."""
        return self._bound(setup) or peak_bytes(setup)

    def _states_of(self, setup: Setup) -> tuple[int, ...]:
        """Return each rank's bytes held throughout, which do not depend on micro-batch, recomputation and groups."""
        grid = setup.tensor, setup.context, setup.pipeline, setup.routing
        key = grid, setup.balance, setup.vocabulary, setup.input_shards, setup.schedule, setup.num_chunks, setup.layers
        if key not in self._states:
            self._states[key] = rank_states(setup)
        return self._states[key]

    def _bound(self, setup: Setup) -> int | None:
        """Return a lower bound above the limit; None if there is none.

        Nothing has to be balanced to tell that. Without a bound of the family's warm-up, orders without shards give one.
        """
        states = self._states_of(setup)
        least = least_bytes(setup, states)
        if least > self._limit:
            return least
        bound = least_warm_bytes(setup, states)
        if bound <= self._limit and setup.is_sharded:
            bound = least_sharded_bytes(setup, states)
        if bound <= self._limit and setup.balance is not None:
            bound = least_shared_bytes(setup, states)
        return bound if bound > self._limit else None

    def _balanced(self, setup: Setup) -> tuple[int, Setup] | None:
        """Return the same as `_needs` for a balanced setup, and that setup as planned; None if nothing would move."""
        bound = self._bound(setup)
        if bound is not None:
            return bound, setup
        if not moves_anything(setup):
            return None
        peaks = [rank.peak_bytes for rank in predict_memory(setup)]
        even = max(peaks)
        # No plan fits if the mean of all ranks, or of the fullest and emptiest pair, is clearly above the limit.
        mean = max(sum(peaks) / len(peaks), (even + min(peaks)) / 2 if setup.hosts == PAIR else 0)
        is_planned = even > self._limit and mean <= _NEARLY * self._limit
        forwards = setup.num_stages * setup.num_microbatches * setup.slices
        # Even shares of micro-batches are not even shares of memory, because the last rank also has logits.
        plan = (
            within_budget_or_none(setup, (self._limit,), self._profile)
            if is_planned and forwards <= _FORWARDS_PLANNED
            else None
        )
        return (even, setup) if plan is None else (peak_bytes(plan), plan)
