"""Hold what a rank measured of its memory in the first iteration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bpipe.schedule.memory import KeptMemory


@dataclass(frozen=True)
class FirstMeasured:
    """Measured memory of one rank in its first iteration: of one micro-batch by stage, of what it receives for one, and
    the peak.

    Where micro-batches are cut into slices, `saved_bytes` and `moved_bytes` are by place (`memory.by_slice`), and
    `kept` is what each stage keeps of a micro-batch. `moved_bytes`: of stages that left. `allocated_bytes`,
    `reserved_bytes`: peaks of the device's allocator until the loop's end, before weights were updated; 0 where nobody
    counts. `lent_bytes`: host buffers outside of that allocator; `peak_bytes` includes them. `parts`: what could leave
    in place of all, see `Sizing.parts`.
    """

    saved_bytes: Mapping[int, int]
    moved_bytes: Mapping[int, int]
    after_input_bytes: Mapping[int, int]
    shard_bytes: int
    received_bytes: int
    peak_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    lent_bytes: int = 0
    parts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    kept: Mapping[int, KeptMemory] = field(default_factory=dict)
