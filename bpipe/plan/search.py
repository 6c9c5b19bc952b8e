"""Find the fastest configurations of a space.

In: the Space. Out: counts, and the best `Candidate`s, fastest first.

The search is best-first, by lower bounds of the iteration's time: of a whole branch (`plan.bounds`), and of a
configuration (no pipeline is faster than its slowest rank's work between the first arrival and the last departure). A
branch is opened only if its bound is below the time of the slowest row and its least memory within that time fits; the
same holds for predicting a configuration's memory and simulating it. What can be faster than the slowest row by no more
than predictions can tell (`INDISTINCT`) is skipped, so no row is slower by more than that than if all were simulated.
Stock Megatron is searched first, because that is quick and its times cut off most of the rest; then all schedules in
cuts near its fastest ones, which usually include the fastest of all. A search that ends early bounds the time of what
it has not tried. It does not depend on the command line.

Which configurations fit is judged by cheap bounds first: weights alone, what the first rank holds, what ranks hold when
their backwards begin. A setup that is too large by a bound is predicted exactly only at the end, if its need is reported.
"""

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf, prod
from typing import NamedTuple

from bpipe.balance.config import BALANCES
from bpipe.plan.bounds import Bounder, Bounds, BranchBounds
from bpipe.plan.budget import within_budget, within_budget_or_none
from bpipe.plan.candidates import CLEARLY, is_level
from bpipe.plan.predict import Candidate, costs_of, predict, timing_within
from bpipe.plan.refusals import Launchable, runs_ours
from bpipe.plan.space import (
    OPEN,
    Branch,
    Slicer,
    Space,
    enumerate_branches,
    fewest_layers,
    setups_of,
    stands_still,
    with_block,
    with_shards,
)
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
from bpipe.schedule.families.families import DEFAULTS, FAMILIES
from bpipe.schedule.hosts import PAIR
from bpipe.schedule.layout import Vocabulary

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


Progress = Callable[[str, int, int], None]

# Ratio of two times up to which the slower one is as good: half of what predictions can tell apart. A search for closer
# times took a third longer for 256 devices.
INDISTINCT = (1 + CLEARLY) / 2
# The fastest with and without balancing are sought among configurations not clearly slower than the slowest row.
COMPARED = CLEARLY
# Product of the ratios of sizes up to which two cuts are near each other.
_NEAR = 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a search."""

    space: Space
    rows: tuple[Candidate, ...]
    """The fastest, fastest first."""
    stock: Candidate | None
    """The fastest of stock Megatron; None if none fits."""
    plain: Candidate | None
    """The fastest without balancing, unless it takes more than `COMPARED` times as long as the slowest row."""
    balanced: Candidate | None
    """The fastest that fits only balanced, likewise."""
    closest: Closest | None
    """The setup closest to fitting, if nothing fits."""
    families: tuple[FamilyResult, ...]
    """Result of each family of schedules, in the space's order."""
    num_configurations: int
    """Configurations that were tried; all others are slower than the slowest row, or indistinctly faster."""
    num_fitting: int
    num_only_balanced: int
    """Configurations that fit only balanced."""
    num_simulated: int
    unseen_s: float | None
    """If the search ended early, a lower bound of the seconds of all that it did not try."""
    cuts: dict[str, int]
    """Counts of what was dropped, by the names of `space.CUTS`."""


class Members:
    """Configurations of a space's branches: all that the profile covers and the trainer accepts."""

    def __init__(self, space: Space, bounds: Bounds, cuts: Counter[str]) -> None:
        self._space, self._bounds, self._cuts = space, bounds, cuts
        self._launchable, self._slicer = Launchable(space.others), Slicer(space.slices)

    def taken(self, setup: Setup) -> Setup | None:
        """Return a covered setup as the trainer accepts it; None if it is refused, or its shards promise no gain."""
        if setup.is_sharded and self._space.vocabulary_parallel is None:
            # Shards that were not asked for have to promise a gain.
            whole = replace(setup, vocabulary=Vocabulary.WHOLE, input_shards=False)
            if self._bounds.seconds(setup) >= self._bounds.seconds(whole):
                return None
        launchable = self._launchable.of(setup)
        self._cuts["refused"] += launchable is None
        return launchable

    def covered(self, branch: Branch) -> Iterator[Setup]:
        """Yield all configurations that the profile covers."""
        space = self._space
        for setup in setups_of(space, branch, self._cuts):
            if space.profile is not None and space.profile.conflict(setup) is not None:
                self._cuts["profile"] += 1
                continue
            if Vocabulary.WHOLE.value in space.vocabularies:
                if 1 in space.slices:
                    yield setup
                if space.profile is None:
                    yield from self._slicer.of(setup)
            if space.vocabulary_parallel is not None or (setup.pipeline > 1 and self._bounds.load(setup) > 1):
                yield from with_shards(setup, space.vocabularies)


