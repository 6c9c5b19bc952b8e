"""Find the fastest configurations of a space.

In: the Space. Out: counts, and the best `SetupPrediction`s, fastest first.

Every configuration is enumerated, and ordered by a lower bound of its time (no pipeline is faster than its slowest
rank's work between the first arrival and the last departure). Of most schedules with whole backwards every one's memory
is predicted; one with split backwards, two pipes, slices or shards of the vocabulary is asked for its memory only once it comes
up and could be among the rows, for its schedule has to be made for that. What fits is simulated in the same order until
no bound left is below the last time shown: the first rows are exactly those of simulating all. Knows no command line.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from bpipe.plan.bounds import Bounds
from bpipe.plan.candidates import Candidate
from bpipe.plan.judge import Closest, FamilyResult, Judge
from bpipe.plan.predict import costs_of, predict
from bpipe.plan.refusals import Launchable
from bpipe.plan.shards import with_shards
from bpipe.plan.slices import Slicer
from bpipe.plan.space import Space, enumerate_setups
from bpipe.plan.timing import timing_within
from bpipe.predict.layout import Setup
from bpipe.predict.memory import peak_bytes
from bpipe.schedule.layout import Vocabulary

Progress = Callable[[str, int, int], None]


class _Candidate(NamedTuple):
    """A setup that may be worth simulating: none of its iterations is shorter than `bound_s`, `number` is its place in
    the enumeration.

    `judged`: it fits, and `needs_bytes` is what it would need without balancing; otherwise nobody has asked yet.
    """

    bound_s: float
    number: int
    setup: Setup
    judged: bool
    needs_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a search. `rows`: the fastest.

    `plain`, `balanced`: the fastest of either kind, where one fits. `closest`: where nothing fits.

    `num_sharded` configurations have vocabulary shards, `num_only_balanced` fit only balanced. `cuts` counts what was
    dropped, by the names of `space.CUTS`. `families`: all that were searched, in the space's order.
    """

    space: Space
    num_configurations: int
    num_sharded: int
    num_fitting: int
    num_only_balanced: int
    num_simulated: int
    rows: tuple[Candidate, ...]
    plain: Candidate | None
    balanced: Candidate | None
    closest: Closest | None
    cuts: dict[str, int]
    families: tuple[FamilyResult, ...] = ()


def by_bound(space: Space) -> list[tuple[float, Setup]]:
    """Return all that the profile covers, each behind its lower bound of seconds, the lowest first."""
    bounds = Bounds(space.profile)
    return sorted(
        ((bounds.seconds(setup), setup) for setup in every_setup(space, bounds, Counter())), key=lambda one: one[0]
    )


def every_setup(space: Space, bounds: Bounds, cuts: Counter[str]) -> Iterator[Setup]:
    """Return all that the profile covers and the trainer takes, with shards of the vocabulary behind each that is
    whole. `cuts` has the rest."""
    launchable = Launchable(space.others)
    for setup in _every_covered(space, bounds, cuts):
        taken = launchable.of(setup)
        if taken is None:
            cuts["refused"] += 1
        else:
            yield taken


def _every_covered(space: Space, bounds: Bounds, cuts: Counter[str]) -> Iterator[Setup]:
    slicer = Slicer(space.slices)
    for setup in enumerate_setups(space, cuts):
        if space.profile is not None and space.profile.conflict(setup) is not None:
            cuts["profile"] += 1
            continue
        if Vocabulary.WHOLE.value in space.vocabularies:
            if 1 in space.slices:
                yield setup
            if space.profile is None:
                yield from slicer.of(setup)
        if space.vocabulary_parallel is not None:
            yield from with_shards(setup, space.vocabularies)
        elif setup.pipeline > 1 and bounds.load(setup) > 1:
            # Where nobody chose, they have to promise something.
            whole_s = bounds.seconds(setup)
            yield from (one for one in with_shards(setup, space.vocabularies) if bounds.seconds(one) < whole_s)


def _is_asked_late(setup: Setup) -> bool:
    """Return whether its orders are found by trying, so that even to ask what it holds takes long."""
    return setup.splits or setup.num_pipes > 1 or setup.is_sharded or setup.slices > 1


