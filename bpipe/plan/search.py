"""Find the fastest configurations of a space. In: the Space. Out: counts, and the best `SetupPrediction`s, fastest first.

Every configuration is enumerated, and ordered by a lower bound of its time (no pipeline is faster than its slowest rank's work between the
first arrival and the last departure). Of most schedules with whole backwards every one's memory is predicted; one with split backwards or
two pipes is asked for its memory only once it comes up and could be among the rows, for its schedule has to be made for that. What fits is
simulated in the same order until no bound left is below the last time shown: the first rows are exactly those of simulating all. Knows no
command line.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from bpipe.models.layout import Setup
from bpipe.models.memory import least_bytes, least_shared_bytes, moves_anything, peak_bytes, state_bytes
from bpipe.models.profile import Profile
from bpipe.plan.fewest_layers import BLOCK, OPEN, fewest_layers, with_block
from bpipe.plan.predict import SetupPrediction, costs_of, predict, steady_timing
from bpipe.plan.space import Space, enumerate_setups

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Found:
    """`needs_bytes` is what a balanced setup's fullest rank would need without balancing, None where the setup is not balanced."""

    prediction: SetupPrediction
    needs_bytes: int | None


class Closest(NamedTuple):
    """The setup that needs fewest bytes on its fullest rank. `is_state`: they are its weights, gradients and optimizer state alone.

    A setup of which only activations are too much is closer than any whose state is.
    """

    is_state: bool
    needs_bytes: int
    setup: Setup


class _Candidate(NamedTuple):
    """A setup that may be worth simulating: none of its iterations is shorter than `bound_s`, `number` is its place in the enumeration.

    `judged`: it fits, and `needs_bytes` is what it would need without balancing; otherwise nobody has asked yet.
    """

    bound_s: float
    number: int
    setup: Setup
    judged: bool
    needs_bytes: int | None = None


@dataclass(slots=True)
class Standing:
    """How one family did. `fastest` is what was simulated of it, `bound_s` a time below which nothing of it is that was not simulated.

    `num_large` of those that were asked need too much memory, the least of them `least_bytes` on its fullest rank; `num_slower` were not
    asked, because none could be among the rows.
    """

    schedule: str
    num_fitting: int = 0
    num_large: int = 0
    num_slower: int = 0
    least_bytes: int | None = None
    bound_s: float | None = None
    fastest: Found | None = None

    def left(self, bound_s: float) -> None:
        """One of it is not simulated, and takes at least this long."""
        self.bound_s = bound_s if self.bound_s is None else min(self.bound_s, bound_s)


@dataclass(frozen=True, slots=True)
class Outcome:
    """`rows`: the fastest. `plain` and `balanced`: the fastest of either kind, where one fits. `closest` is there where nothing fits.
    `num_only_balanced` fit only balanced. `cuts` counts what was dropped, by the names of `space.CUTS`. `families`: every one that was
    searched, in the space's order."""

    space: Space
    num_configurations: int
    num_fitting: int
    num_only_balanced: int
    num_simulated: int
    rows: tuple[Found, ...]
    plain: Found | None
    balanced: Found | None
    closest: Closest | None
    cuts: dict[str, int]
    families: tuple[Standing, ...] = ()


def _peak_or_least_bytes(setup: Setup, limit_bytes: int) -> int:
    """What the fullest rank needs; where the least that it could is too much, that: no schedule has to be built for it."""
    least = least_bytes(setup)
    return least if least > limit_bytes else peak_bytes(setup)


def lower_bound_s(setup: Setup, profile: Profile | None = None) -> float:
    """No iteration is shorter: a rank's own work, what comes before its first computation and after its last, then the update."""
    stages = costs_of(setup, profile).stages
    p, m, pipes = setup.pipeline, setup.num_microbatches, setup.placements
    forwards = [float(cost.whole_forward_s) for cost in stages]
    backwards = [float(cost.whole_input_s + (cost.weight_s or 0) if setup.splits else cost.whole_backward_s) for cost in stages]
    bound = 0.0
    for mine in _stages_by_pipe(pipes, p):
        own = sum(forwards[stage] + backwards[stage] for of_pipe in mine for stage in of_pipe)
        # Whichever pipe comes first, and goes last.
        before = min(sum(forwards[: of_pipe[0]]) for of_pipe in mine)
        # Of a split backward the last weights' halves may run beside what follows elsewhere.
        after = 0.0 if setup.splits else min(sum(backwards[: of_pipe[0]]) for of_pipe in mine)
        bound = max(bound, before + m / len(pipes) * own + after)
    return bound + max(sum(float(stages[stage].optimizer_s) for stage in setup.stages_of(rank)) for rank in range(p))


