"""Say what a correct co-executor must do with each step of a program.

In: each step's path, as tokens. Out: a phase for each step.

A token is whatever tells two operations apart. The first steps warm up. Then steps are traced until one brings nothing
new: no token right after another that did not come so before, a step's beginning and its end being tokens too. From
then on steps are co-executed; one that brings something new falls back in mid-step, is kept as well, and the next ones
are traced again. A set of pairs, and no graph. Counted as in Kim et al., Terra, NeurIPS 2021, where a fixed program is
traced twice: once to know it, once to see that nothing is new.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise

from tests.unit.terra.programs.program import Counts


class Phase(enum.Enum):
    WARM_UP = "warm-up"
    TRACED = "traced"
    CO_EXECUTED = "co-executed"
    FELL_BACK = "fell back"


def phases(paths: Iterable[Sequence[Hashable]], warm_up: int = 1) -> list[Phase]:
    known: set[tuple[Hashable, Hashable]] = set()
    found: list[Phase] = []
    tracing = True
    for number, path in enumerate(paths):
        if number < warm_up:
            found.append(Phase.WARM_UP)
            continue
        pairs = set(pairwise((_EDGE, *path, _EDGE)))
        is_new = not pairs <= known
        known |= pairs
        if tracing:
            found.append(Phase.TRACED)
        else:
            found.append(Phase.FELL_BACK if is_new else Phase.CO_EXECUTED)
        tracing = is_new
    return found


def counts(paths: Iterable[Sequence[Hashable]], warm_up: int = 1) -> Counts:
    found = phases(paths, warm_up)
    return Counts(found.count(Phase.TRACED), found.count(Phase.FELL_BACK))


# Where a step begins and ends: equal to no token.
_EDGE = object()
