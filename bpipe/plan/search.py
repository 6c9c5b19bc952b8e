"""Find the fastest configurations of a space.

In: the Space. Out: counts, and the best `Candidate`s, fastest first.

Best first, by lower bounds of the iteration's time: of a whole branch (`plan.branches`), and of a configuration (no
pipeline is faster than its slowest rank's work between the first arrival and the last departure). A branch is opened
only while its bound is below the time of the slowest row, and its least memory within that time fits; a configuration
is asked for its memory and simulated only then, too. What can be faster than the slowest row by no more than predictions
can tell (`INDISTINCT`) is passed over: so no row is slower by more than that than the same row of simulating everything.
What Megatron does alone is searched first, because it is quick and its times cut off most of the rest; then all
schedules in cuts near its fastest ones, where the fastest of all mostly is. A search that ends early says what it has
not looked at. Knows no command line.
"""

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf, prod
from typing import NamedTuple

from bpipe.balance.config import BALANCES
from bpipe.plan.bounds import Bounds, resident_seconds
from bpipe.plan.branches import Bounder, BranchBounds
from bpipe.plan.candidates import CLEARLY, Candidate, is_level
from bpipe.plan.judge import Closest, FamilyResult, Judge
from bpipe.plan.predict import costs_of, predict
from bpipe.plan.refusals import Launchable, runs_ours
from bpipe.plan.shards import with_shards
from bpipe.plan.slices import Slicer
from bpipe.plan.space import Branch, Space, enumerate_branches, setups_of
from bpipe.plan.timing import timing_within
from bpipe.predict.layout import Setup
from bpipe.predict.memory import peak_bytes
from bpipe.schedule.families.families import DEFAULTS, FAMILIES
from bpipe.schedule.hosts import PAIR
from bpipe.schedule.layout import Vocabulary

Progress = Callable[[str, int, int], None]

# Ratio of two times up to which the slower one does as well: half of what predictions can tell apart. To look for what
# is closer took a plan for 256 devices a third longer.
INDISTINCT = (1 + CLEARLY) / 2
# The fastest with balancing, and the fastest without, are looked for among what does not clearly take longer than the
# slowest row.
COMPARED = CLEARLY
# Product of the ratios of their sizes up to which a cut is near another one.
_NEAR = 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a search."""

    space: Space
    rows: tuple[Candidate, ...]
    """The fastest, fastest first."""
    stock: Candidate | None
    """The fastest that Megatron runs alone; None if none fits."""
    plain: Candidate | None
    """The fastest without balancing, unless it takes more than `COMPARED` times as long as the slowest row."""
    balanced: Candidate | None
    """The fastest that fits only balanced, likewise."""
    closest: Closest | None
    """What needs least memory, if nothing fits."""
    families: tuple[FamilyResult, ...]
    """Result of each family of schedules, in the space's order."""
    num_configurations: int
    """Configurations that were looked at; what was not is slower than the slowest row, or indistinctly faster."""
    num_fitting: int
    num_only_balanced: int
    """Of those that fit, the ones that do so only balanced."""
    num_simulated: int
    unseen_s: float | None
    """If the search ended early, seconds that nothing of what it has not looked at is faster than."""
    cuts: dict[str, int]
    """Numbers of what was dropped, by the names of `space.CUTS`."""


class Members:
    """Configurations of a space's branches: all that the profile covers and the trainer takes."""

    def __init__(self, space: Space, bounds: Bounds, cuts: Counter[str]) -> None:
        self._space, self._bounds, self._cuts = space, bounds, cuts
        self._launchable, self._slicer = Launchable(space.others), Slicer(space.slices)

    def of(self, branch: Branch) -> Iterator[Setup]:
        """Yield each, with shards of the vocabulary after the one that is whole."""
        return filter(None, map(self.taken, self.covered(branch)))

    def taken(self, setup: Setup) -> Setup | None:
        """Return one that is covered as the trainer takes it; None if it is refused, or its shards promise nothing."""
        if setup.is_sharded and self._space.vocabulary_parallel is None:
            # Unless they were asked for, shards have to promise something.
            whole = replace(setup, vocabulary=Vocabulary.WHOLE, input_shards=False)
            if self._bounds.seconds(setup) >= self._bounds.seconds(whole):
                return None
        taken = self._launchable.of(setup)
        self._cuts["refused"] += taken is None
        return taken

    def covered(self, branch: Branch) -> Iterator[Setup]:
        """Yield all that the profile covers."""
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


def every_setup(space: Space, bounds: Bounds, cuts: Counter[str]) -> Iterator[Setup]:
    """Yield the configurations of all branches. `cuts` counts the rest."""
    members = Members(space, bounds, cuts)
    for branch in enumerate_branches(space, cuts):
        yield from members.of(branch)