@lru_cache(maxsize=1024)
def _stages_by_pipe(pipes: tuple[tuple[int, ...], ...], num_ranks: int) -> list[list[list[int]]]:
    """Of every rank, by pipe, the stages it computes."""
    return [[[stage for stage, owner in enumerate(placement) if owner == rank] for placement in pipes] for rank in range(num_ranks)]


def by_bound(space: Space) -> list[tuple[float, Setup]]:
    """All that the profile covers, each behind its lower bound of seconds, the lowest first."""
    setups = (setup for setup in enumerate_setups(space) if space.profile is None or space.profile.conflict(setup) is None)
    return sorted(((lower_bound_s(setup, space.profile), setup) for setup in setups), key=lambda one: one[0])


def _is_made_slowly(setup: Setup) -> bool:
    """Whether its orders are found by trying, so that even to ask what it holds takes long."""
    return setup.splits or setup.num_pipes > 1


def search(
    space: Space,
    num_rows: int = 10,
    progress: Progress = lambda what, done, total: None,
    sending: Callable[[Setup], Setup] = lambda setup: setup,
) -> Outcome:
    """The `num_rows` fastest, and besides the fastest plain and the fastest balanced one.

    `sending`: how a setup that fits only balanced is balanced when it is judged by its time, computing what it did.
    """
    cuts: Counter[str] = Counter()
    every = list(enumerate_setups(space, cuts))
    setups = [setup for setup in every if space.profile is None or space.profile.conflict(setup) is None]
    cuts["profile"] = len(every) - len(setups)
    judge = _Judge(space, cuts)
    candidates: list[_Candidate] = []
    for number, setup in enumerate(setups):
        progress("memory", number, len(setups))
        # Of an open number of layers the least take no longer than any others.
        chosen = setup if _is_made_slowly(setup) else judge.fitting(setup)
        if chosen is not None:
            judged = not _is_made_slowly(setup)
            needs = judge.needs_bytes if judged else None
            candidates.append(_Candidate(lower_bound_s(chosen, space.profile), number, chosen, judged, needs))
    progress("memory", len(setups), len(setups))
    # No two have one number.
    heapq.heapify(candidates)
    fastest, total = _Fastest(space, num_rows, sending), len(candidates)
    while candidates:
        progress("time", total - len(candidates), total)
        candidate = heapq.heappop(candidates)
        if candidate.judged:
            fastest.take(candidate, judge.families[candidate.setup.schedule])
        elif (asked := fastest.ask(candidate, judge)) is not None:
            heapq.heappush(candidates, asked)
    progress("time", total, total)
    return Outcome(
        space=space,
        num_configurations=len(setups),
        num_fitting=sum(one.num_fitting for one in judge.families.values()),
        num_only_balanced=judge.num_only_balanced,
        num_simulated=fastest.num_simulated,
        rows=fastest.rows("all"),
        plain=next(iter(fastest.rows("plain")), None),
        balanced=next(iter(fastest.rows("balanced")), None),
        closest=judge.closest,
        cuts={name: count for name, count in cuts.items() if count},
        families=tuple(judge.families.values()),
    )


