"""Lay what one rank measured beside what its schedule predicts. In: a schedule and measurements. Out: the row `rank_00000.json` holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from bpipe.ir.schedule import Schedule
from bpipe.report.memory import own_peak
from bpipe.simulate.memory import num_transfers
from megatron.scheduling.recording import pipeline_index


@dataclass(frozen=True)
class StageReport:
    """One rank's row. Bytes of activations and of the slots preallocated for the partner; transfers are per iteration."""

    rank: int
    stage: int
    pipeline: int
    balanced: bool
    num_microbatches: int
    peak_microbatches: int
    peak_bytes: int
    predicted_microbatches: int
    predicted_bytes: int
    evictions: int
    loads: int

    @staticmethod
    def of(
        schedule: Schedule,
        stage: int,
        *,
        peak_microbatches: int,
        peak_bytes: int,
        saved_bytes: Mapping[int, int],
        moved_bytes: Mapping[int, int],
        received_bytes: int,
        num_slots: int,
        host_bytes: int,
        balanced: bool,
    ) -> StageReport:
        """Lay the measurement beside what the schedule says for micro-batches of this size.

        Slots are preallocated, so a rank holds all of them from the first HOST on: the prediction is the most its own
        micro-batches occupy in any slot, and its slots. `received_bytes` is what of it the stage received.
        """
        transfers = num_transfers(schedule, stage)
        return StageReport(
            rank=dist.get_rank(),
            stage=stage,
            pipeline=pipeline_index(),
            balanced=balanced,
            num_microbatches=schedule.num_microbatches,
            peak_microbatches=peak_microbatches,
            peak_bytes=peak_bytes,
            predicted_microbatches=own_peak(schedule, stage, dict.fromkeys(saved_bytes, 1), dict.fromkeys(saved_bytes, 1), 0) + num_slots,
            predicted_bytes=own_peak(schedule, stage, saved_bytes, moved_bytes, received_bytes) + host_bytes,
            evictions=transfers.evictions,
            loads=transfers.loads,
        )
