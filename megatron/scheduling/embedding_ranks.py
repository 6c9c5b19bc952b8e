"""Refuse what a script says itself of who has embeddings, where the first stage and the last are of one rank.

In: what the script gives Megatron. Out: ValueError with the way out, or nothing. Megatron has one rank with the first stage's embedding
and another with the output layer that shares its weight, and lets these two add it up together; in a V both are of one rank, and the
other would be waited for in vain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.scheduling.positions import Positions

_WAY_OUT = "or take a schedule whose stages go round the ranks, such as --bpipe-schedule grouped-interleaved"


def refuse_ranks(positions: Positions, given: Mapping[str, Any]) -> None:
    """Raises ValueError for what is among the arguments of `pretrain`, or of Megatron's own set-up."""
    said = [name for name in ("get_embedding_ranks", "get_position_embedding_ranks") if given.get(name) is not None]
    if said and positions.folded:
        raise ValueError(
            f"{' and '.join(said)}: the script says which ranks have embeddings, but where the first stage and the last are of one rank, "
            f"as in a V, that one has them alone: leave it out, {_WAY_OUT}"
        )
    refuse_group(positions, given.get("pg_collection"))


def refuse_group(positions: Positions, groups: Any) -> None:
    """Raises ValueError where process groups of the script's own have one of several ranks for the embedding's weight."""
    group: Any = getattr(groups, "embd", None)
    # A rank outside of a group has a number in its place.
    size = group.size() if hasattr(group, "size") else 1
    if positions.folded and size > 1:
        raise ValueError(
            f"pg_collection.embd: the script lets {size} ranks add up the weight of the embedding and of the output layer, but where the "
            "first stage and the last are of one rank, as in a V, that one has both copies: make it a group of the pipeline's last rank "
            f"alone, or None (Megatron's own is, where install() comes before process groups), {_WAY_OUT}"
        )
