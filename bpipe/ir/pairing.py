"""Say who hosts for whom. In: what each rank holds, or a given pairing. Out: one partner a rank, checked. Knows no placement."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def mirrored(num_ranks: int) -> tuple[int, ...]:
    """Rank s and rank p-1-s: what `default_partners` are wherever ranks hold less the later they come, and what a file means by none."""
    return tuple(reversed(range(num_ranks)))


def default_partners(peaks: Sequence[int | Fraction]) -> tuple[int, ...]:
    """The heaviest rank with one of the lightest, then the next: the rank opposite, if it is of those, else the nearest.

    `peaks[rank]`: what it holds at its fullest. Of equally heavy ranks the first chooses first. The last of an odd number is its own
    partner and never transfers.
    """
    partners = list(range(len(peaks)))
    free = set(partners)
    for rank in sorted(free, key=lambda one: (-peaks[one], one)):
        others = free - {rank}
        if rank not in free or not others:
            continue
        least = min(peaks[one] for one in others)
        opposite = len(peaks) - 1 - rank
        chosen = min((one for one in others if peaks[one] == least), key=lambda one: (one != opposite, abs(one - rank), one))
        partners[rank], partners[chosen] = chosen, rank
        free -= {rank, chosen}
    return tuple(partners)


def pairing(num_ranks: int, partners: Sequence[int]) -> tuple[int, ...]:
    """The given pairing. Raises ValueError unless every rank has one partner and is its partner's."""
    if len(partners) != num_ranks:
        raise ValueError(f"{len(partners)} partners for {num_ranks} ranks: give one for each rank")
    for rank, partner in enumerate(partners):
        if not 0 <= partner < num_ranks:
            raise ValueError(f"rank {rank}: partner {partner} is not a rank, ranks are 0 to {num_ranks - 1}")
    for rank, partner in enumerate(partners):
        if partners[partner] != rank:
            raise ValueError(f"rank {rank} has partner {partner}, but rank {partner} has partner {partners[partner]}: pair them both ways")
    return tuple(partners)
