"""Decide what room a stage's micro-batches get in host buffers, and note which of them had too little.

In: what each micro-batch that is to leave would take. Out: whether it fits; the rooms to announce, at a stage's first forward and between
two iterations; and what stayed at home. Knows no tensors and no transport.

Where all micro-batches of a stage are alike, the room is that of the first. Where they differ, it is the most that was seen and a reserve,
and one that is larger than its room stays at home: its eviction and its load move nothing. The next iteration has room for it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from bpipe.ir.memory import RESERVE
from bpipe.transport.layout import aligned, taken

# In so many steps what leaves of a micro-batch is tried to be less.
STEPS = 8


@dataclass(frozen=True)
class StayedAtHome:
    """Of one iteration: micro-batches that were to leave and found too little room, and the bytes that would have moved.

    `passed_microbatches` and `passed_bytes`: by how much at most the schedule's bound was passed at once.
    """

    microbatches: int = 0
    nbytes: int = 0
    passed_microbatches: int = 0
    passed_bytes: int = 0

    def with_here(self, sizes: Sequence[int]) -> StayedAtHome:
        """Beside a computation these are here that were to be away."""
        passed = max(self.passed_microbatches, len(sizes)), max(self.passed_bytes, sum(sizes))
        return replace(self, passed_microbatches=passed[0], passed_bytes=passed[1])


class Sizing:
    """Of one evictor. `rooms` are what was announced by stage; `moved_bytes` the most that one micro-batch of a stage moves."""

    def __init__(self, differing: bool) -> None:
        self.differing = differing
        self.rooms: dict[int, tuple[int, ...]] = {}
        self.moved_bytes: dict[int, int] = {}
        # The most that one micro-batch would take, whether it had room or not; and how often rooms were made larger.
        self.most_bytes: dict[int, int] = {}
        self.num_grown = 0
        # Of this iteration, what of each micro-batch moved: nothing of one that stayed.
        self.moved_each: dict[tuple[int, int], int] = {}
        self.stayed = StayedAtHome()
        # What found no room: while its eviction lasts, and while it is to be away.
        self._staying: dict[Hashable, int] = {}
        self._at_home: dict[Hashable, int] = {}

    def begin(self) -> None:
        """A new iteration."""
        self.stayed = StayedAtHome()
        self.moved_each.clear()
        self._at_home.clear()

    def first(self, stage: int, lengths: Sequence[int]) -> tuple[int, ...]:
        """What to announce of a stage whose first micro-batch has storages of these lengths."""
        self._saw(stage, lengths)
        self.moved_bytes[stage] = sum(lengths)
        self.rooms[stage] = self._room(stage) if self.differing else tuple(lengths)
        return self.rooms[stage]

    def leaves(self, stage: int, microbatch: int, lengths: Sequence[int]) -> bool:
        """Whether a micro-batch with these storages leaves now; noted as staying if not."""
        self._saw(stage, lengths)
        if taken(lengths) <= taken(self.rooms.get(stage, ())):
            self.moved_bytes[stage] = max(self.moved_bytes.get(stage, 0), sum(lengths))
            self.moved_each[stage, microbatch] = sum(lengths)
            return True
        self.moved_each[stage, microbatch] = 0
        self._staying[stage, microbatch] = sum(lengths)
        self.stayed = replace(self.stayed, microbatches=self.stayed.microbatches + 1, nbytes=self.stayed.nbytes + sum(lengths))
        return False

    def away(self, stage: int, microbatch: int) -> None:
        """A micro-batch is to be gone from now on."""
        if (stage, microbatch) in self._staying:
            self._at_home[stage, microbatch] = self._staying.pop((stage, microbatch))

    def computes(self) -> None:
        """A computation begins: what is here is here beside it."""
        self.stayed = self.stayed.with_here(self.at_home)

    @property
    def at_home(self) -> list[int]:
        """The bytes of each micro-batch that is to be away and is here."""
        return list(self._at_home.values())

    def back(self, stage: int, microbatch: int) -> None:
        """A micro-batch is to be here again."""
        self._at_home.pop((stage, microbatch), None)

    def grow(self) -> dict[int, tuple[int, ...]]:
        """Between two iterations: the rooms that have to be larger, by stage."""
        lacking = [stage for stage, room in self.rooms.items() if self.most_bytes[stage] > taken(room)]
        grown = {stage: self._room(stage) for stage in lacking}
        self.rooms |= grown
        self.num_grown += bool(grown)
        return grown

    def parts(self) -> dict[int, tuple[int, ...]]:
        """By stage, what of a micro-batch could leave in place of all that does, as storages lie: ascending, the last is all.

        From the end of the walk, as an evictor takes them. Where sizes differ nobody can say.
        """
        found = {}
        for stage, lengths in ({} if self.differing else self.rooms).items():
            sums = list(accumulate(reversed(lengths)))
            wanted = (sums[-1] * step // STEPS for step in range(1, STEPS)) if sums else ()
            found[stage] = (*sorted({next(one for one in sums if one >= least) for least in wanted} - set(sums[-1:])), *sums[-1:])
        return found

    def release(self) -> None:
        """Rooms are announced anew; what was seen stays known."""
        self.rooms.clear()
        self.moved_bytes.clear()

    def _room(self, stage: int) -> tuple[int, ...]:
        most = self.most_bytes[stage]
        return (aligned(int(most * (1 + RESERVE))),) if most else ()

    def _saw(self, stage: int, lengths: Sequence[int]) -> None:
        self.most_bytes[stage] = max(self.most_bytes.get(stage, 0), taken(lengths))


def together(several: Iterable[Sizing], passed: StayedAtHome) -> Sizing:
    """Of the evictors of one rank what they have in common: the largest rooms, and all that stayed. `passed`: at once, by all of them."""
    found = Sizing(differing=False)
    stayed = passed
    for one in several:
        found.differing = one.differing
        stayed = replace(stayed, microbatches=stayed.microbatches + one.stayed.microbatches, nbytes=stayed.nbytes + one.stayed.nbytes)
        found.moved_each |= one.moved_each
        # Once an iteration at most, whoever of them grew.
        found.num_grown = max(found.num_grown, one.num_grown)
        for sizes, others in ((found.moved_bytes, one.moved_bytes), (found.most_bytes, one.most_bytes)):
            sizes.update({stage: max(size, sizes.get(stage, 0)) for stage, size in others.items()})
        found.rooms.update({stage: max(room, found.rooms.get(stage, ()), key=taken) for stage, room in one.rooms.items()})
    found.stayed = stayed
    return found
