"""Say of micro-batches that differ in size which found too little room, and add them up.

In: an engine after each iteration. Out: lines in the log, and what a report says. Decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from bpipe.runtime.engine import Engine
from bpipe.runtime.measurements import DifferingSums
from megatron.scheduling.record.log import pipeline_begins_with_rank_0, say

# So many iterations are told of one by one; all are in the report.
MOST_TOLD = 5


@dataclass
class Differing:
    """Sums over all iterations of one rank, told as they come."""

    sums: DifferingSums = field(default_factory=DifferingSums)
    _told: int = 0

    def ended(self, engine: Engine, rank: int) -> None:
        """Note that an iteration's loop is over."""
        sizing = engine.sizing
        if sizing is None or not sizing.differing:
            return
        stayed = sizing.stayed
        self.sums.add(engine)
        if stayed.microbatches and self._told < MOST_TOLD and pipeline_begins_with_rank_0():
            self._told += 1
            last = "; the report lists further ones" if self._told == MOST_TOLD else ""
            say(
                f"stage {rank}: {stayed.microbatches} micro-batches ({stayed.nbytes / 1e6:.4g} MB in all) were too "
                "large for their host buffers and stayed here; the next iteration has room for them. The bound was "
                f"exceeded by at most {stayed.passed_microbatches} "
                f"micro-batch{'es' * (stayed.passed_microbatches != 1)} ({stayed.passed_bytes / 1e6:.4g} MB){last}",
                everywhere=True,
            )
