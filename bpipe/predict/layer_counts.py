"""How many layers each stage has."""

from collections.abc import Sequence


def without_layers(layers: Sequence[int], further_stage: int | None = None) -> int | None:
    """Return the first stage without a layer that needs one: of several the first may have the embedding alone, the
    last the output layer, and another one the prediction of further tokens."""
    spared = (0, further_stage, len(layers) - 1) if len(layers) > 1 else ()
    return next((stage for stage, num in enumerate(layers) if num < (stage not in spared)), None)


def split_layers(num_layers: int, num_stages: int, allow_uneven: bool = False) -> tuple[int, ...] | None:
    """Return the layers of each stage, or None if there is no such split.

    Uneven: the remainder goes, one each, to the stages before the last, which has the output layer; early stages hold
    most micro-batches. With one or two stages more than layers the last has the output layer alone, then the first the
    embedding.
    """
    share, rest = divmod(num_layers, num_stages)
    spared = num_stages - num_layers
    if allow_uneven and num_layers and spared in (1, 2):
        return (*(0,) * (spared - 1), *(1,) * num_layers, 0)
    if not share or (rest and not allow_uneven):
        return None
    return (*(share,) * (num_stages - 1 - rest), *(share + 1,) * rest, share)
