"""Layout of host buffers in memory.

Both ends of a pair make room at the same transfers, from the same schedule and sizes, so no layout is ever sent.

A stage's size is known from its first forward on, and its micro-batches may leave before another stage has run at all.
So when a micro-batch comes for which there is no room, a further piece of memory is added, with room for every buffer
that has none yet, as far as sizes are known. A buffer that has room stays where it is, even if it is too small by now,
because it may hold something. Mostly all sizes are known by the first micro-batch, and one piece holds all.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

# Storages start on the boundary that copy engines and vector loads like best. The rest of a last block never moves.
ALIGNMENT_BYTES = 512

# By stage, the lengths in bytes of the storages that one of its micro-batches moves.
Sizes = Mapping[int, tuple[int, ...]]


def aligned(nbytes: int) -> int:
    """Round `nbytes` up to the alignment."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@functools.lru_cache(maxsize=256)
def allocated_bytes(lengths: tuple[int, ...]) -> int:
    """Return the bytes that storages of these lengths take in a host buffer.

    Cached, because every eviction asks on the main thread, and micro-batches of a stage are alike.
    """
    return sum(map(aligned, lengths))


def offsets(lengths: Iterable[int], start: int = 0) -> list[int]:
    """Return the offset of each storage of these lengths, one after another from `start`."""
    return list(itertools.accumulate(map(aligned, lengths), initial=start))[:-1]


class _Room(NamedTuple):
    """A host buffer's room: the index of the piece of memory, the first byte in it, and the length."""

    piece: int
    start: int
    nbytes: int


class BufferLayout:
    """Layout of host buffers; `stages_in_buffers` are the stages that each of them hosts.

    `pieces` are the bytes of every piece of memory, in the order in which they were needed.
    """

    def __init__(self, stages_in_buffers: Sequence[Iterable[int]]) -> None:
        self._stages_in_buffers = [tuple(stages) for stages in stages_in_buffers]
        self._rooms: dict[int, _Room] = {}
        self.pieces: list[int] = []

    @staticmethod
    def of(stages_in_buffers: Sequence[Iterable[int]], sizes: Sizes) -> BufferLayout:
        """Return a layout for known sizes: one piece, in which each buffer is as large as the largest of the stages
        it hosts."""
        layout = BufferLayout(stages_in_buffers)
        layout._add_piece(sizes)
        return layout

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(self.pieces)

    @property
    def num_buffers(self) -> int:
        """Number of host buffers for which there is memory so far."""
        return len(self._rooms)

    def make_room(self, host_buffer: int, stage: int, sizes: Sizes) -> int:
        """Make room for a micro-batch of `stage` in the buffer, which is empty.

        Return the bytes of a new piece, or 0 if there is room.
        """
        room = self._rooms.get(host_buffer)
        if allocated_bytes(sizes[stage]) <= (room.nbytes if room else 0):
            return 0
        self._rooms.pop(host_buffer, None)
        return self._add_piece(sizes)

    def _add_piece(self, sizes: Sizes) -> int:
        """Add a piece for all buffers that have no room."""
        nbytes = 0
        for number, stages in enumerate(self._stages_in_buffers):
            largest = max((allocated_bytes(sizes[stage]) for stage in stages if stage in sizes), default=0)
            if largest and number not in self._rooms:
                self._rooms[number] = _Room(len(self.pieces), nbytes, largest)
                nbytes += largest
        if nbytes:
            self.pieces.append(nbytes)
        return nbytes

    def place(self, host_buffer: int, lengths: Iterable[int]) -> tuple[int, list[int]]:
        """Return the buffer's piece, and the offset in it of each of a micro-batch's storages of these lengths."""
        room = self._rooms[host_buffer]
        return room.piece, offsets(lengths, room.start)

    def clear(self) -> None:
        """Forget all rooms, because the memory is freed."""
        self._rooms.clear()
        self.pieces.clear()