def search(
    space: Space,
    num_rows: int = 10,
    progress: Progress = lambda what, done, total: None,
    sending: Callable[[Setup], Setup] = lambda setup: setup,
) -> Outcome:
    """Return the `num_rows` fastest, the fastest plain and the fastest balanced one."""
    cuts: Counter[str] = Counter()
    judge, bounds = Judge(space, cuts), Bounds(space.profile)
    setups = list(every_setup(space, bounds, cuts))
    candidates: list[_Candidate] = []
    for number, setup in enumerate(setups):
        progress("memory", number, len(setups))
        # Of an open number of layers the least take no longer than any others.
        chosen = setup if _is_asked_late(setup) else judge.fitting(setup)
        if chosen is not None:
            judged = not _is_asked_late(setup)
            needs = judge.needs_bytes if judged else None
            candidates.append(_Candidate(bounds.seconds(chosen), number, chosen, judged, needs))
    progress("memory", len(setups), len(setups))
    # No two have one number.
    heapq.heapify(candidates)
    fastest, total = _Fastest(space, num_rows, sending), len(candidates)
    while candidates:
        progress("time", total - len(candidates), total)
        candidate = heapq.heappop(candidates)
        if candidate.judged:
            fastest.take(candidate, judge.families[candidate.setup.schedule])
        elif (asked := fastest.ask(candidate, judge, bounds)) is not None:
            heapq.heappush(candidates, asked)
    progress("time", total, total)
    return Outcome(
        space=space,
        num_configurations=len(setups),
        num_sharded=sum(setup.is_sharded for setup in setups),
        num_fitting=sum(one.num_fitting for one in judge.families.values()),
        num_only_balanced=judge.num_only_balanced,
        num_simulated=fastest.num_simulated,
        rows=fastest.rows("all"),
        plain=next(iter(fastest.rows("plain")), None),
        balanced=next(iter(fastest.rows("balanced")), None),
        closest=judge.closest,
        cuts={name: count for name, count in cuts.items() if count},
        families=judge.standings(),
    )


class _Fastest:
    """The fastest so far of all, of the plain and of the balanced ones. Candidates come by their bounds."""

    def __init__(self, space: Space, num_rows: int, sending: Callable[[Setup], Setup]) -> None:
        self._space, self._sending = space, sending
        self._sizes = {"all": num_rows, "plain": 1, "balanced": 1}
        # Of each kind the slowest of the fastest stands first: (-time, -number, row).
        self._kept: dict[str, list[tuple[float, int, Candidate]]] = {kind: [] for kind in self._sizes}
        self.num_simulated = 0

    def rows(self, kind: str) -> tuple[Candidate, ...]:
        return tuple(found for *_, found in sorted(self._kept[kind], key=lambda one: (-one[0], -one[1])))

    def ask(self, candidate: _Candidate, judge: Judge, bounds: Bounds) -> _Candidate | None:
        """Of one that nobody asked for its memory, what is to be taken when its turn comes: what fits may be slower
        than its bound."""
        bound, number, setup, *_ = candidate
        if self._too_late(("all",), bound):
            judge.is_slower(setup, bound)
            return None
        chosen = judge.fitting(setup)
        if chosen is None:
            return None
        bound = bound if chosen == setup else bounds.seconds(chosen)
        return _Candidate(bound, number, chosen, judged=True, needs_bytes=judge.needs_bytes)

    def take(self, candidate: _Candidate, family: FamilyResult) -> None:
        """Simulate it where it may be among those kept."""
        bound, number, setup, _, needs = candidate
        mine = ("all", "plain" if needs is None else "balanced")
        if self._too_late(mine, bound):
            family.left(bound)
            return
        self.num_simulated += 1
        self._keep(setup if needs is None else self._sending(setup), number, mine, family)

    def _keep(self, setup: Setup, number: int, mine: tuple[str, ...], family: FamilyResult) -> None:
        """Among those it is one of, and as its family's fastest."""
        timing = timing_within(setup, costs_of(setup, self._space.profile), self._most_s(mine, family))
        if timing is None:
            return
        place = -timing.iteration_s, -number
        kept = [
            self._kept[kind]
            for kind in mine
            if len(self._kept[kind]) < self._sizes[kind] or place > self._kept[kind][0][:2]
        ]
        leads = family.fastest is None or timing.iteration_s < family.fastest.prediction.timing.iteration_s
        if not kept and not leads:
            return
        # To tell that it was too much a part of it may have been enough.
        whole = peak_bytes(replace(setup, balance=None)) if "balanced" in mine else None
        found = Candidate(
            predict(setup, self._space.profile, formula=self._space.formula, timing=timing), unbalanced_bytes=whole
        )
        if leads:
            family.fastest = found
        for rows in kept:
            heapq.heappush(rows, (*place, found))
        for kind, size in self._sizes.items():
            if len(self._kept[kind]) > size:
                heapq.heappop(self._kept[kind])

    def _most_s(self, mine: tuple[str, ...], family: FamilyResult) -> float:
        """Return the seconds beyond which it is none of those kept, nor its family's fastest."""
        if family.fastest is None or any(len(self._kept[kind]) < self._sizes[kind] for kind in mine):
            return inf
        slowest = (-self._kept[kind][0][0] for kind in mine if self._sizes[kind])
        return max(family.fastest.prediction.timing.iteration_s, *slowest)

    def _too_late(self, kinds: tuple[str, ...], bound: float) -> bool:
        """Return whether nothing with this bound can be among those kept."""
        kept = ((self._kept[kind], self._sizes[kind]) for kind in kinds)
        return all(len(rows) == size and bound >= -rows[0][0] for rows, size in kept if size)
