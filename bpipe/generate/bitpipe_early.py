"""BitPipe with early forwarding: more micro-batches let in, the more the nearer a rank is to the middle. In: sizes, costs. Out: orders.

With a forward of 1 and a backward of 2, of all chunks, an iteration of 2 p micro-batches, 3 p and so on takes 3 m + 3 (p - 2) / 2 v with
two chunks for p up to 16, with three up to 10, with four up to 8: a quarter less waiting than BitPipe's. Of p up to 8 a rank holds at most
p + (min(r, p - 1 - r) + 2) / v micro-batches of its share, of more some chunks more (`_RULES`): with two chunks 9.5 of 8 ranks and 20.5 of
16, where the paper says 3 (p - 1) / 2. One unit, of p micro-batches, is BitPipe's where nothing is shorter.
Source: Wu et al., "BitPipe: Bidirectional Interleaved Pipeline Parallelism for Accelerating Large Models Training", 2024; the rules are of
our own.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from bpipe.generate.family import Asked, Family
from bpipe.generate.two_pipes import PipesRule, Weights, from_ends, layout, shortest
from bpipe.ir.action import Action
from bpipe.ir.program import Exchange


class _LetIn(NamedTuple):
    """Beyond what a rank of BitPipe holds, and a chunk for each rank to the nearer end: chunks let in at once, and where it would wait."""

    willing: int
    most: int
    forwards: Weights
    backwards: Weights


# The first is best up to 8 ranks, the second for 10, the third from 12 on. Those that hold less come first.
_RULES = (
    _LetIn(0, 2, Weights(4, 0, -10), Weights(2, 6, 13)),
    _LetIn(0, 4, Weights(2, -2, -4), Weights(16, 34, 5)),
    _LetIn(2, 8, Weights(32, 61, -22), Weights(2, -29, 3)),
)


def orders(num_ranks: int, num_microbatches: int, num_chunks: int, asked: Asked) -> Sequence[Sequence[Action]]:
    def rule(early: _LetIn) -> PipesRule:
        def holds(beyond: int, rank: int) -> int:
            return num_chunks * num_ranks + from_ends(rank, num_ranks) + beyond

        return PipesRule(
            lambda _, rank: holds(early.most, rank), early.forwards, early.backwards, lambda _, rank: holds(early.willing, rank)
        )

    bubble = Fraction(3 * (num_ranks - 2), 2 * num_chunks)
    return shortest(num_ranks, num_microbatches, num_chunks, asked.costs, [rule(early) for early in _RULES], bubble)


FAMILY = Family("bitpipe-early", layout, orders, Exchange.POSTED, min_chunks=2, max_chunks=None, fill=3, num_pipes=2)
