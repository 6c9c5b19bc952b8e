"""Say in front of the first of several messages what they carry.

In: tensors' types and shapes. Out: numbers, and from them the same.

What a stage makes has the same shape for every micro-batch, so one announcement is enough for all of them. Knows no
groups.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

Shapes = tuple[tuple[torch.dtype, tuple[int, ...]], ...]

# An announcement is as many whole numbers: how many tensors, and of each its type, how many dimensions it has, and
# their lengths.
ANNOUNCEMENT = 64
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


def shapes_of(tensors: Iterable[torch.Tensor]) -> Shapes:
    return tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors)


def announcement(what: object, shapes: Shapes) -> torch.Tensor:
    """Describe shapes as a tensor. Raises ValueError for more than it can hold, naming what carries it."""
    numbers = [len(shapes)]
    for dtype, shape in shapes:
        numbers += [DTYPES.index(dtype), len(shape), *shape]
    if len(numbers) > ANNOUNCEMENT:
        raise ValueError(
            f"{what} carries {len(shapes)} tensors, more than an announcement of {ANNOUNCEMENT} numbers can describe"
        )
    return torch.tensor(numbers + [0] * (ANNOUNCEMENT - len(numbers)))


def empty(shapes: Shapes, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return new, uninitialised tensors of these shapes."""
    return tuple(torch.empty(shape, dtype=dtype, device=device) for dtype, shape in shapes)


def read(numbers: torch.Tensor) -> Shapes:
    count, *rest = numbers.tolist()
    shapes = []
    for _ in range(count):
        dtype, dimensions, *rest = rest
        shapes.append((DTYPES[dtype], tuple(rest[:dimensions])))
        rest = rest[dimensions:]
    return tuple(shapes)


def check_alike(rank: int, what: object, shapes: Shapes, first: Shapes) -> None:
    """Raise ValueError where a message carries other shapes than the first of its sort."""
    if shapes != first:
        raise ValueError(
            f"rank {rank}: {what} carries {words(shapes)}, the first of its sort carried {words(first)}: "
            f"micro-batches of "
            f"differing size are not supported, pad to one length"
        )


def words(shapes: Shapes) -> str:
    return " and ".join(f"{str(dtype).removeprefix('torch.')} {list(shape)}" for dtype, shape in shapes) or "nothing"
