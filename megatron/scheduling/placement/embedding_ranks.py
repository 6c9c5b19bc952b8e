"""Let one rank have the embeddings alone, where the first stage and the last are of one rank, whatever a script says of
them.

In: a script's functions that choose ranks, its process groups, and its models. Out: functions that choose that rank, or
an error that says what differs. Megatron has one rank with the first stage's embedding and another with the output
layer that shares its weight, and lets these two add it up together; in a V both are of one rank, and the other would be
waited for in vain.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from megatron.scheduling.placement.positions import Positions

EMBEDDINGS = "get_embedding_ranks"
CHOICES = (EMBEDDINGS, "get_position_embedding_ranks")
Choose = Callable[[list[int]], list[int]]
_WAY_OUT = "or use a schedule whose stages go round the ranks, such as --bpipe-schedule grouped-interleaved"


class Refused(ValueError):
    """A script's choice of embedding ranks that cannot be kept. Every rank sees it alike."""


def last_rank(choose: Choose) -> Choose:
    """Choose Megatron's last rank in place of its own choice: that rank has the first stage and the last."""

    @functools.wraps(choose)
    def ranks(pp_ranks: list[int]) -> list[int]:
        return [pp_ranks[-1]]

    return ranks


class Script:
    """One script's choice of embedding ranks, until its models are built."""

    def __init__(self) -> None:
        # It left the output layer's copy out, which is right only where that shares no weight with the embedding.
        self._leaves_out_copy = False

    def replaced(self, name: str, choose: Choose, own: Choose) -> Choose:
        """Return the last rank alone, in place of what a script gives Megatron as `name`.

        `own` is Megatron's function of that purpose.

        Raises Refused, when it is called, for a choice that is not Megatron's own. Upstream's pretrain_gpt.py leaves
        the last stage out where no weight is tied, and a script that was written for a V may choose the last rank
        itself.
        """

        @functools.wraps(choose)
        def ranks(pp_ranks: list[int]) -> list[int]:
            said, usual, here = set(choose(pp_ranks)), set(own(pp_ranks)), [pp_ranks[-1]]
            if name == EMBEDDINGS and said == {pp_ranks[0]}:
                self._leaves_out_copy = True
            elif said not in (usual, set(here)):
                raise Refused(
                    f"{name}: in the pipeline of ranks {_listed(pp_ranks)} the script chooses {_listed(said)}, where "
                    f"Megatron's own function chooses {_listed(usual)}. In this schedule rank {here[0]} has both the "
                    f"first and the last stage and replaces Megatron's own choice, but no other: leave {name} out, "
                    f"{_WAY_OUT}"
                )
            return here

        return ranks

    def check(self, model: Any) -> None:
        """Raise Refused for a model with a copy that the script trains apart from the embedding: here they would be
        kept equal."""
        ahead = getattr(getattr(model, "config", None), "mtp_num_layers", None)
        if self._leaves_out_copy and (getattr(model, "share_embeddings_and_output_weights", False) or ahead):
            raise Refused(
                f"{EMBEDDINGS}: the script chooses only the first stage's rank, but the model has the embedding's "
                "weight in its last stage too: give the ranks of both, as Megatron's own function does, or untie "
                "them (--untie-embeddings-and-output-weights)"
            )


def refuse_group(positions: Positions, groups: Any) -> None:
    """Raise ValueError where the script's own process groups have one of several ranks for the embedding's weight.

    Only the ranks of that group see it, so it is no `Refused`.
    """
    group: Any = getattr(groups, "embd", None)
    # A rank outside of a group has a number in its place.
    size = group.size() if hasattr(group, "size") else 1
    if positions.folded and size > 1:
        raise ValueError(
            f"pg_collection.embd: the script has {size} ranks sum the gradients of the embedding and the output "
            "layer, but where one rank has both the first and the last stage, as in a V, it has both copies: make "
            "it a group of the pipeline's last rank only, or None (as Megatron's own is if install() runs before "
            f"process groups are made), {_WAY_OUT}"
        )


def _listed(ranks: Sequence[int] | set[int]) -> str:
    return ", ".join(map(str, ranks if isinstance(ranks, list) else sorted(ranks))) or "none"
