"""How many layers each stage has."""

from __future__ import annotations

from collections.abc import Sequence


def without_layers(layers: Sequence[int]) -> int | None:
    """Return the first stage without a layer that needs one: of several the first may have the embedding alone, the
    last the output layer."""
    ends = (0, len(layers) - 1) if len(layers) > 1 else ()
    return next((stage for stage, num in enumerate(layers) if num < (stage not in ends)), None)


def split_layers(num_layers: int, num_stages: int, allow_uneven: bool = False) -> tuple[int, ...] | None:
    """Return the layers of each stage, or None where there is no such split.

    Uneven: what does not divide goes, one each, to the stages before the last.

    The last has the output layer besides, and early stages hold most micro-batches: so the first is the next to be
    spared. Where there is a stage or two more than layers, the last has the output layer alone, then the first the
    embedding.
    """
    share, rest = divmod(num_layers, num_stages)
    spared = num_stages - num_layers
    if allow_uneven and num_layers and spared in (1, 2):
        return (*(0,) * (spared - 1), *(1,) * num_layers, 0)
    if not share or (rest and not allow_uneven):
        return None
    return (*(share,) * (num_stages - 1 - rest), *(share + 1,) * rest, share)


def redistribute_layers(num_layers: int, num_stages: int, output_in_layers: float) -> tuple[int, ...] | None:
    """Give the last stage fewer layers, as its output layer takes as long as so many, and the others equal shares.

    Of all numbers that are as fast, take the most for the last. None where the others would not have one layer each.
    """
    others = num_stages - 1
    if others < 1 or num_layers < others:
        return None
    last = min(
        range(num_layers - others, -1, -1),
        key=lambda number: max(-(-(num_layers - number) // others), number + output_in_layers),
    )
    share, rest = divmod(num_layers - last, others)
    return (*(share,) * (others - rest), *(share + 1,) * rest, last)


def padded_vocabulary(vocabulary: int, divisible_by: int, tensor: int) -> int:
    """Return the vocabulary size as Megatron pads it (`--make-vocab-size-divisible-by`)."""
    multiple = divisible_by * tensor
    return -(-vocabulary // multiple) * multiple


def output_in_layers(vocabulary: int, hidden_size: int, sequence: int) -> float:
    """Return how many layers take as long as the output layer: per token a layer has 24 h^2 + 4 s h FLOPs forward, the
    output layer 2 V h.

    Source: Yeung et al., "Balancing Pipeline Parallelism with Vocabulary Parallelism", 2024; a layer of GPT's, whose
    MLP is 4 h wide.
    """
    return 2 * vocabulary / (24 * hidden_size + 4 * sequence)
