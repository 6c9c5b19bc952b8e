"""Tell the training log what balancing does, each thing once.

In: a schedule, and what an engine measured. Out: lines on standard output, from rank 0 or from the rank that knows.
Decides nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping

import torch.distributed as dist
from megatron.core import parallel_state

from bpipe.runtime.checksums import Certificate
from bpipe.runtime.engine import Engine
from bpipe.schedule.host_buffers import residencies_by_host
from bpipe.schedule.schedule import Schedule
from bpipe.transport.connect import MeasuredLink
from bpipe.transport.table import sufficiency


class FirstIterations:
    """Lines about what only a first iteration shows of what leaves, and only a second one of whether the link keeps
    up."""

    def __init__(self, minimum_bytes: int) -> None:
        self._minimum_bytes = minimum_bytes
        self._told = False
        self._judged = False
        self._last_s: float | None = None
        self._last_engine: Engine | None = None

    def ended(self, engine: Engine, rank: int, links: Mapping[int, MeasuredLink]) -> None:
        """Note that an iteration's loop is over; `links` are this rank's, by the other's place."""
        now_s = time.perf_counter()
        if not self._told and pipeline_begins_with_rank_0():
            for stage in (stage for stage, nbytes in engine.moved_bytes.items() if not nbytes):
                say(nothing_moves(stage, self._minimum_bytes), everywhere=True)
            for share in (share for share in engine.shares.values() if share.moved_bytes):
                say(share.sentence, everywhere=True)
        self._told = True
        moved = sum(engine.moved_bytes.values())
        if self._last_s is not None and moved and engine is self._last_engine and not self._judged:
            # Two iterations of one program lie behind: the time between their ends is that of an iteration.
            self._judged = True
            schedule = engine.schedule
            window_s = microbatch_s(schedule, rank, now_s - self._last_s)
            # Of several the slowest.
            speeds = {
                host.rank: links[host.rank].bytes_per_s[links[host.rank].transport]
                for host in residencies_by_host(schedule, rank)
            }
            slowest = min(speeds, key=lambda host: speeds[host])
            enough, sentence = sufficiency(rank, slowest, moved, window_s, speeds[slowest])
            say(sentence, everywhere=not enough or pipeline_begins_with_rank_0())
        self._last_s, self._last_engine = now_s, engine


def microbatch_s(schedule: Schedule, rank: int, iteration_s: float) -> float:
    """Return seconds of one micro-batch on a rank, where every slot takes equally long."""
    slots = schedule.ranks[rank]
    return iteration_s * sum(slot.compute is not None for slot in slots) / len(slots) / schedule.num_microbatches


def nothing_moves(stage: int, minimum_bytes: int) -> str:
    """Return a line for a stage whose activations were to leave, and are too small for it, or not its own."""
    return (
        f"stage {stage} moves nothing: no storage that a forward saves is both at least {minimum_bytes} bytes "
        "(--bpipe-min-bytes) and its micro-batch's alone; training as usual"
    )


def verified(certificate: Certificate, engine: Engine, rank: int) -> Iterator[str]:
    """Return a line on what was checked of a rank whose activations leave, how much of what it saved moves, and what
    stays, by the kind of node that saved it."""
    if not certificate.microbatches:
        return
    moves = "; ".join(
        f"stage {share.stage} moves {share.fraction:.2f} of what it keeps"
        + "".join(f", {nbytes / 1e6:.4g} MB {holder}" for holder, nbytes in Counter(share.staying).most_common(3))
        for share in engine.shares.values()
    )
    yield (
        f"verified {certificate.iterations} iterations: everything that rank {rank} evicted came back unchanged "
        f"({certificate.microbatches} micro-batches in {certificate.storages} storages, "
        f"{certificate.nbytes / 1e6:.4g} MB)" + (f"; {moves}" if moves else "")
    )


def pipeline_begins_with_rank_0() -> bool:
    """Return whether this rank belongs to the pipeline that speaks for all."""
    return 0 in dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())


def say(line: str, everywhere: bool = False) -> None:
    """Print one line in the training log, from rank 0 or from the rank that calls."""
    if everywhere or dist.get_rank() == 0:
        print(f"bpipe: {line}", flush=True)