class _Judge:
    """Says which setups fit, and counts. `needs_bytes`: what the last one that does would need without balancing, where it is balanced.
    `closest` is there where none did."""

    def __init__(self, space: Space, cuts: Counter[str]) -> None:
        self._limit, self.cuts = space.cluster.device.memory_bytes, cuts
        self._recompute = space.recompute
        self._plain_bytes = lru_cache(maxsize=None)(lambda setup: _peak_or_least_bytes(setup, self._limit))
        self.families = {name: Standing(name) for name in dict.fromkeys(space.schedules)}
        self.needs_bytes: int | None = None
        self.num_only_balanced = 0
        self._large: list[Closest] = []

    @property
    def closest(self) -> Closest | None:
        """Asked once there is nothing that fits: what was too much may have been a part of what it needs, so the lowest are asked anew."""
        if not self._large or any(one.num_fitting for one in self.families.values()):
            return None
        found: Closest | None = None
        for _, one in sorted(enumerate(self._large), key=lambda pair: (*pair[1][:2], pair[0])):
            if one.is_state or (found is not None and one.needs_bytes >= found.needs_bytes):
                return found or one
            needs = peak_bytes(one.setup)
            if found is None or needs < found.needs_bytes:
                found = one._replace(needs_bytes=needs)
        return found

    def fitting(self, setup: Setup) -> Setup | None:
        """The setup if it fits; where the number of layers that it recomputes is open, with as few as that takes. None: it does not."""
        if BLOCK not in self._recompute or setup.recompute != OPEN:
            return setup if self.fits(setup) else None
        most, self.needs_bytes = max(setup.layers), None
        if "none" in self._recompute and self._is_enough(replace(setup, recompute="none")):
            self.cuts["layers"] += 1
            return None
        number = fewest_layers(most, lambda count: self._is_enough(with_block(setup, count)))
        if number == most and "full" in self._recompute:
            self.cuts["layers"] += 1
            return None
        chosen = with_block(setup, number or most)
        return chosen if self.fits(chosen) else None

    def _is_enough(self, setup: Setup) -> bool:
        return self._plain_bytes(setup) <= self._limit

    def fits(self, setup: Setup) -> bool:
        family = self.families[setup.schedule]
        peak, self.needs_bytes = self._plain_bytes(replace(setup, balance="none")), None
        if setup.balance != "none":
            # What fits without balancing gains nothing from it.
            if peak <= self._limit:
                self.cuts["unneeded"] += 1
                return False
            if least_bytes(setup) <= self._limit:
                # Nothing has to be balanced to say that half of it is too much.
                least = least_shared_bytes(setup)
                if least > self._limit:
                    self._is_large(setup, least)
                    return False
                # Nor does what has nothing to move gain.
                if not moves_anything(setup):
                    self.cuts["pairs"] += 1
                    return False
            self.needs_bytes, peak = peak, _peak_or_least_bytes(setup, self._limit)
        if peak <= self._limit:
            family.num_fitting += 1
            self.num_only_balanced += self.needs_bytes is not None
            return True
        self._is_large(setup, peak)
        return False

    def _is_large(self, setup: Setup, peak: int) -> None:
        family = self.families[setup.schedule]
        self.cuts["memory"] += 1
        family.num_large += 1
        family.least_bytes = peak if family.least_bytes is None else min(family.least_bytes, peak)
        state = state_bytes(setup)
        self._large.append(Closest(state > self._limit, state if state > self._limit else peak, setup))


class _Fastest:
    """The fastest so far of all, of the plain and of the balanced ones. Candidates come by their bounds."""

    def __init__(self, space: Space, num_rows: int, sending: Callable[[Setup], Setup]) -> None:
        self._space, self._sending = space, sending
        self._sizes = {"all": num_rows, "plain": 1, "balanced": 1}
        # Of each kind the slowest of the fastest stands first: (-time, -number, row).
        self._kept: dict[str, list[tuple[float, int, Found]]] = {kind: [] for kind in self._sizes}
        self.num_simulated = 0

    def rows(self, kind: str) -> tuple[Found, ...]:
        return tuple(found for *_, found in sorted(self._kept[kind], key=lambda one: (-one[0], -one[1])))

    def ask(self, candidate: _Candidate, judge: _Judge) -> _Candidate | None:
        """Of one that nobody asked for its memory, what is to be taken when its turn comes: what fits may be slower than its bound."""
        bound, number, setup, *_ = candidate
        family = judge.families[setup.schedule]
        if self._too_late(("all",), bound):
            judge.cuts["slower"] += 1
            family.num_slower += 1
            family.left(bound)
            return None
        chosen = judge.fitting(setup)
        if chosen is None:
            return None
        bound = bound if chosen == setup else lower_bound_s(chosen, self._space.profile)
        return _Candidate(bound, number, chosen, judged=True, needs_bytes=judge.needs_bytes)

    def take(self, candidate: _Candidate, family: Standing) -> None:
        bound, number, setup, _, needs = candidate
        mine = ("all", "plain" if needs is None else "balanced")
        if self._too_late(mine, bound):
            family.left(bound)
            return
        self.num_simulated += 1
        if needs is not None:
            setup = self._sending(setup)
        timing = steady_timing(setup, costs_of(setup, self._space.profile))
        place = -timing.iteration_s, -number
        kept = [self._kept[kind] for kind in mine if len(self._kept[kind]) < self._sizes[kind] or place > self._kept[kind][0][:2]]
        leads = family.fastest is None or timing.iteration_s < family.fastest.prediction.timing.iteration_s
        if not kept and not leads:
            return
        # To tell that it was too much a part of it may have been enough.
        whole = None if needs is None else peak_bytes(replace(setup, balance="none"))
        found = Found(predict(setup, self._space.profile, formula=self._space.formula, timing=timing), whole)
        if leads:
            family.fastest = found
        for rows in kept:
            heapq.heappush(rows, (*place, found))
        for kind, size in self._sizes.items():
            if len(self._kept[kind]) > size:
                heapq.heappop(self._kept[kind])

    def _too_late(self, kinds: tuple[str, ...], bound: float) -> bool:
        """Whether nothing with this bound can be among those kept."""
        kept = ((self._kept[kind], self._sizes[kind]) for kind in kinds)
        return all(len(rows) == size and bound >= -rows[0][0] for rows, size in kept if size)