def stock_space(space: Space) -> Space:
    """Return the space of stock Megatron with the same model, cluster and choices."""
    return replace(
        space,
        schedules=DEFAULTS,
        balances=BALANCES[:1],
        vocabulary_parallel=(Vocabulary.WHOLE.value,),
        hosts=(PAIR,),
        slices=(1,),
    )


def search(
    space: Space,
    num_rows: int = 10,
    progress: Progress = lambda what, done, total: None,
    evicts_least: bool = False,
    most_s: float = inf,
) -> Outcome:
    """Return the `num_rows` fastest, and the fastest of each kind.

    Args:
        space: What to search.
        num_rows: Number of rows to return.
        progress: Called with the name of the phase, the number of branches done, and the number of all.
        evicts_least: Whether a fitting balanced configuration is planned again, to evict no more than its budget demands.
        most_s: Processor seconds after which the search ends, unless it has no row.
    """
    end_s = time.process_time() + most_s
    cuts: Counter[str] = Counter()
    branches = list(enumerate_branches(space, cuts))
    branch_bounds: list[BranchBounds] = []
    bounder = Bounder(space)
    for branch in branches:
        progress("bounds", len(branch_bounds), len(branches))
        branch_bounds.append(bounder.of(branch))
    state = _Search(space, num_rows, cuts, evicts_least, end_s)
    stock_members, members = Members(stock_space(space), state.bounds, Counter()), Members(space, state.bounds, cuts)

    def tell(what: str, done: int) -> None:
        fastest = f", {state.rows[0].iteration_s:.3f} s so far" if state.rows else ""
        progress(what + fastest, done, len(branches))

    queue = [_Open(0, bounds.seconds, number) for number, bounds in enumerate(branch_bounds)]
    state.take(queue, branches, branch_bounds, stock_members, _STOCK, partial(tell, "stock Megatron"))
    leaders = [row.setup for row in state.rows if is_level(row.iteration_s, state.rows[0].iteration_s)]
    queue = [
        candidate._replace(turn=0 if any(_is_near(branches[candidate.number], leader) for leader in leaders) else 2)
        for candidate in queue
    ]
    state.take(queue, branches, branch_bounds, members, _OURS, partial(tell, "all schedules"))
    return state.outcome()


def _is_near(branch: Branch, setup: Setup) -> bool:
    sizes = ((getattr(branch, name), getattr(setup, name)) for name in ("tensor", "context", "pipeline", "micro_batch"))
    return bool(prod(max(size / other, other / size) for size, other in sizes) <= _NEAR)


def _is_stock(setup: Setup) -> bool:
    return setup.schedule in DEFAULTS and not runs_ours(setup)


# Kinds of rows that stock Megatron may be among, and kinds of rows of the rest.
_STOCK, _OURS = ("stock", "all", "plain"), ("all", "plain", "balanced")


class _Open(NamedTuple):
    """Entry of the queue: a branch, by its number, or a configuration. No iteration is shorter than `bound_s`."""

    turn: int
    """Lower turns come first, whatever the bounds: 0 near the leaders, 1 if its order takes long to make, 2 elsewhere,
    3 if it cannot be the fastest."""
    bound_s: float
    number: int
    setup: Setup | None = None
    needs_bytes: int | None = None
    """Bytes that it would need without balancing, if it is known to fit balanced."""
    is_taken: bool = False
    """Whether the trainer is known to accept the configuration, and the bound includes its update."""
    fits: bool = False


