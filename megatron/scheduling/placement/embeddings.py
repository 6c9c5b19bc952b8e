"""Embeddings if the first stage and the last are on one rank, as in a V.

Megatron has the first stage's embedding on one rank and the output layer that shares its weight on another, and these two
sum its gradients in an all-reduce. In a V one rank has both: it must be the only rank with embeddings, whatever a script
chooses, or the other would be waited for in vain. The rank fills the second copy from the first and sums their gradients
itself. Two numbers have one sum, so the bits are the same.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.utils import get_attr_wrapped_model

from megatron.scheduling.placement.positions import Positions

EMBEDDINGS = "get_embedding_ranks"
CHOICES = (EMBEDDINGS, "get_position_embedding_ranks")
Choose = Callable[[list[int]], list[int]]
_WAY_OUT = "or use a schedule whose stages go round the ranks, such as --bpipe-schedule grouped-interleaved"


class Refused(ValueError):
    """A script's choice of embedding ranks cannot be kept, which every rank finds out alike."""


class Script:
    """One script's choice of embedding ranks, until its models are built."""

    def __init__(self) -> None:
        # Whether it left the output layer's copy out, which is right only if no weight is shared.
        self._leaves_out_copy = False

    def replaced(self, name: str, choose: Choose, own: Choose) -> Choose:
        """Return a function that chooses the last rank alone, in place of what a script gives Megatron as `name`.

        `own` is Megatron's function for it. The new function raises Refused if the script's choice differs from
        Megatron's. Two others are accepted: upstream's pretrain_gpt.py leaves the last stage out if no weight is tied,
        and a script that was written for a V may choose the last rank itself.
        """

        @functools.wraps(choose)
        def ranks(pp_ranks: list[int]) -> list[int]:
            chosen, usual, last = set(choose(pp_ranks)), set(own(pp_ranks)), pp_ranks[-1]
            if name == EMBEDDINGS and chosen == {pp_ranks[0]}:
                self._leaves_out_copy = True
            elif chosen not in (usual, {last}):
                raise Refused(
                    f"{name}: in the pipeline of ranks {_listed(pp_ranks)} the script chooses {_listed(chosen)}, where "
                    f"Megatron's own function chooses {_listed(usual)}. In this schedule rank {last} has both the "
                    f"first and the last stage and replaces Megatron's own choice, but no other: leave {name} out, "
                    f"{_WAY_OUT}"
                )
            return [last]

        return ranks

    def check(self, model: Any) -> None:
        """Raise Refused for a model with a copy that the script trains separately: here both would be kept equal."""
        ahead = getattr(getattr(model, "config", None), "mtp_num_layers", None)
        if self._leaves_out_copy and (getattr(model, "share_embeddings_and_output_weights", False) or ahead):
            raise Refused(
                f"{EMBEDDINGS}: the script chooses only the first stage's rank, but the model has the embedding's "
                "weight in its last stage too: give the ranks of both, as Megatron's own function does, or untie "
                "them (--untie-embeddings-and-output-weights)"
            )


def refuse_group(positions: Positions, groups: Any) -> None:
    """Raise ValueError if the script's own process groups have one of several ranks for the embedding's weight.

    Only the ranks of that group notice, so it is no `Refused`.
    """
    group: Any = getattr(groups, "embd", None)
    # A rank outside of the group has a number in its place.
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


def fill_copy(first: torch.nn.Module, last: torch.nn.Module) -> None:
    """Copy the first chunk's weight to the last, if the two are tied and of this rank.

    Both must be new, without wrappers.
    """
    weights = _copies(first, last)
    if weights is not None:
        # Buckets of the distributed optimizer have these alone, so a rank's share is the same part of both.
        unmarked = [weight for weight in weights if not getattr(weight, "shared_embedding", False)]
        assert not unmarked, "Megatron marks both copies as shared"
        weights[1].data.copy_(weights[0].data)


def sum_gradients(first: torch.nn.Module, last: torch.nn.Module) -> None:
    """Give both copies the sum of their gradients, if they are tied, of this rank, and not frozen."""
    weights = _copies(*(get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True) for chunk in (first, last)))
    if weights is None:
        return
    gradients = [weight.main_grad if hasattr(weight, "main_grad") else weight.grad for weight in weights]
    if any(gradient is None for gradient in gradients):
        return
    gradients[0].add_(gradients[1])
    gradients[1].copy_(gradients[0])


def _copies(first: Any, last: Any) -> tuple[Any, Any] | None:
    """Return the copy of the first stage and that of the last, or of the layers that predict further tokens."""
    predicts_further = getattr(last, "mtp_process", False)
    if not first.pre_process or not (last.post_process or predicts_further):
        return None
    if not last.share_embeddings_and_output_weights and not predicts_further:
        return None
    copy = last.shared_embedding_or_output_weight()
    # An output layer in shards has none: `tied_shards`.
    return None if copy is None else (first.shared_embedding_or_output_weight(), copy)
