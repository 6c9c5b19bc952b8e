"""Lay host buffers out in memory.

In: which stages each buffer hosts, and how large their micro-batches are, as far as known. Out: offsets.

Both ends of a pair make room at the same transfers, from the same schedule and sizes, so no layout is ever sent. Bytes,
integers only.

A stage's size is known from its first forward on, and what leaves may leave before another stage has run at all. So
room is made when a micro-batch comes for which there is none, in a further piece of memory, and then by what is known
also for every buffer that has none yet. One that has some stays where it is, though it may be too small by now: it may
hold something. Mostly all is known by the first one, and one piece holds all.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

# Storages start on the boundary copy engines and vector loads like best; the remainder of one's last block is never
# moved.
ALIGNMENT_BYTES = 512

# By stage, how long the storages are that one of its micro-batches moves, in bytes.
Sizes = Mapping[int, tuple[int, ...]]


def aligned(nbytes: int) -> int:
    """Round `nbytes` up to the alignment."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@functools.lru_cache(maxsize=256)
def allocated_bytes(lengths: tuple[int, ...]) -> int:
    """Return bytes that storages of these lengths take in a host buffer.

    Remembered: every eviction asks, on the main thread, and micro-batches of a stage are alike.
    """
    return sum(map(aligned, lengths))


def offsets(lengths: Iterable[int], start: int = 0) -> list[int]:
    """Return the offset of each storage of these lengths, laid one behind another from `start`."""
    return list(itertools.accumulate(map(aligned, lengths), initial=start))[:-1]


class _Room(NamedTuple):
    """A host buffer's place: the how many-th piece of memory, from which byte of it, and how much."""

    piece: int
    start: int
    nbytes: int


class BufferLayout:
    """Layout of host buffers.

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
        """Make room for a micro-batch of `stage` in the buffer.

        Return the bytes of a new piece, or 0 where there is room.
        """
        if allocated_bytes(sizes[stage]) <= self._room_bytes(host_buffer):
            return 0
        # What comes into it finds it empty.
        self._rooms.pop(host_buffer, None)
        return self._add_piece(sizes)

    def _add_piece(self, sizes: Sizes) -> int:
        """Add a piece for all buffers that have no room."""
        nbytes = 0
        for number, stages in enumerate(self._stages_in_buffers):
            most = max((allocated_bytes(sizes[stage]) for stage in stages if stage in sizes), default=0)
            if most and number not in self._rooms:
                self._rooms[number] = _Room(len(self.pieces), nbytes, most)
                nbytes += most
        if nbytes:
            self.pieces.append(nbytes)
        return nbytes

    def _room_bytes(self, host_buffer: int) -> int:
        return self._rooms[host_buffer].nbytes if host_buffer in self._rooms else 0

    def place(self, host_buffer: int, lengths: Iterable[int]) -> tuple[int, list[int]]:
        """Return the piece in which the buffer lies, and the offset in it of each of a micro-batch's storages, of
        these lengths."""
        room = self._rooms[host_buffer]
        return room.piece, offsets(lengths, room.start)

    def clear(self) -> None:
        """Forget all rooms: whoever has the memory lets it go."""
        self._rooms.clear()
        self.pieces.clear()