class _Search:
    """State of a search."""

    def __init__(self, space: Space, num_rows: int, cuts: Counter[str], evicts_least: bool, end_s: float) -> None:
        self._space, self._cuts, self._evicts_least, self._end_s = space, cuts, evicts_least, end_s
        self._unseen_s = inf
        self._limit = space.cluster.limit_bytes
        self.bounds, self._judge = Bounds(space.profile), Judge(space, cuts)
        # Configurations of stock Megatron may lie outside the space: these are judged, but not counted.
        self._judge_apart = Judge(stock_space(space), Counter())
        self._has_plain = (
            BALANCES[0] in space.balances and Vocabulary.WHOLE.value in space.vocabularies and 1 in space.slices
        )
        self._fastest = _Fastest(num_rows)
        self._num_simulated = self._num_configurations = 0

    def _kinds(self, setup: Setup) -> tuple[str, ...]:
        """Return the kinds of rows that a configuration may be among."""
        if _is_stock(setup):
            return _STOCK if self._has_plain and setup.schedule in self._space.schedules else ("stock",)
        return ("all", "plain" if setup.balance is None else "balanced")

    @property
    def rows(self) -> tuple[Candidate, ...]:
        return self._fastest.rows("all")

    def take(
        self,
        queue: list[_Open],
        branches: list[Branch],
        bounded: list[BranchBounds],
        members: Members,
        kinds: tuple[str, ...],
        progress: Callable[[int], None],
    ) -> None:
        """Take all members of the queue's branches that may be among the rows of these kinds, until time is up."""
        heap = [*queue]
        heapq.heapify(heap)
        number, done = len(branches), 0
        while heap:
            candidate = heapq.heappop(heap)
            if time.process_time() > self._end_s and self.rows:
                self._end_early([candidate, *heap], bounded, kinds)
                break
            if candidate.turn < 3 and self.rows and candidate.bound_s >= self.rows[0].iteration_s / INDISTINCT:
                heapq.heappush(heap, candidate._replace(turn=3))
                continue
            if candidate.setup is not None:
                entry = self._take(candidate, candidate.setup, members)
                if entry is not None:
                    heapq.heappush(heap, entry)
                continue
            progress(done)
            done += 1
            if not self._may_open(bounded[candidate.number], kinds):
                continue
            for setup in members.covered(branches[candidate.number]):
                number += 1
                if kinds is _STOCK or not _is_stock(setup):
                    bound_s = max(candidate.bound_s, self.bounds.pipeline_s(setup))
                    # An order without a closed form and with many parts takes long to make.
                    is_slow = setup.is_sharded or (setup.slices > 1 and not FAMILIES[setup.schedule].sliced_warm_up)
                    heapq.heappush(heap, _Open(candidate.turn or int(is_slow), bound_s, number, setup))

    def _end_early(self, entries: list[_Open], bounded: list[BranchBounds], kinds: tuple[str, ...]) -> None:
        """Record the lower bound of all remaining entries that may fit."""
        for candidate in entries:
            setup = candidate.setup
            if setup is None and bounded[candidate.number].bytes_within() > self._limit:
                continue
            if candidate.bound_s < self._fastest.limit_s(kinds) / INDISTINCT:
                self._unseen_s = min(self._unseen_s, candidate.bound_s)
            if kinds is _OURS:
                families = self._judge.families
                for family in families.values() if setup is None else (families[setup.schedule],):
                    family.left(candidate.bound_s)

    def _may_open(self, branch: BranchBounds, kinds: tuple[str, ...]) -> bool:
        """Whether a configuration of the branch may be among the rows of these kinds, and fit."""
        least, limit_s = branch.bytes_within(), self._fastest.limit_s(kinds) / INDISTINCT
        is_large = least > self._limit
        if not is_large and branch.seconds < limit_s and branch.bytes_within(limit_s) <= self._limit:
            return True
        # Every branch is visited twice, first for stock Megatron, and counted on the second visit.
        if kinds is _OURS and is_large:
            self._judge.cut_branch(branch.setup, least, branch.state_bytes > self._limit)
        elif kinds is _OURS:
            self._judge.skip_branch(branch.seconds)
        return False

    def _take(self, candidate: _Open, setup: Setup, members: Members) -> _Open | None:
        """Take one step: the trainer's rules, memory, or simulation. Return the entry with a new bound if more follow."""
        kinds = self._kinds(setup)
        is_counted = "all" in kinds
        if candidate.bound_s >= self._fastest.limit_s(kinds) / INDISTINCT:
            if is_counted:
                self._judge.is_slower(setup, candidate.bound_s)
            return None
        if not candidate.is_taken:
            taken = members.taken(setup)
            if taken is None:
                return None
            self._num_configurations += is_counted
            bound_s = max(candidate.bound_s, self.bounds.seconds(taken))
            return candidate._replace(bound_s=bound_s, setup=taken, is_taken=True)
        if not candidate.fits:
            judge = self._judge if is_counted else self._judge_apart
            chosen = judge.fitting(setup)
            if chosen is None:
                return None
            bound_s = candidate.bound_s if chosen == setup else self.bounds.seconds(chosen)
            return candidate._replace(bound_s=bound_s, setup=chosen, needs_bytes=judge.needs_bytes, fits=True)
        self._num_simulated += 1
        self._simulate(candidate, setup, kinds, self._judge.families[setup.schedule] if is_counted else None)
        return None

    def _simulate(self, candidate: _Open, setup: Setup, kinds: tuple[str, ...], family: FamilyResult | None) -> None:
        """Keep it if it is among the fastest of a kind, or its family's fastest."""
        if candidate.needs_bytes is not None and self._evicts_least:
            # One that only just fits may have no such plan, and stays.
            with suppress(ValueError):
                setup, _ = within_budget(setup, (self._limit,), profile=self._space.profile)
        fastest_s = inf if family is None or family.fastest is None else family.fastest.iteration_s
        limit_s = self._fastest.limit_s(kinds)
        if family is not None:
            limit_s = max(limit_s, fastest_s)
        timing = timing_within(setup, costs_of(setup, self._space.profile), limit_s)
        if timing is None:
            return
        place, leads = (timing.iteration_s, candidate.number), family is not None and timing.iteration_s < fastest_s
        open_kinds = [kind for kind in kinds if place < self._fastest.slowest(kind)]
        if not open_kinds and not leads:
            return
        # Its need so far may be a lower bound, which was enough to tell that it does not fit.
        unbalanced_bytes = None if candidate.needs_bytes is None else peak_bytes(replace(setup, balance=None))
        prediction = predict(setup, self._space.profile, timing=timing)
        row = replace(prediction, unbalanced_bytes=unbalanced_bytes)
        if family is not None and leads:
            family.fastest = row
        self._fastest.keep(open_kinds, place, row)

    def outcome(self) -> Outcome:
        judge, rows = self._judge, self._fastest.rows
        return Outcome(
            space=self._space,
            rows=rows("all"),
            stock=next(iter(rows("stock")), None),
            plain=next(iter(rows("plain")), None),
            balanced=next(iter(rows("balanced")), None),
            closest=judge.closest,
            families=tuple(judge.families.values()),
            num_configurations=self._num_configurations,
            num_fitting=sum(family.num_fitting for family in judge.families.values()),
            num_only_balanced=judge.num_only_balanced,
            num_simulated=self._num_simulated,
            unseen_s=None if self._unseen_s == inf else self._unseen_s,
            cuts={name: count for name, count in self._cuts.items() if count},
        )


