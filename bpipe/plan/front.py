"""The Pareto front of a space: the fastest configuration for every amount of memory.

A configuration is on it if no other that is at least as fast needs less memory. The device's own memory only determines
which point wins. Configurations are tried by rising lower bounds of their times, and those that bounds rule out are not
predicted: the result is the same as if all were.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from bpipe.balance.config import BALANCES
from bpipe.config.launch.megatron_flags import megatron_flags
from bpipe.plan.candidates import document
from bpipe.plan.explain import needs_of_setup
from bpipe.plan.predict import Candidate, costs_of, predict
from bpipe.plan.search import Progress, by_bound, search, stock_space
from bpipe.plan.space import SEARCHED_SCOPES, VOCABULARIES, Space
from bpipe.plan.timing import Timing, steady_timing
from bpipe.plan.variants import NUMBERS, stands_still
from bpipe.predict.cluster import gib_text
from bpipe.predict.layout import Setup
from bpipe.predict.memory import least_bytes, least_shared_bytes, peak_bytes
from bpipe.predict.recompute import BLOCK
from bpipe.schedule.families.families import FAMILIES, SEARCHED
from bpipe.schedule.hosts import ARRANGEMENTS

# Limit of the search as a multiple of the device's memory.
MOST_TIMES = Fraction(2)
_SHARDS, _SLICES = "--vocabulary", "--slices"


@dataclass(frozen=True, slots=True)
class Front:
    """Pareto front of memory and time."""

    points: tuple[Candidate, ...]
    """By rising memory and falling time."""
    limit_bytes: int
    """Memory of a device."""
    most_bytes: int
    """Limit of the search."""
    num_configurations: int
    """Configurations that were searched."""
    num_simulated: int
    stock: Candidate | None = None
    """The fastest configuration of stock Megatron that fits."""
    not_searched: tuple[str, ...] = ()
    """What was left out and may beat a point."""

    @property
    def winner(self) -> int | None:
        """Index of the fastest point that fits; None if none does."""
        fitting = [index for index, point in enumerate(self.points) if point.peak_bytes <= self.limit_bytes]
        return fitting[-1] if fitting else None


def find_front(space: Space, progress: Progress = lambda what, done, total: None) -> Front:
    """Find the front up to `MOST_TIMES` the device's memory. Raises ValueError for an open number of recomputed
    layers."""
    if BLOCK in space.recompute:
        raise ValueError(
            f"{BLOCK} chooses the number of layers for one amount of memory: give numbers, such as {BLOCK}:2 {BLOCK}:4"
        )
    limit = space.cluster.limit_bytes
    largest = int(MOST_TIMES * limit)
    candidates = by_bound(space)
    unbeaten = _Unbeaten()
    for done, (bound_s, setup) in enumerate(candidates):
        progress("front", done, len(candidates))
        needs = _needs_unless_beaten(unbeaten, setup, bound_s, largest)
        if needs is not None and not stands_still(setup):
            unbeaten.add(needs, steady_timing(setup, costs_of(setup, space.profile)), setup)
    progress("front", len(candidates), len(candidates))
    points = (predict(setup, space.profile, formula=space.formula, timing=timing) for _, timing, setup in unbeaten.rows)
    stock = search(stock_space(space), 1).stock
    return Front(tuple(points), limit, largest, len(candidates), unbeaten.num_added, stock, not_searched(space))


def not_searched(space: Space) -> tuple[str, ...]:
    """Return what a space leaves out that may need less memory or time, each with the flag that searches it, if any."""
    moves = set(space.balances) != {BALANCES[0]}
    families = [FAMILIES[name] for name in space.schedules]
    hosts, scopes = _but(ARRANGEMENTS, space.hosts), _but(SEARCHED_SCOPES, space.recompute)
    others, shards = _but(SEARCHED, space.schedules), _but(VOCABULARIES, space.vocabularies)
    omissions = (
        (
            space.vocabulary_parallel is None,
            f"shards of the vocabulary that save only memory ({_SHARDS} {' '.join(VOCABULARIES)})",
        ),
        (shards, f"other shards of the vocabulary ({_SHARDS} {' '.join(shards)})"),
        (
            set(space.recompute) <= set(SEARCHED_SCOPES),
            "recomputation of some layers or parts (--recompute full:block:2 selective:mlp ...)",
        ),
        (scopes, f"recomputation {', '.join(scopes)} (--recompute)"),
        (
            space.slices == (1,) and any(family.takes_slices for family in families),
            f"sequences in slices ({_SLICES} {' '.join(map(str, NUMBERS))})",
        ),
        (max(space.slices) > 1 and moves, "balanced slices of differing lengths (--memory, without --front)"),
        (not moves, "balanced rows (--balance)"),
        (moves and hosts, f"other hosts of evicted activations (--hosts {' '.join(hosts)})"),
        (moves, "balanced rows that send only what a budget needs (--memory, without --front)"),
        (BALANCES[0] not in space.balances, "rows without balancing (--balance)"),
        (others, f"other schedules (--schedule {' '.join(others)})"),
        (
            any(family.takes_delay or family.splits for family in families),
            "other groups than p / 2 and p, delays, and W at once (bpipe simulate)",
        ),
        (space.max_chunks < space.model.num_layers, f"more than {space.max_chunks} chunks per rank (--max-chunks)"),
        (space.contexts == (1,), "sequences in parts (--cp 1 2 ...)"),
    )
    return tuple(text for is_left_out, text in omissions if is_left_out)


def _but(choices: Iterable[str], excluded: Collection[str]) -> list[str]:
    return [choice for choice in choices if choice not in excluded]


def _needs_unless_beaten(unbeaten: _Unbeaten, setup: Setup, bound_s: float, largest: int) -> int | None:
    """Return the bytes a setup needs; None if they exceed `largest` or a row beats it. Cheap bounds come first."""
    sizes: list[Callable[[Setup], int]] = [least_bytes, peak_bytes]
    if setup.balance is not None:
        sizes.insert(1, least_shared_bytes)
    needs = 0
    for size_of in sizes:
        needs = size_of(setup)
        if needs > largest or unbeaten.beats(needs, bound_s):
            return None
    return needs


class _Unbeaten:
    """Configurations that no other beats so far, by rising memory."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, Timing, Setup]] = []
        self.num_added = 0

    def beats(self, needs: int, seconds: float) -> bool:
        """Whether a row needs no more memory and takes no longer."""
        return any(peak <= needs and timing.iteration_s <= seconds for peak, timing, _ in self.rows)

    def add(self, needs: int, timing: Timing, setup: Setup) -> None:
        self.num_added += 1
        seconds = timing.iteration_s
        if not self.beats(needs, seconds):
            rest = [row for row in self.rows if not (needs <= row[0] and seconds <= row[1].iteration_s)]
            self.rows = sorted((*rest, (needs, timing, setup)), key=lambda row: row[0])


