"""Lay host buffers out in one piece of memory. In: which stages each buffer hosts, and the sizes of what they move. Out: offsets, in bytes.

Both ends of a pair compute the same layout from the same schedule and sizes, so none is ever sent. Integers only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# Storages start on the boundary copy engines and vector loads like best; the remainder of one's last block is never moved.
ALIGNMENT_BYTES = 512


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """Where each host buffer starts, and `nbytes` of all of them. Each is as large as the largest of the stages it hosts."""

    starts: tuple[int, ...]
    nbytes: int

    @staticmethod
    def of(stages_in_buffers: Sequence[Iterable[int]], sizes: Mapping[int, Sequence[int]]) -> BufferLayout:
        lengths = [max(sum(map(aligned, sizes[stage])) for stage in stages) for stages in stages_in_buffers]
        *starts, nbytes = itertools.accumulate(lengths, initial=0)
        return BufferLayout(tuple(starts), nbytes)

    def offsets(self, host_buffer: int, lengths: Iterable[int]) -> list[int]:
        """Where each of a micro-batch's storages, of these lengths, lies in the host buffer."""
        return list(itertools.accumulate(map(aligned, lengths), initial=self.starts[host_buffer]))[:-1]
