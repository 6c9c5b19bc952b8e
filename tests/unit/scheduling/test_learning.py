"""What a device holds besides micro-batches is the same, whoever allocated its host buffers."""

from __future__ import annotations

import pytest
import torch

from megatron.scheduling.loop.measurements import FirstMeasured
from megatron.scheduling.loop.watermark import Besides
from megatron.scheduling.replanning import ProcessMemory, measure_process

GIB = 1 << 30
CUDA = torch.device("cuda")
# Weights and gradients 20 GiB, Adam's moments 10 to come; contexts and communicators 2; micro-batches 12, host buffers
# 14, 3 came and went.
STATE, MOMENTS, OUTSIDE, HELD, HOSTED, WORKING, UPDATING = (n * GIB for n in (20, 10, 2, 12, 14, 3, 1))


def seen_with(lent_bytes: int, monkeypatch: pytest.MonkeyPatch) -> ProcessMemory:
    """Return what a device with the host buffers above shows, of which so many bytes lie outside of torch's
    allocator."""
    inside = HOSTED - lent_bytes
    allocated = STATE + HELD + inside + WORKING
    updated = STATE + MOMENTS + UPDATING + inside
    reserved = max(allocated, updated)
    answers = {
        "mem_get_info": (80 * GIB - reserved - lent_bytes - OUTSIDE, 80 * GIB),
        "memory_reserved": reserved,
        "max_memory_allocated": reserved,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)
    measured = FirstMeasured({}, {}, {}, 0, 0, HELD + HOSTED, allocated, allocated, lent_bytes)
    return measure_process(
        0, measured, Besides(10 * GIB, 10 * GIB, 0, None), Besides(10 * GIB, 10 * GIB, MOMENTS, None), CUDA
    )


@pytest.mark.parametrize("lent_bytes", [0, HOSTED])
def test_lent_buffers_are_counted_once(lent_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `peer` they were somebody else's memory, and came on top of the micro-batches' peak: 37 GiB in place of
    27."""
    found = seen_with(lent_bytes, monkeypatch)
    assert (found.fixed_bytes, found.working_bytes, found.fragmentation) == (STATE + MOMENTS + OUTSIDE, WORKING, 0)