class _Fastest:
    """The fastest rows of each kind so far."""

    def __init__(self, num_rows: int) -> None:
        self._sizes = {"all": num_rows, "stock": 1, "plain": 1, "balanced": 1}
        self._rows: dict[str, list[tuple[tuple[float, int], Candidate]]] = {kind: [] for kind in self._sizes}

    def rows(self, kind: str) -> tuple[Candidate, ...]:
        return tuple(row for _, row in self._rows[kind])

    def limit_s(self, kinds: Iterable[str]) -> float:
        """Return the seconds from which on a configuration is in no rows of these kinds."""
        compared_s = COMPARED * self.slowest("all")[0]
        limits_s = ((kind in ("plain", "balanced"), self.slowest(kind)[0]) for kind in kinds)
        return max(min(seconds, compared_s) if is_compared else seconds for is_compared, seconds in limits_s)

    def slowest(self, kind: str) -> tuple[float, int]:
        """Return the place before which a configuration is among the rows of a kind."""
        rows = self._rows[kind]
        if len(rows) < self._sizes[kind]:
            return inf, 0
        return rows[-1][0] if rows else (0.0, 0)

    def keep(self, kinds: Iterable[str], place: tuple[float, int], row: Candidate) -> None:
        for kind in kinds:
            rows = sorted([*self._rows[kind], (place, row)], key=lambda entry: entry[0])
            self._rows[kind] = rows[: self._sizes[kind]]
