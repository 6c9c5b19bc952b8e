"""Lines for the training log about what balancing does, each printed once, by rank 0 or by the rank that knows.

In the log a rank of the schedule is called a stage, by its position.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch.distributed as dist
from megatron.core import parallel_state

from bpipe.balance.pairs import allocated_counts, balance
from bpipe.record.report.memory import without_transfers
from bpipe.runtime.checksums import Certificate
from bpipe.runtime.engine import Engine
from bpipe.runtime.run_record import DifferingSums
from bpipe.schedule.host_buffers import num_buffers_for, num_host_memory_buffers, residencies_by_host
from bpipe.schedule.hosts import Host
from bpipe.schedule.memory import moves_anything, peak_counts
from bpipe.schedule.schedule import Schedule
from bpipe.simulate.cost import steady_bytes_per_s
from bpipe.transport.connect import MeasuredLink

# The log reports this many iterations whose micro-batches found too little room; the report has all.
MOST_TOLD = 5


class FirstIterations:
    """Lines about what moves, after the first iteration, and about whether the link keeps up, after the second."""

    def __init__(self, minimum_bytes: int) -> None:
        self._minimum_bytes = minimum_bytes
        self._told = False
        self._judged = False
        self._last_s: float | None = None
        self._last_engine: Engine | None = None

    def ended(self, engine: Engine, rank: int, links: Mapping[int, MeasuredLink]) -> None:
        """Note that an iteration's loop is over; `links` are this rank's, by the position of the other."""
        now_s = time.perf_counter()
        if not self._told and pipeline_begins_with_rank_0():
            for stage in (stage for stage, nbytes in engine.moved_bytes.items() if not nbytes):
                line = (
                    f"stage {stage} moves nothing: no storage that a forward saves is both at least "
                    f"{self._minimum_bytes} bytes (--bpipe-min-bytes) and its micro-batch's alone; training as usual"
                )
                say(line, everywhere=True)
            for share in (share for share in engine.shares.values() if share.moved_bytes):
                say(share.sentence, everywhere=True)
        self._told = True
        moved = sum(engine.moved_bytes.values())
        if self._last_s is not None and moved and engine is self._last_engine and not self._judged:
            # Two iterations of one program are over: the time between their ends is that of an iteration.
            self._judged = True
            schedule = engine.schedule
            slots = schedule.ranks[rank]
            # Of one micro-batch, if every slot takes equally long.
            busy = sum(slot.compute is not None for slot in slots) / len(slots)
            window_s = (now_s - self._last_s) * busy / schedule.num_microbatches
            speeds = {
                host.rank: links[host.rank].bytes_per_s[links[host.rank].transport]
                for host in residencies_by_host(schedule, rank)
            }
            slowest = min(speeds, key=lambda host: speeds[host])
            enough, sentence = sufficiency(rank, slowest, moved, window_s, speeds[slowest])
            say(sentence, everywhere=not enough or pipeline_begins_with_rank_0())
        self._last_s, self._last_engine = now_s, engine


@dataclass
class Differing:
    """Sums over all iterations of one rank whose micro-batches differ in size, and lines about the first of them."""

    sums: DifferingSums = field(default_factory=DifferingSums)
    _num_told: int = 0

    def ended(self, engine: Engine, rank: int) -> None:
        """Note that an iteration's loop is over."""
        stayed = self.sums.add(engine)
        if stayed.microbatches and self._num_told < MOST_TOLD and pipeline_begins_with_rank_0():
            self._num_told += 1
            last = "; the report lists further ones" if self._num_told == MOST_TOLD else ""
            say(
                f"stage {rank}: {stayed.microbatches} micro-batches ({stayed.nbytes / 1e6:.4g} MB in all) were too "
                "large for their host buffers and stayed here; the next iteration has room for them. The bound was "
                f"exceeded by at most {stayed.passed_microbatches} "
                f"micro-batch{'es' * (stayed.passed_microbatches != 1)} ({stayed.passed_bytes / 1e6:.4g} MB){last}",
                everywhere=True,
            )


def verified(certificate: Certificate, engine: Engine, rank: int) -> Iterator[str]:
    """Return a line on what was checked of a rank whose activations leave: how much of what it saved moves, and what
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
    """Whether this rank belongs to the pipeline that speaks for all."""
    return 0 in dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())


def say(line: str, everywhere: bool = False) -> None:
    """Print one line in the training log, from rank 0 or from every rank that calls."""
    if everywhere or dist.get_rank() == 0:
        print(f"bpipe: {line}", flush=True)


def describe(schedule: Schedule) -> str:
    """Return one line: what balancing does, or why it does nothing."""
    p, m = schedule.num_ranks, schedule.num_microbatches
    if not moves_anything(schedule):
        return (
            f"{schedule.name}, {p} stage{'s' * (p > 1)}, {m} micro-batches: {why_nothing_moves(schedule)}; "
            f"training as usual"
        )
    pairs = ", ".join(
        f"{s} -> {host.rank if host.on_device else 'its own memory'} "
        f"({len(stays)} of {m}, {_num_buffers(schedule, host, s)} host buffers)"
        for s in range(p)
        for host, stays in residencies_by_host(schedule, s).items()
    )
    return f"{schedule.name}, {p} stages, {m} micro-batches: {_held(schedule)}; evicting {pairs}"


def _num_buffers(schedule: Schedule, host: Host, rank: int) -> int:
    return num_buffers_for(schedule, host.rank)[rank] if host.on_device else num_host_memory_buffers(schedule, rank)


def why_nothing_moves(schedule: Schedule) -> str:
    """Return why a balanced schedule without transfers has nothing to move."""
    if schedule.num_ranks == 1:
        return "a single stage has no other to share with"
    peaks = peak_counts(schedule)
    fullest = f"{max(peaks)} micro-batches{' of a chunk' * (schedule.num_chunks > 1)}"
    if min(peaks) == max(peaks):
        return f"every stage holds {fullest}, so there is nothing to share"
    # A bound may have been given that is higher than what pairs can keep.
    if max(balance(without_transfers(schedule)).bounds or ()) < max(peaks):
        return "no stage holds more than its bound"
    return f"pairing stages cannot get all of them below the {fullest} that the fullest stage holds alone"


def _held(schedule: Schedule) -> str:
    """Return the most that any rank holds. Host buffers stay, even if the rank is full at another time."""
    peak, occupied = max(peak_counts(schedule)), max(allocated_counts(schedule))
    buffers = f" ({occupied} with host buffers, which stay)" if occupied > peak else ""
    return f"at most {peak} held{buffers}"


def sufficiency(stage: int, partner: int, moved_bytes: int, window_s: float, bytes_per_s: float) -> tuple[bool, str]:
    """Return whether a link keeps up, and a sentence on that.

    `window_s`: one micro-batch's forward and backward, all chunks.
    """
    # A backward takes about twice as long as a forward.
    needed = steady_bytes_per_s(moved_bytes, window_s / 3)
    enough = needed <= bytes_per_s
    own = stage == partner
    verdict = (
        "NOT enough: transfers will delay the computation. "
        f"{'Evict less' if own else 'Put the pair on one node, or evict less'}"
    )
    where = "its node's memory" if own else f"stage {partner}"
    return enough, (
        f"stage {stage} moves {moved_bytes / 1e6:.4g} MB to {where} and back while a micro-batch computes, about "
        f"{1e3 * window_s:.3g} ms: {needed / 1e9:.3g} GB/s of the link's {bytes_per_s / 1e9:.3g} GB/s, "
        f"{'enough' if enough else verdict}"
    )
