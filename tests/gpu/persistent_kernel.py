"""A product of matrices by a persistent kernel: as many programs as there are compute units, each of which computes
tile after tile.

In: two matrices and one for their product. Programs of this size fill a unit, as those of fast kernels for products and
attention do: where something else holds one unit, the last program waits for another to end, and all take twice as
long. Imported only where there is a GPU: it needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Tiles whose operands, three steps deep, take most of a unit's shared memory (an A100 has 164 KiB, an H100 228).
ROWS, COLUMNS, DEPTH, STEPS, WARPS = 128, 256, 64, 3, 8


@triton.jit
def _multiply(
    left, right, product, rows, columns, depth, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):  # type: ignore[no-untyped-def]
    across = tl.cdiv(columns, COLUMNS)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * across, tl.num_programs(0)):
        row = tile // across * ROWS + tl.arange(0, ROWS)[:, None]
        column = tile % across * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in range(0, depth, DEPTH):
            along = start + tl.arange(0, DEPTH)
            of_left = tl.load(
                left + row * depth + along[None, :], mask=(row < rows) & (along[None, :] < depth), other=0.0
            )
            of_right = tl.load(
                right + along[:, None] * columns + column, mask=(along[:, None] < depth) & (column < columns), other=0.0
            )
            total = tl.dot(of_left, of_right, total)
        tl.store(
            product + row * columns + column, total.to(product.dtype.element_ty), mask=(row < rows) & (column < columns)
        )


def multiply(left: torch.Tensor, right: torch.Tensor, product: torch.Tensor, programs: int) -> None:
    """Compute `left @ right` into `product` by so many programs, on the current stream.

    All are contiguous matrices of one type.
    """
    (rows, depth), (_, columns) = left.shape, right.shape
    _multiply[(programs,)](
        left,
        right,
        product,
        rows,
        columns,
        depth,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        DEPTH=DEPTH,
        num_warps=WARPS,
        num_stages=STEPS,
    )
