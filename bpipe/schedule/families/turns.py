"""Turns: in which order a rank with several chunks takes micro-batches.

A group of micro-batches goes through the first chunk, then through the second, and so on; then the next group.
Backwards go the same way with the chunks reversed. All ranks take the same turns, so that "the k-th forward" means the
same on each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from bpipe.schedule.action import Action, Kind, of_microbatch
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
        """Return what a later rank may hold then: it has begun its backwards, and is not ahead of the rank."""
        forwards = self.lengths[later]
        counts = []
        for further in range(self.lengths[rank] - forwards + 1):
            by_chunk = zip(self._by_chunk(forwards + further), self._by_chunk(further + 1)[::-1], strict=True)
            counts.append([max(0, saved - released) for saved, released in by_chunk])
        return counts

    def _by_chunk(self, number: int) -> list[int]:
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
    """Return groups of this size, and a smaller last one for the remainder."""
    whole, left = divmod(num_microbatches, group_size)
    return (group_size,) * whole + ((left,) if left else ())


@dataclass(frozen=True, slots=True)
class Turns:
    """Order in which chunks take turns.

    Attributes:
        num_chunks: Number of chunks v.
        forwards: The (chunk, micro-batch) of the k-th forward; the k-th backward is of chunk v - 1 - chunk and the same
            micro-batch or, if micro-batches are cut, of the reversed slice.
        before: Of the k-th forward, the forward of its micro-batch through the chunk before, NONE for the first chunk.
            The numbers of backwards through the next chunk are the same.
        own: The forward of the k-th backward's chunk and micro-batch.
        slices: Slices of a micro-batch; numbers are then of slices.
    """

    num_chunks: int
    forwards: tuple[tuple[int, int], ...]
    before: tuple[int, ...]
    own: tuple[int, ...]
    slices: int = 1


@lru_cache(maxsize=64)
def turns(group_sizes: tuple[int, ...], num_chunks: int, slices: int = 1) -> Turns:
    """Return the turns of groups of these sizes, in micro-batches, one after the other."""
    before: list[int] = []
    own: list[int] = []
    sizes = [size * slices for size in group_sizes]
    for size in sizes:
        first = len(before)
        before += [NONE] * size + [first + index for index in range((num_chunks - 1) * size)]
        backwards = [reversed_slice(index, slices) for index in range(size)]
        own += [first + chunk * size + index for chunk in reversed(range(num_chunks)) for index in backwards]
    return Turns(num_chunks, tuple(chunk_turns(sizes, num_chunks)), tuple(before), tuple(own), slices)


def evenly(num_microbatches: int, num_groups: int) -> tuple[int, ...]:
    """Return groups that differ by one at most, the larger ones first."""
    size, larger = divmod(num_microbatches, num_groups)
    return (size + 1,) * larger + (size,) * (num_groups - larger)


def spread(num_microbatches: int, num_groups: int) -> tuple[int, ...]:
    """Return groups that differ by one at most, with the larger ones spread over all and one of them first."""
    ends = [num_microbatches * group // num_groups for group in range(num_groups + 1)]
    return tuple(ends[group + 1] - ends[group] for group in reversed(range(num_groups)))


def tapered(num_microbatches: int, num_groups: int, share: Fraction) -> tuple[int, ...] | None:
    """Return groups that shrink evenly, the first by `share` above the mean, the last below; None if one would be
    empty."""
    step = Fraction(2, max(1, num_groups - 1)) * share
    mean = Fraction(num_microbatches, num_groups)
    sizes: list[int] = []
    end = Fraction()
    for group in range(num_groups):
        end += mean * (1 + share - group * step) if num_groups > 1 else mean
        sizes.append(round(end) - sum(sizes))
    return tuple(sizes) if min(sizes) > 0 else None


def in_slices(orders: Sequence[Sequence[Action]], slices: int) -> list[list[Action]]:
    """Turn orders of micro-batches into orders of slices: give the backwards, which stand in turn, their own numbers.

    Slice j of a micro-batch attends to the keys and values of all before it, so a stage computes a micro-batch's
    forwards from the first slice on and its backwards from the last. A family's order of micro-batches holds for slices
    with two changes: a rank runs k - 1 more forwards ahead, so that the last of k slices is through before its first
    backward, and groups are of whole micro-batches. Source: Sun et al., "Seq1F1B: Efficient Sequence-Level Pipeline
    Parallelism", 2024.
    """
    if slices == 1:
        return [list(order) for order in orders]

    return [
        [
            action if action.kind is Kind.FORWARD else of_microbatch(action, reversed_slice(action.microbatch, slices))
            for action in order
        ]
        for order in orders
    ]
