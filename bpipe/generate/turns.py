"""Say in which turns a rank with several chunks takes micro-batches. In: sizes of the groups, number of chunks. Out: `Turns`.

A group of micro-batches goes through the first chunk, then through the second, and so on; then the next group. Backwards go the same way
with the chunks reversed. All ranks take the same turns, so that "the k-th forward" means the same on each. Knows no ranks, no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

NONE = -1


def chunk_turns(group_sizes: Sequence[int], num_chunks: int) -> list[tuple[int, int]]:
    """(chunk, micro-batch) in the order of the forwards of every rank."""
    turns: list[tuple[int, int]] = []
    first = 0
    for size in group_sizes:
        turns += [(chunk, microbatch) for chunk in range(num_chunks) for microbatch in range(first, first + size)]
        first += size
    return turns


def groups_of(num_microbatches: int, group_size: int) -> tuple[int, ...]:
    """Groups of this size, and a smaller last one for what is left."""
    whole, left = divmod(num_microbatches, group_size)
    return (group_size,) * whole + ((left,) if left else ())


@dataclass(frozen=True, slots=True)
class Turns:
    """`forwards[k]` is the (chunk, micro-batch) of the k-th forward; the k-th backward is of chunk v - 1 - chunk and the same micro-batch.

    `before[k]`: the forward of its micro-batch through the chunk before, NONE for the first chunk. Of backwards, with the chunk behind,
    it is the same number. `own[k]`: the forward of the k-th backward's chunk and micro-batch.
    """

    num_chunks: int
    forwards: tuple[tuple[int, int], ...]
    before: tuple[int, ...]
    own: tuple[int, ...]


@lru_cache(maxsize=64)
def turns(group_sizes: tuple[int, ...], num_chunks: int) -> Turns:
    """The turns of groups of these sizes, one behind the other."""
    before: list[int] = []
    own: list[int] = []
    for size in group_sizes:
        first = len(before)
        before += [NONE] * size + [first + index for index in range((num_chunks - 1) * size)]
        own += [first + chunk * size + index for chunk in reversed(range(num_chunks)) for index in range(size)]
    return Turns(num_chunks, tuple(chunk_turns(group_sizes, num_chunks)), tuple(before), tuple(own))