def standing(front: Front) -> str:
    """Return which point wins at the device's memory, and how far away its neighbours are."""
    winner, memory = front.winner, f"{gib_text(front.limit_bytes)} GiB"
    if winner is None:
        first = front.points[0]
        return (
            f"Nothing fits into {memory}: the smallest configuration needs {gib_text(first.peak_bytes)} GiB, "
            f"{_apart(first, front.limit_bytes)} more."
        )
    best = front.points[winner]
    parts = [f"With {memory} row {winner + 1} wins (*): {best.iteration_s:.3f} s in {gib_text(best.peak_bytes)} GiB."]
    if winner + 1 < len(front.points):
        above = front.points[winner + 1]
        gain = 100 * (1 - above.iteration_s / best.iteration_s)
        parts.append(
            f"The next needs {_apart(above, front.limit_bytes)} more than that and takes {gain:.1f} % less time."
        )
    else:
        parts.append("Nothing that was searched with more memory is faster.")
    if winner:
        below = front.points[winner - 1]
        loss = 100 * (below.iteration_s / best.iteration_s - 1)
        parts.append(
            f"The one before needs {gib_text(best.peak_bytes - below.peak_bytes)} GiB less and takes {loss:.1f} % "
            "more time."
        )
    return " ".join(parts)


def _apart(point: Candidate, limit: int) -> str:
    return f"{gib_text(point.peak_bytes - limit)} GiB"


def front_document(front: Front) -> dict[str, Any]:
    """Return the document that `--front --format json` promises (docs/planning.md)."""
    return {
        "limit_bytes": front.limit_bytes,
        "most_bytes": front.most_bytes,
        "configurations": front.num_configurations,
        "simulated": front.num_simulated,
        "winner": None if front.winner is None else front.winner + 1,
        "standing": standing(front) if front.points else None,
        "points": [
            {
                "peak_bytes": point.peak_bytes,
                **document(point),
                "needs": needs_of_setup(point.setup),
                "megatron_flags": megatron_flags(point.setup),
            }
            for point in front.points
        ],
        "not_searched": list(front.not_searched),
    }