def by_bound(space: Space) -> list[tuple[float, Setup]]:
    """Return all configurations with their lower bounds of seconds, the lowest first."""
    bounds = Bounds(space.profile)
    setups = every_setup(space, bounds, Counter())
    return sorted(((bounds.seconds(setup), setup) for setup in setups), key=lambda pair: pair[0])


def stock_space(space: Space) -> Space:
    """Return what Megatron does alone of the same model, cluster and choices."""
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
    sending: Callable[[Setup], Setup] = lambda setup: setup,
    most_s: float = inf,
) -> Outcome:
    """Return the `num_rows` fastest, and the fastest of each kind.

    Args:
        space: What to search.
        num_rows: Number of rows.
        progress: Called with what is done, the number of branches done and that of all.
        sending: Balances a configuration that fits anew, before it is simulated.
        most_s: Processor seconds after which the search ends, unless it has no row.
    """
    end_s = time.process_time() + most_s
    cuts: Counter[str] = Counter()
    branches = list(enumerate_branches(space, cuts))
    bounded: list[BranchBounds] = []
    bound = Bounder(space)
    for branch in branches:
        progress("bounds", len(bounded), len(branches))
        bounded.append(bound.of(branch))
    found = _Search(space, num_rows, cuts, sending, end_s)
    alone, ours = Members(stock_space(space), found.bounds, Counter()), Members(space, found.bounds, cuts)
    queue = [_Open(False, bounds.seconds, number) for number, bounds in enumerate(bounded)]
    found.take(queue, branches, bounded, alone, _STOCK, lambda done: progress("stock Megatron", done, len(branches)))
    leaders = [row.setup for row in found.rows if is_level(row.iteration_s, found.rows[0].iteration_s)]
    queue = [
        candidate._replace(is_later=not any(_is_near(branches[candidate.number], leader) for leader in leaders))
        for candidate in queue
    ]
    found.take(queue, branches, bounded, ours, _OURS, lambda done: progress("all schedules", done, len(branches)))
    return found.outcome()


def _is_near(branch: Branch, setup: Setup) -> bool:
    sizes = ((getattr(branch, name), getattr(setup, name)) for name in ("tensor", "context", "pipeline", "micro_batch"))
    return bool(prod(max(size / other, other / size) for size, other in sizes) <= _NEAR)


def _takes_long(setup: Setup) -> bool:
    """Whether making its order takes long: there is no closed form for it, and there are many parts."""
    return setup.is_sharded or (setup.slices > 1 and FAMILIES[setup.schedule].sliced_warm_up is None)


def _is_stock(setup: Setup) -> bool:
    return setup.schedule in DEFAULTS and not runs_ours(setup)


# Kinds of rows: those that what Megatron does alone may be among, and those of the rest.
_STOCK, _OURS = ("stock", "all", "plain"), ("all", "plain", "balanced")


class _Open(NamedTuple):
    """What is still to be taken: a branch, by its number, or a configuration. No iteration is shorter than `bound_s`."""

    is_later: bool
    """Whether others come first, whatever their bounds."""
    bound_s: float
    number: int
    setup: Setup | None = None
    needs_bytes: int | None = None
    """What it would need without balancing, if it is known to fit with it."""
    is_taken: bool = False
    """Whether the trainer is known to take the configuration, and the bound holds its update, too."""
    fits: bool = False


