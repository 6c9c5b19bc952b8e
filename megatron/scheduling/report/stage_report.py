"""Lay what one rank measured beside what its schedule predicts.

In: a schedule and measurements. Out: its summary in the record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch.distributed as dist

from bpipe.ir.action import Kind
from bpipe.ir.memory import Memory
from bpipe.ir.schedule import Schedule
from bpipe.record.format import RankSummary
from bpipe.report.memory import kept_peak, own_peak, peak_of_rule
from bpipe.runtime.kept import Share
from bpipe.runtime.verifying import Certificate
from megatron.scheduling.memory.differing import Differing
from megatron.scheduling.slices.slicing import Slicing


def summary_of(
    schedule: Schedule,
    stage: int,
    *,
    peak_microbatches: int,
    peak_bytes: int,
    saved_bytes: Mapping[int, int],
    moved_bytes: Mapping[int, int],
    after_input_bytes: Mapping[int, int],
    shard_bytes: int,
    received_bytes: int,
    num_host_buffers: int,
    host_bytes: int,
    own_memory: tuple[int, int],
    shares: Mapping[int, Share],
    balanced: bool,
    pipeline: int,
    differing: Differing,
    slicing: Slicing | None,
    certificate: Certificate,
    by_slice: Memory | None,
) -> RankSummary:
    """Lay the measurement beside what the schedule says for micro-batches of this size.

    Host buffers are preallocated, so a rank holds all of them from the first HOST on: the prediction is the most its
    own micro-batches occupy in any slot, and its buffers. `received_bytes` is what of it the stage received.
    `own_memory`: the host buffers in its own node's memory and their bytes. `slicing`: what is kept of micro-batches
    that are cut. `certificate`: what was checked of what moved. `by_slice`: the rule for slices that differ in size.
    """
    # As the meter counts: a micro-batch of which less than half has left is still here.
    leaves = {
        stage: int(moved_bytes.get(stage, saved) > 0 and 2 * moved_bytes.get(stage, saved) >= saved)
        for stage, saved in saved_bytes.items()
    }
    # Evictions and loads of a stage of which nothing can move were none.
    transfers = Counter(
        action.kind for slot in schedule.ranks[stage] for action in slot.transfers if moved_bytes.get(action.stage)
    )
    return RankSummary(
        rank=dist.get_rank(),
        stage=stage,
        pipeline=pipeline,
        balanced=balanced,
        num_microbatches=schedule.num_whole_microbatches,
        peak_microbatches=peak_microbatches,
        peak_bytes=peak_bytes,
        predicted_microbatches=own_peak(schedule, stage, dict.fromkeys(saved_bytes, 1), leaves, 0, {})
        + num_host_buffers,
        predicted_bytes=host_bytes
        + (
            own_peak(schedule, stage, saved_bytes, moved_bytes, received_bytes, after_input_bytes, shard_bytes)
            if by_slice is None
            else peak_of_rule(schedule, stage, by_slice, received_bytes)
        ),
        evictions=transfers[Kind.EVICT],
        loads=transfers[Kind.LOAD],
        own_buffers=own_memory[0],
        own_bytes=own_memory[1],
        moved_fraction=min((share.fraction for share in shares.values()), default=None),
        stayed_microbatches=differing.microbatches,
        stayed_bytes=differing.nbytes,
        passed_microbatches=differing.passed_microbatches,
        passed_bytes=differing.passed_bytes,
        largest_bytes=differing.largest_bytes,
        times_grown=differing.num_grown,
        keys_bytes=0 if slicing is None else slicing.peak_kept_bytes,
        predicted_keys_bytes=0 if slicing is None else kept_peak(schedule, stage, slicing.kept_memory),
        verified_iterations=certificate.iterations,
        verified_microbatches=certificate.microbatches,
        verified_storages=certificate.storages,
        verified_bytes=certificate.nbytes,
    )
