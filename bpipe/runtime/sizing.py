"""Decide what room a stage's micro-batches get in host buffers, and note which of them had too little.

In: what each micro-batch that is to leave would take. Out: whether it fits; the rooms to announce, at a stage's first
forward and between two iterations; and what stayed at home. Knows no tensors and no transport.

Where all micro-batches of a stage are alike, the room is that of the first. Where they differ, it is the most that was
seen and a reserve, and one that is larger than its room stays at home: its eviction and its load move nothing. The next
iteration has room for it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from bpipe.schedule.action import Key
from bpipe.schedule.memory import RESERVE
from bpipe.transport.layout import aligned, allocated_bytes

# In so many steps what leaves of a micro-batch is tried to be less.
STEPS = 8


@dataclass(frozen=True)
class Unmoved:
    """Micro-batches of one iteration that were to leave and found too little room, and the bytes that would have moved.

    `passed_microbatches`, `passed_bytes`: the most by which the schedule's bound was exceeded at once.
    """

    microbatches: int = 0
    nbytes: int = 0
    passed_microbatches: int = 0
    passed_bytes: int = 0

    def with_here(self, sizes: Sequence[int]) -> Unmoved:
        """Return the record with these sizes here beside a computation that were to be away."""
        passed = max(self.passed_microbatches, len(sizes)), max(self.passed_bytes, sum(sizes))
        return replace(self, passed_microbatches=passed[0], passed_bytes=passed[1])


class Sizing:
    """Sizes of one evictor. `rooms` are what was announced by stage; `moved_bytes` the most that one micro-batch of
    a stage moves."""

    def __init__(self, differing: bool) -> None:
        self.differing = differing
        self.announced: dict[int, tuple[int, ...]] = {}
        self.moved_bytes: dict[int, int] = {}
        # The most that one micro-batch would take, whether it had room or not; and how often rooms were made larger.
        self.most_bytes: dict[int, int] = {}
        self.num_grown = 0
        # Of this iteration, what of each micro-batch moved: nothing of one that stayed.
        self.moved_each: dict[Key, int] = {}
        self.stayed = Unmoved()
        # What found no room: while its eviction lasts, and while it is to be away.
        self._staying: dict[Hashable, int] = {}
        self._at_home: dict[Hashable, int] = {}

    def begin(self) -> None:
        """Begin an iteration."""
        self.stayed = Unmoved()
        self.moved_each.clear()
        self._at_home.clear()

    def first(self, stage: int, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """Return what to announce of a stage whose first micro-batch has storages of these lengths."""
        self._saw(stage, lengths)
        self.moved_bytes[stage] = sum(lengths)
        self.announced[stage] = self._room(stage) if self.differing else lengths
        return self.announced[stage]

    def leaves(self, stage: int, microbatch: int, lengths: tuple[int, ...]) -> bool:
        """Return whether a micro-batch with these storages leaves now; noted as staying if not."""
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
        """Note that a micro-batch is to be gone from now on."""
        if (stage, microbatch) in self._staying:
            self._at_home[stage, microbatch] = self._staying.pop((stage, microbatch))

    def computes(self) -> None:
        """Note that a computation begins beside everything that is here."""
        self.stayed = self.stayed.with_here(self.at_home)

    @property
    def at_home(self) -> list[int]:
        """The bytes of each micro-batch that is to be away and is here."""
        return list(self._at_home.values())

    def back(self, stage: int, microbatch: int) -> None:
        """Note that a micro-batch is to be here again."""
        self._at_home.pop((stage, microbatch), None)

    def grow(self) -> dict[int, tuple[int, ...]]:
        """Return, between two iterations, the buffers that have to grow, by stage."""
        lacking = [stage for stage, room in self.announced.items() if self.most_bytes[stage] > allocated_bytes(room)]
        grown = {stage: self._room(stage) for stage in lacking}
        self.announced |= grown
        self.num_grown += bool(grown)
        return grown

    def parts(self) -> dict[int, tuple[int, ...]]:
        """Return, by stage, the bytes of a micro-batch that could leave in place of all: ascending, the last is all.

        An evictor takes them from the end of the walk. Where sizes differ nothing can be said.
        """
        found = {}
        for stage, lengths in ({} if self.differing else self.announced).items():
            sums = list(accumulate(reversed(lengths)))
            wanted = (sums[-1] * step // STEPS for step in range(1, STEPS)) if sums else ()
            found[stage] = (
                *sorted({next(one for one in sums if one >= least) for least in wanted} - set(sums[-1:])),
                *sums[-1:],
            )
        return found

    def release(self) -> None:
        """Drop announced sizes, so that they are announced anew; what was seen stays known."""
        self.announced.clear()
        self.moved_bytes.clear()

    def _room(self, stage: int) -> tuple[int, ...]:
        most = self.most_bytes[stage]
        return (aligned(int(most * (1 + RESERVE))),) if most else ()

    def _saw(self, stage: int, lengths: tuple[int, ...]) -> None:
        self.most_bytes[stage] = max(self.most_bytes.get(stage, 0), allocated_bytes(lengths))


def together(several: Iterable[Sizing], passed: Unmoved) -> Sizing:
    """Combine the sizes of one rank's evictors: the largest buffers, and all that stayed.

    `passed`: at once, by all of them.
    """
    found = Sizing(differing=False)
    stayed = passed
    for one in several:
        found.differing = one.differing
        stayed = replace(
            stayed, microbatches=stayed.microbatches + one.stayed.microbatches, nbytes=stayed.nbytes + one.stayed.nbytes
        )
        found.moved_each |= one.moved_each
        # Once an iteration at most, whoever of them grew.
        found.num_grown = max(found.num_grown, one.num_grown)
        for sizes, others in ((found.moved_bytes, one.moved_bytes), (found.most_bytes, one.most_bytes)):
            sizes.update({stage: max(size, sizes.get(stage, 0)) for stage, size in others.items()})
        found.announced.update(
            {
                stage: max(room, found.announced.get(stage, ()), key=allocated_bytes)
                for stage, room in one.announced.items()
            }
        )
    found.stayed = stayed
    return found
