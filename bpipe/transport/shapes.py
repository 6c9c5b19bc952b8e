"""Name the types and shapes of what a message carries, and hold all of a sort to those of the first.

In: tensors. Out: shapes, or tensors.

What a stage makes has the same shape for every micro-batch, so the first tells those of all others. Knows no groups.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

Shapes = tuple[tuple[torch.dtype, tuple[int, ...]], ...]


def shapes_of(tensors: Iterable[torch.Tensor]) -> Shapes:
    return tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors)


def empty(shapes: Shapes, device: torch.device) -> tuple[torch.Tensor, ...]:
    """New tensors of these shapes, with nothing in them yet."""
    return tuple(torch.empty(shape, dtype=dtype, device=device) for dtype, shape in shapes)


def check_alike(rank: int, what: object, shapes: Shapes, first: Shapes) -> None:
    """Raises ValueError where a message carries something else than the first of its sort."""
    if shapes != first:
        raise ValueError(
            f"rank {rank}: {what} carries {words(shapes)}, but the first such message carried {words(first)}: "
            "micro-batches of different sizes are not supported here; pad them to one length"
        )


def words(shapes: Shapes) -> str:
    return " and ".join(f"{str(dtype).removeprefix('torch.')} {list(shape)}" for dtype, shape in shapes) or "nothing"
