"""Say in which turns a rank with several chunks takes micro-batches.

In: sizes of the groups, number of chunks. Out: `Turns`.

A group of micro-batches goes through the first chunk, then through the second, and so on; then the next group.
Backwards go the same way with the chunks reversed. All ranks take the same turns, so that "the k-th forward" means the
same on each. Knows no ranks, no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from bpipe.schedule.layout import reversed_slice

NONE = -1


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Warm-up lengths: rank r computes at least `lengths[r]` forwards before its first backward, in whole groups of
    `group_size`.

    Backwards then alternate with further forwards, one by one.
    """

    lengths: tuple[int, ...]
    group_size: int
    num_chunks: int

    def at_first_backward(self, rank: int) -> list[int]:
        """Return how many micro-batches of each chunk the rank holds at its first backward."""
        return self._by_chunk(self.lengths[rank])

    def meanwhile(self, rank: int, later: int) -> list[list[int]]:
        """Return what a later rank may hold at that time: it has begun its backwards, and no forward is further than
        on the rank before."""
        mine = self.lengths[later]
        found = []
        for further in range(self.lengths[rank] - mine + 1):
            back = self._by_chunk(further + 1)[::-1]
            found.append([max(0, one - gone) for one, gone in zip(self._by_chunk(mine + further), back, strict=True)])
        return found

    def _by_chunk(self, number: int) -> list[int]:
        """Of so many computations in turn."""
        rounds, left = divmod(number, self.num_chunks * self.group_size)
        return [
            rounds * self.group_size + min(self.group_size, max(0, left - chunk * self.group_size))
            for chunk in range(self.num_chunks)
        ]


def warm_up(lengths: Sequence[int], num_microbatches: int, num_chunks: int, group_size: int) -> WarmUp:
    """Return the warm-up, no longer than whole groups are."""
    whole = num_chunks * (num_microbatches - num_microbatches % group_size)
    return WarmUp(tuple(min(whole, length) for length in lengths), group_size, num_chunks)


def chunk_turns(group_sizes: Sequence[int], num_chunks: int) -> list[tuple[int, int]]:
    """Return (chunk, micro-batch) in the order of every rank's forwards."""
    turns: list[tuple[int, int]] = []
    first = 0
    for size in group_sizes:
        turns += [(chunk, microbatch) for chunk in range(num_chunks) for microbatch in range(first, first + size)]
        first += size
    return turns


def groups_of(num_microbatches: int, group_size: int) -> tuple[int, ...]:
    """Return the groups of this size, and a smaller last one for what is left."""
    whole, left = divmod(num_microbatches, group_size)
    return (group_size,) * whole + ((left,) if left else ())


@dataclass(frozen=True, slots=True)
class Turns:
    """Order in which chunks take turns.

    `forwards[k]` is the (chunk, micro-batch) of the k-th forward; the k-th backward is of chunk v - 1 - chunk and the
    same micro-batch.

    Of micro-batches cut into `slices` the numbers are those of slices, and the k-th backward is that of the reversed
    one.

    `before[k]`: the forward of its micro-batch through the chunk before, NONE for the first chunk. Of backwards, with
    the chunk behind, it is the same number. `own[k]`: the forward of the k-th backward's chunk and micro-batch.
    """

    num_chunks: int
    forwards: tuple[tuple[int, int], ...]
    before: tuple[int, ...]
    own: tuple[int, ...]
    slices: int = 1


@lru_cache(maxsize=64)
def turns(group_sizes: tuple[int, ...], num_chunks: int, slices: int = 1) -> Turns:
    """Return the turns of groups of these sizes, one behind the other; sizes are of micro-batches."""
    before: list[int] = []
    own: list[int] = []
    sizes = [size * slices for size in group_sizes]
    for size in sizes:
        first = len(before)
        before += [NONE] * size + [first + index for index in range((num_chunks - 1) * size)]
        reversed_ones = [reversed_slice(index, slices) for index in range(size)]
        own += [first + chunk * size + index for chunk in reversed(range(num_chunks)) for index in reversed_ones]
    return Turns(num_chunks, tuple(chunk_turns(sizes, num_chunks)), tuple(before), tuple(own), slices)


def evenly(num_microbatches: int, num_groups: int) -> tuple[int, ...]:
    """Return the groups that differ by one at most, the larger ones first."""
    size, larger = divmod(num_microbatches, num_groups)
    return (size + 1,) * larger + (size,) * (num_groups - larger)


def spread(num_microbatches: int, num_groups: int) -> tuple[int, ...]:
    """Split micro-batches evenly into groups, with the larger groups spread over all, one of them first."""
    ends = [num_microbatches * group // num_groups for group in range(num_groups + 1)]
    return tuple(ends[group + 1] - ends[group] for group in reversed(range(num_groups)))


def tapered(num_microbatches: int, num_groups: int, share: Fraction) -> tuple[int, ...] | None:
    """Return the groups that shrink evenly: the first is `share` of the mean above it, the last as much below.

    None where a group would be empty.
    """
    step = Fraction(2, max(1, num_groups - 1)) * share
    mean = Fraction(num_microbatches, num_groups)
    sizes: list[int] = []
    end = Fraction()
    for group in range(num_groups):
        end += mean * (1 + share - group * step) if num_groups > 1 else mean
        sizes.append(round(end) - sum(sizes))
    return tuple(sizes) if min(sizes) > 0 else None
