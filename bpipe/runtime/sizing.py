"""The room that a stage's micro-batches get in host buffers, and the micro-batches that had too little.

If all micro-batches of a stage have one size, the room is that of the first. If they differ, it is the most that was
seen and a reserve, and a micro-batch that is larger than its room stays at home: its eviction and its load move
nothing. The next iteration has room for it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from bpipe.schedule.action import Key
from bpipe.schedule.memory import RESERVE
from bpipe.transport.layout import aligned, allocated_bytes

# Number of parts of a micro-batch that a plan can choose from.
STEPS = 8


def parts_of(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the bytes that could leave of storages of these lengths, ascending; the last is all.

    An evictor takes them from the end of the walk.
    """
    sums = list(accumulate(reversed(lengths)))
    minima = (sums[-1] * step // STEPS for step in range(1, STEPS)) if sums else ()
    smaller = {next(nbytes for nbytes in sums if nbytes >= least) for least in minima} - set(sums[-1:])
    return *sorted(smaller), *sums[-1:]


@dataclass(frozen=True)
class Unmoved:
    """Micro-batches of one iteration that should have left and had too little room."""

    microbatches: int = 0

    nbytes: int = 0
    """Bytes that would have moved."""

    passed_microbatches: int = 0
    """The most by which the schedule's bound was exceeded at once."""

    passed_bytes: int = 0
    """The same in bytes."""


class Sizing:
    """Sizes of what leaves one rank; every host of a stage has the same room for its micro-batches."""

    def __init__(self, differing: bool) -> None:
        self.differing = differing
        # By stage: the lengths announced, and the most bytes that one micro-batch moves.
        self.announced: dict[int, tuple[int, ...]] = {}
        self.moved_bytes: dict[int, int] = {}
        # The most that one micro-batch would take, whether it had room or not; and how often rooms were made larger.
        self.most_bytes: dict[int, int] = {}
        self.num_grown = 0
        # Of this iteration: the bytes of each micro-batch that moved, 0 for one that stayed.
        self.moved_each: dict[Key, int] = {}
        self.stayed = Unmoved()
        # Micro-batches without room: during their eviction, and while they should be away.
        self._staying: dict[Hashable, int] = {}
        self._at_home: dict[Hashable, int] = {}

    def begin(self) -> None:
        """Begin an iteration."""
        self.stayed = Unmoved()
        self.moved_each.clear()
        self._at_home.clear()

    def first(self, stage: int, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """Return the lengths to announce for a stage whose first micro-batch has storages of these lengths."""
        self._saw(stage, lengths)
        self.moved_bytes[stage] = sum(lengths)
        self.announced[stage] = self._room(stage) if self.differing else lengths
        return self.announced[stage]

    def leaves(self, stage: int, microbatch: int, lengths: tuple[int, ...]) -> bool:
        """Return whether a micro-batch with these storages leaves now. If not, it stays."""
        self._saw(stage, lengths)
        if allocated_bytes(lengths) <= allocated_bytes(self.announced.get(stage, ())):
            self.moved_bytes[stage] = max(self.moved_bytes.get(stage, 0), sum(lengths))
            self.moved_each[stage, microbatch] = sum(lengths)
            return True
        self.moved_each[stage, microbatch] = 0
        self._staying[stage, microbatch] = sum(lengths)
        self.stayed = replace(
            self.stayed, microbatches=self.stayed.microbatches + 1, nbytes=self.stayed.nbytes + sum(lengths)
        )
        return False

    def away(self, stage: int, microbatch: int) -> None:
        """Note that a micro-batch should be away from now on."""
        if (stage, microbatch) in self._staying:
            self._at_home[stage, microbatch] = self._staying.pop((stage, microbatch))

    def computes(self) -> None:
        """Note that a computation begins next to the micro-batches that should be away and are here."""
        sizes = self._at_home.values()
        passed = max(self.stayed.passed_microbatches, len(sizes)), max(self.stayed.passed_bytes, sum(sizes))
        self.stayed = replace(self.stayed, passed_microbatches=passed[0], passed_bytes=passed[1])

    def back(self, stage: int, microbatch: int) -> None:
        """Note that a micro-batch should be here again."""
        self._at_home.pop((stage, microbatch), None)

    def grow(self) -> dict[int, tuple[int, ...]]:
        """Return, between two iterations, the buffers that have to grow, by stage."""
        lacking = [stage for stage, room in self.announced.items() if self.most_bytes[stage] > allocated_bytes(room)]
        grown = {stage: self._room(stage) for stage in lacking}
        self.announced |= grown
        self.num_grown += bool(grown)
        return grown

    def parts(self) -> dict[int, tuple[int, ...]]:
        """Return by stage the bytes that could leave of a micro-batch instead of all, ascending; the last is all.

        If sizes differ, there are none.
        """
        return {stage: parts_of(lengths) for stage, lengths in ({} if self.differing else self.announced).items()}

    def release(self) -> None:
        """Drop announced sizes, so that they are announced anew. The most that was seen stays known."""
        self.announced.clear()
        self.moved_bytes.clear()

    def _room(self, stage: int) -> tuple[int, ...]:
        nbytes = self.most_bytes[stage]
        return (aligned(int(nbytes * (1 + RESERVE))),) if nbytes else ()

    def _saw(self, stage: int, lengths: tuple[int, ...]) -> None:
        self.most_bytes[stage] = max(self.most_bytes.get(stage, 0), allocated_bytes(lengths))
