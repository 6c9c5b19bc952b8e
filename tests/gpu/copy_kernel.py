"""A copy between two buffers of one device by a chosen number of persistent programs, which occupy that many compute
units.

In: two buffers, how many programs. It is there to occupy units and memory bandwidth as a communication kernel would; it
is no transfer and says nothing of a link. Imported only where there is a GPU: it needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 8192
# As many threads as a communication kernel's block, so that a unit that holds one has no room left for a large
# product's block.
WARPS = 16


@triton.jit
def _copy(source, target, blocks, times, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    lane = tl.arange(0, BLOCK)
    for _ in range(times):
        for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
            place = block * BLOCK + lane
            tl.store(target + place, tl.load(source + place))


def start(source: torch.Tensor, target: torch.Tensor, programs: int, times: int) -> None:
    """Copy all of `source`, int32, a multiple of BLOCK elements, `times` times over, on the current stream."""
    assert source.dtype == torch.int32
    assert source.numel() % BLOCK == 0
    assert source.numel() < 1 << 31, "the kernel counts in 32 bits"
    _copy[(programs,)](source, target, source.numel() // BLOCK, times, BLOCK=BLOCK, num_warps=WARPS)
