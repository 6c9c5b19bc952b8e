"""Find the fastest configurations of a space. In: the Space. Out: counts, and the best `SetupPrediction`s, fastest first.

Every configuration is enumerated and its memory predicted; what does not fit is dropped. The rest is ordered by a lower bound of its
time (no pipeline is faster than its slowest rank's work between the first arrival and the last departure), and simulated in that order
until no bound left is below the last time shown: the first rows are exactly those of simulating all. Knows no command line.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from bpipe.models.layout import Setup
from bpipe.models.memory import predict_memory, state_bytes
from bpipe.models.profile import Profile
from bpipe.plan.predict import SetupPrediction, costs_of, predict
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


class _Fitting(NamedTuple):
    """A setup worth simulating: none of its iterations is shorter than `bound_s`, `number` is its place in the enumeration."""

    bound_s: float
    number: int
    setup: Setup
    needs_bytes: int | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """`rows`: the fastest. `plain` and `balanced`: the fastest of either kind, where one fits. `closest` is there where nothing fits.
    `num_only_balanced` fit only balanced. `cuts` counts what was dropped, by the names of `space.CUTS`."""

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


def _peak_bytes(setup: Setup, limit_bytes: int) -> int:
    """What the fullest rank needs. Where weights and optimizer alone are too much, that much: no schedule has to be built for it."""
    state = state_bytes(setup)
    return state if state > limit_bytes else max(rank.peak_bytes for rank in predict_memory(setup))


def lower_bound_s(setup: Setup, profile: Profile | None = None) -> float:
    """No iteration is shorter: a rank's own work, what comes before its first computation and after its last, then the update."""
    stages = costs_of(setup, profile).stages
    p, m = setup.pipeline, setup.num_microbatches
    forwards = [float(cost.whole_forward_s) for cost in stages]
    backwards = [float(cost.whole_input_s + (cost.weight_s or 0) if setup.splits else cost.whole_backward_s) for cost in stages]
    bound = 0.0
    for rank in range(p):
        mine = setup.stages_of(rank)
        own = sum(forwards[stage] for stage in mine) + sum(backwards[stage] for stage in mine)
        # Of a split backward the last weights' halves may run beside what follows elsewhere.
        after = 0.0 if setup.splits else sum(backwards[: mine[0]])
        bound = max(bound, sum(forwards[: mine[0]]) + m * own + after)
    return bound + max(sum(float(stages[stage].optimizer_s) for stage in setup.stages_of(rank)) for rank in range(p))


def search(space: Space, num_rows: int = 10, progress: Progress = lambda what, done, total: None) -> Outcome:
    """The `num_rows` fastest, and besides the fastest plain and the fastest balanced one."""
    cuts: Counter[str] = Counter()
    every = list(enumerate_setups(space, cuts))
    setups = [setup for setup in every if space.profile is None or space.profile.conflict(setup) is None]
    cuts["profile"] = len(every) - len(setups)
    fitting, closest = _what_fits(space, setups, progress, cuts)
    fitting.sort(key=lambda one: (one.bound_s, one.number))
    rows, fastest_plain, fastest_balanced, simulated = _fastest(space, fitting, num_rows, progress)
    return Outcome(
        space=space,
        num_configurations=len(setups),
        num_fitting=len(fitting),
        num_only_balanced=sum(one.needs_bytes is not None for one in fitting),
        num_simulated=simulated,
        rows=rows,
        plain=fastest_plain,
        balanced=fastest_balanced,
        closest=None if fitting else closest,
        cuts={name: count for name, count in cuts.items() if count},
    )


def _what_fits(space: Space, setups: list[Setup], progress: Progress, cuts: Counter[str]) -> tuple[list[_Fitting], Closest | None]:
    """Every setup worth simulating; where there is none, the closest."""
    fitting: list[_Fitting] = []
    closest: Closest | None = None
    limit = space.cluster.device.memory_bytes
    # Setups that differ in nothing but balancing follow each other.
    plain_bytes = lru_cache(maxsize=1)(_peak_bytes)
    for number, setup in enumerate(setups):
        progress("memory", number, len(setups))
        peak, needs = plain_bytes(replace(setup, balance="none"), limit), None
        if setup.balance != "none":
            # What fits without balancing gains nothing from it.
            if peak <= limit:
                cuts["unneeded"] += 1
                continue
            peak, needs = _peak_bytes(setup, limit), peak
        if peak <= limit:
            fitting.append(_Fitting(lower_bound_s(setup, space.profile), number, setup, needs))
            continue
        cuts["memory"] += 1
        if not fitting:
            mine = Closest(state_bytes(setup) > limit, peak, setup)
            closest = mine if closest is None or mine[:2] < closest[:2] else closest
    progress("memory", len(setups), len(setups))
    return fitting, closest


def _fastest(
    space: Space, fitting: list[_Fitting], num_rows: int, progress: Progress
) -> tuple[tuple[Found, ...], Found | None, Found | None, int]:
    # Of each kind the slowest of the fastest stands first: (-time, -number, row).
    kept: dict[str, list[tuple[float, int, Found]]] = {"all": [], "plain": [], "balanced": []}
    sizes = {"all": num_rows, "plain": 1, "balanced": 1}
    simulated = 0
    for done, (bound, number, setup, needs) in enumerate(fitting):
        progress("time", done, len(fitting))
        mine = ("all", "plain" if needs is None else "balanced")
        if all(len(kept[kind]) == sizes[kind] and bound >= -kept[kind][0][0] for kind in mine if sizes[kind]):
            continue
        simulated += 1
        found = Found(predict(setup, space.profile, formula=space.formula), needs)
        for kind in mine:
            heapq.heappush(kept[kind], (-found.prediction.timing.iteration_s, -number, found))
            if len(kept[kind]) > sizes[kind]:
                heapq.heappop(kept[kind])
    progress("time", len(fitting), len(fitting))
    ordered = {kind: [found for *_, found in sorted(heap, key=lambda one: (-one[0], -one[1]))] for kind, heap in kept.items()}
    first = {kind: found[0] if found else None for kind, found in ordered.items()}
    return tuple(ordered["all"]), first["plain"], first["balanced"], simulated
