"""Two kernels: a copy that occupies a chosen number of compute units, and a product of matrices that fills all of them.

In: buffers or matrices of one device, and how many programs. The copy stands for a communication kernel: it is no
transfer, and says nothing of a link. The product is persistent, as fast kernels for products and attention are: as many
programs as there are units compute tile after tile, so where something else holds one unit, the last program waits for
another to end. Late devices run both by Triton's interpreter.
"""

import torch
import triton
import triton.language as tl

BLOCK = 8192
# As many threads as a communication kernel's block, so that a unit that holds one has no room left for a large
# product's block.
COPY_WARPS = 16


@triton.jit
def _copy(source, target, blocks, times, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    lane = tl.arange(0, BLOCK)
    for _ in range(times):
        for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
            place = block * BLOCK + lane
            tl.store(target + place, tl.load(source + place))


def copy(source: torch.Tensor, target: torch.Tensor, programs: int, times: int) -> None:
    """Copy all of `source`, int32, a multiple of BLOCK elements, `times` times over, on the current stream."""
    assert source.dtype == torch.int32
    assert source.numel() % BLOCK == 0
    assert source.numel() < 1 << 31, "the kernel counts in 32 bits"
    _copy[(programs,)](source, target, source.numel() // BLOCK, times, BLOCK=BLOCK, num_warps=COPY_WARPS)


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
