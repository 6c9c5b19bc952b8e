"""Say who hosts for whom. In: a number of ranks, or a pairing given by the user. Out: one partner a rank, checked. Knows no placement."""

from __future__ import annotations

from collections.abc import Sequence


def default_partners(num_ranks: int) -> tuple[int, ...]:
    """Rank s and rank p-1-s; the middle of an odd number is its own partner and never transfers."""
    return tuple(reversed(range(num_ranks)))


def pairing(num_ranks: int, partners: Sequence[int] | None) -> tuple[int, ...]:
    """The given pairing, or the default one. Raises ValueError unless every rank has one partner and is its partner's."""
    if partners is None:
        return default_partners(num_ranks)
    if len(partners) != num_ranks:
        raise ValueError(f"{len(partners)} partners for {num_ranks} ranks: give one for each rank")
    for rank, partner in enumerate(partners):
        if not 0 <= partner < num_ranks:
            raise ValueError(f"rank {rank}: partner {partner} is not a rank, ranks are 0 to {num_ranks - 1}")
    for rank, partner in enumerate(partners):
        if partners[partner] != rank:
            raise ValueError(f"rank {rank} has partner {partner}, but rank {partner} has partner {partners[partner]}: pair them both ways")
    return tuple(partners)