class _Search:
    """A search as far as it has come."""

    def __init__(
        self, space: Space, num_rows: int, cuts: Counter[str], sending: Callable[[Setup], Setup], end_s: float
    ) -> None:
        self._space, self._cuts, self._sending, self._end_s = space, cuts, sending, end_s
        self._unseen_s = inf
        self._limit = space.cluster.limit_bytes
        self.bounds, self._judge = Bounds(space.profile), Judge(space, cuts)
        # Of what Megatron does alone some may not be of the space: it fits or not, and is not counted.
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
            if candidate.setup is not None:
                again = self._take(candidate, candidate.setup, members)
                if again is not None:
                    heapq.heappush(heap, again)
                continue
            progress(done)
            done += 1
            if not self._may_open(bounded[candidate.number], kinds):
                continue
            for setup in members.covered(branches[candidate.number]):
                number += 1
                if kinds is _STOCK or not _is_stock(setup):
                    bound_s = max(candidate.bound_s, self.bounds.pipeline_s(setup))
                    heapq.heappush(heap, _Open(candidate.is_later or _takes_long(setup), bound_s, number, setup))

    def _end_early(self, left: list[_Open], bounded: list[BranchBounds], kinds: tuple[str, ...]) -> None:
        """Note what nothing is faster than of all that is left and may fit."""
        for candidate in left:
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
        # What Megatron does alone comes first, and every branch once more.
        if kinds is _OURS and is_large:
            self._judge.cut_branch(branch.setup, least, branch.state_bytes > self._limit)
        elif kinds is _OURS:
            self._judge.skip_branch(branch.seconds)
        return False

    def _take(self, candidate: _Open, setup: Setup, members: Members) -> _Open | None:
        """Ask whether the trainer takes it, then for its memory, and simulate it at last; return it if it is to come up
        again, with a higher bound."""
        kinds = self._kinds(setup)
        is_asked = "all" in kinds
        if candidate.bound_s >= self._fastest.limit_s(kinds) / INDISTINCT:
            if is_asked:
                self._judge.is_slower(setup, candidate.bound_s)
            return None
        if not candidate.is_taken:
            taken = members.taken(setup)
            if taken is None:
                return None
            self._num_configurations += is_asked
            bound_s = max(candidate.bound_s, self.bounds.seconds(taken))
            return candidate._replace(bound_s=bound_s, setup=taken, is_taken=True)
        if not candidate.fits:
            judge = self._judge if is_asked else self._judge_apart
            chosen = judge.fitting(setup)
            if chosen is None:
                return None
            bound_s = candidate.bound_s if chosen == setup else self.bounds.seconds(chosen)
            # What it holds at most, which is known now, bounds its time once more.
            bound_s = max(bound_s, resident_seconds(chosen, self._space.profile))
            return candidate._replace(bound_s=bound_s, setup=chosen, needs_bytes=judge.needs_bytes, fits=True)
        self._num_simulated += 1
        self._simulate(candidate, setup, kinds, self._judge.families[setup.schedule] if is_asked else None)
        return None

    def _simulate(self, candidate: _Open, setup: Setup, kinds: tuple[str, ...], family: FamilyResult | None) -> None:
        """Keep it if it is among the fastest of a kind, or its family's fastest."""
        if candidate.needs_bytes is not None:
            setup = self._sending(setup)
        fastest_s = inf if family is None or family.fastest is None else family.fastest.iteration_s
        limit_s = self._fastest.limit_s(kinds)
        if family is not None:
            limit_s = max(limit_s, fastest_s)
        timing = timing_within(setup, costs_of(setup, self._space.profile), limit_s)
        if timing is None:
            return
        place, leads = (timing.iteration_s, candidate.number), family is not None and timing.iteration_s < fastest_s
        kept = self._fastest.kinds_with_room(kinds, place)
        if not kept and not leads:
            return
        # To tell that it was too much a part of it may have been enough.
        whole = None if candidate.needs_bytes is None else peak_bytes(replace(setup, balance=None))
        row = Candidate(
            predict(setup, self._space.profile, formula=self._space.formula, timing=timing), unbalanced_bytes=whole
        )
        if family is not None and leads:
            family.fastest = row
        self._fastest.keep(kept, place, row)

    def outcome(self) -> Outcome:
        judge, rows = self._judge, self._fastest.rows
        return Outcome(
            space=self._space,
            rows=rows("all"),
            stock=next(iter(rows("stock")), None),
            plain=next(iter(rows("plain")), None),
            balanced=next(iter(rows("balanced")), None),
            closest=judge.closest,
            families=judge.standings(),
            num_configurations=self._num_configurations,
            num_fitting=sum(one.num_fitting for one in judge.families.values()),
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
        """Return the seconds from which on nothing is among the rows of these kinds."""
        return max(map(self._limit_of, kinds))

    def _limit_of(self, kind: str) -> float:
        own = self._slowest_s(kind)
        return own if kind in ("all", "stock") else min(own, COMPARED * self._slowest_s("all"))

    def _slowest_s(self, kind: str) -> float:
        rows, size = self._rows[kind], self._sizes[kind]
        if not size:
            return 0.0
        return rows[-1][0][0] if len(rows) == size else inf

    def kinds_with_room(self, kinds: Iterable[str], place: tuple[float, int]) -> list[str]:
        """Return those of these kinds among whose rows this place is."""
        return [
            kind
            for kind in kinds
            if len(self._rows[kind]) < self._sizes[kind] or (self._sizes[kind] and place < self._rows[kind][-1][0])
        ]

    def keep(self, kinds: Iterable[str], place: tuple[float, int], row: Candidate) -> None:
        for kind in kinds:
            rows = sorted([*self._rows[kind], (place, row)], key=lambda kept: kept[0])
            self._rows[kind] = rows[: self._sizes[kind]]
