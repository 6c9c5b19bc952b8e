"""Answer what a reader came for.

In: a `Comparison`. Out: sentences: what balancing bought and cost, which stage is the bottleneck.
"""

from __future__ import annotations

from bpipe.record.report.compare import Comparison, StageRow, shared_cores
from bpipe.record.report.units import bytes_text, counted, percent_text, seconds_text
from bpipe.schedule.host_buffers import num_buffers_for, num_host_memory_buffers, residencies_by_host
from bpipe.schedule.hosts import Host
from bpipe.schedule.memory import num_transfers

# A share of the pipeline time that is only what asking costs.
NOTHING = 0.0005
# The share of what a forward keeps from which on it is as good as all; `runtime.retention` says the same of a run.
ENOUGH = 0.9
# So many stages that send are told of one by one.
MOST_TOLD = 4


def answers(comparison: Comparison) -> tuple[str, ...]:
    found = (
        _balancing(comparison),
        _bottleneck(comparison),
        _hosting(comparison),
        _too_large(comparison),
        _staying(comparison),
    )
    return tuple(answer for answer in found if answer)


def bottleneck(comparison: Comparison) -> StageRow | None:
    """Return the stage nearest to its device's limit; where no limit is known, the one that holds most."""
    known = [row for row in comparison.stages if row.held_bytes is not None]
    if known and all(row.limit_bytes for row in known):
        return min(known, key=lambda row: (row.limit_bytes or 0) - (row.held_bytes or 0))
    return max(known, key=lambda row: row.held_bytes or 0, default=None)


def longest_wait(comparison: Comparison) -> StageRow | None:
    """Return the stage with the longest exposed time; None where no rank recorded it."""
    known = [row for row in comparison.stages if row.exposed_s is not None]
    return max(known, key=lambda row: row.exposed_s or 0.0, default=None)


def _bottleneck(comparison: Comparison) -> str:
    row = bottleneck(comparison)
    if row is None or row.all_measured_bytes is None or row.held_bytes is None:
        return "The memory bottleneck is not known: no rank recorded what it held."
    rank = "" if row.rank is None else f" (rank {row.rank})"
    text = f"Stage {row.stage}{rank} is the memory bottleneck: {bytes_text(row.all_measured_bytes)} of activations"
    if row.bound_bytes is not None:
        text += f" ({_beside_bound(row.all_measured_bytes - row.bound_bytes, row.bound_bytes)})"
    if row.weights_bytes is None:
        text += ", weights not recorded"
    else:
        text += f" and {bytes_text(row.weights_bytes)} of weights, gradients and optimizer state"
    if row.limit_bytes:
        free = row.limit_bytes - row.held_bytes
        text += (
            f", together {bytes_text(row.held_bytes)} of {bytes_text(row.limit_bytes)}: {bytes_text(abs(free))} "
            f"{'free' if free >= 0 else 'over'}"
        )
    return f"{text}."


def _beside_bound(over: int, bound_bytes: int) -> str:
    if not over:
        return "exactly its bound"
    return f"{bytes_text(abs(over))} {'above' if over > 0 else 'below'} its bound of {bytes_text(bound_bytes)}"


def _balancing(comparison: Comparison) -> str:
    program = comparison.measured.program
    if program.balance is None:
        return _would_buy(comparison)
    if not any(slot.transfers for row in comparison.measured.schedule.ranks for slot in row):
        sizes = f"{counted(program.num_ranks, 'stage')} and {counted(program.num_microbatches, 'micro-batch', 'es')}"
        return f"With {sizes} there was nothing to balance."
    if _moved_nothing(comparison):
        return (
            "Nothing moved: no storage of the micro-batches is as large as the smallest that moves, or other code holds "
            "them. Memory is as without balancing."
        )
    said = "; ".join(part for part in (_bought(comparison), _cost(comparison)) if part) + "."
    return said[0].upper() + said[1:]


def _moved_nothing(comparison: Comparison) -> bool:
    """Whether ranks were to evict, and none did."""
    schedule, sizes = comparison.measured.schedule, comparison.prediction.sizes
    evicting = [sizes[rank] for rank in range(schedule.num_ranks) if num_transfers(schedule, rank).evictions]
    return bool(evicting) and all(size is not None and not any(size.moved_bytes.values()) for size in evicting)


def _hosting(comparison: Comparison) -> str:
    """Who hosts for whom, how much, and why. Empty where nobody does."""
    schedule = comparison.measured.schedule
    if _moved_nothing(comparison):
        return ""
    senders = [rank for rank in range(schedule.num_ranks) if num_transfers(schedule, rank).evictions]
    told = [
        text
        for rank in senders[:MOST_TOLD]
        for text in (
            *(_where(comparison, rank, host) for host in residencies_by_host(schedule, rank)),
            *_limits(comparison, rank),
        )
    ]
    if len(senders) > MOST_TOLD:
        told.append(f"The same holds for {counted(len(senders) - MOST_TOLD, 'more stage')}")
    return f"{'. '.join(told)}." if told else ""


def _limits(comparison: Comparison, rank: int) -> list[str]:
    """What one stage that sends would hold without that, and what it may hold."""
    schedule, row = comparison.measured.schedule, comparison.stages[rank]
    how = comparison.measured.program.balance
    limits = []
    if row.unbalanced_bytes is not None:
        limits.append(f"would hold {bytes_text(row.unbalanced_bytes)} without balancing")
    if how is not None and how.activation_budget is not None:
        limits.append(f"has room for {bytes_text(how.activation_budget.room_bytes[rank])}")
    elif schedule.bounds is not None:
        limits.append(f"may hold at most {counted(schedule.bounds[rank], 'micro-batch', 'es')}")
    return [f"Stage {rank} {' and '.join(limits)}"] if limits else []


def _where(comparison: Comparison, rank: int, host: Host) -> str:
    """Return how much of one stage is with another, or in a node's memory."""
    schedule, sizes = comparison.measured.schedule, comparison.prediction.sizes[host.rank]
    count = len(residencies_by_host(schedule, rank)[host])
    own = schedule.num_microbatches * len(schedule.layout.stages_of(rank)) // schedule.layout.num_pipes
    if not host.on_device:
        in_all = "" if sizes is None else f" of {bytes_text(sizes.own_bytes)} in all"
        places = counted(num_host_memory_buffers(schedule, rank), "host buffer")
        return (
            f"Stage {rank} keeps {count} of its {own} micro-batches in its own node's CPU memory, in {places}{in_all}"
        )
    where = f"Stage {host.rank} hosts {count} of {own} micro-batches of stage {rank}"
    if sizes is None:
        return where
    if not sizes.host_bytes:
        return f"Stage {rank} keeps {count} of its {own} micro-batches in its own CPU memory"
    buffers = num_buffers_for(schedule, host.rank)
    others = "" if len(buffers) == 1 else ", including those for other stages"
    return f"{where} in {counted(buffers[rank], 'host buffer')} of {bytes_text(sizes.host_bytes)} in all{others}"


def _too_large(comparison: Comparison) -> str:
    """Where micro-batches differ in size. Empty where every one that was to leave did."""
    parts = [
        (timeline.iteration, place, lane.source)
        for timeline in comparison.measured.shown
        for place, lane in enumerate(timeline.lanes)
        if lane
    ]
    stayed = [(number, place, one) for number, place, one in parts if one.stayed_microbatches]
    if not stayed:
        return ""
    number, place, most = max(stayed, key=lambda each: each[2].passed_bytes)
    return (
        f"Micro-batches differ in size: {sum(one.stayed_microbatches for _, _, one in stayed)} were too large for "
        f"their host buffers and were not evicted; the bound was exceeded by at most {bytes_text(most.passed_bytes)}, "
        f"on stage {place} in iteration {number}. The prediction assumes that each is as large as the largest."
    )


def _staying(comparison: Comparison) -> str:
    """Empty where nearly all of a micro-batch leaves with it, or nothing was to."""
    little = {
        row.stage: row.moved_fraction
        for row in comparison.stages
        if row.moved_fraction is not None and row.moved_fraction < ENOUGH
    }
    if not little:
        return ""
    stages = ", ".join(f"stage {stage} {percent_text(fraction)}" for stage, fraction in little.items())
    return (
        f"Less memory is freed than possible: an eviction moves only a part of what a forward keeps for its backward "
        f"({stages}). The run's log names what holds the rest."
    )


def _cost(comparison: Comparison) -> str:
    worst = longest_wait(comparison)
    if worst is None or worst.exposed_s is None:
        return "what balancing cost was not recorded"
    shared = shared_cores(comparison)
    if shared is not None:
        return f"the time it cost cannot be measured here: {shared}, so transfers take time from computations"
    pipeline_s = comparison.totals.pipeline_s
    share = worst.exposed_s / pipeline_s if pipeline_s else 0.0
    if share < NOTHING:
        return "balancing cost no time: no transfer time was exposed"
    return (
        f"balancing cost {percent_text(share)} of an iteration's pipeline time: stage {worst.stage} had "
        f"{seconds_text(worst.exposed_s)} of exposed transfer time in {seconds_text(pipeline_s)}"
    )


def _bought(comparison: Comparison) -> str:
    """Empty where nobody recorded it."""
    before = [row.unbalanced_bytes for row in comparison.stages if row.unbalanced_bytes is not None]
    after = [row.all_measured_bytes for row in comparison.stages if row.all_measured_bytes is not None]
    if not before or not after:
        return ""
    most, least = max(before), max(after)
    change = f"{percent_text(abs(1 - least / most))} {'less' if least <= most else 'more'}"
    return (
        f"with balancing the fullest stage holds {bytes_text(least)} of activations instead of {bytes_text(most)}, "
        f"{change}"
    )


def _would_buy(comparison: Comparison) -> str:
    after = comparison.prediction.balanced_bytes
    before = [row.all_measured_bytes for row in comparison.stages if row.all_measured_bytes is not None]
    if after is None or not before:
        return "Balancing was off."
    if not after:
        return (
            f"Balancing was off, and with {counted(comparison.measured.program.num_ranks, 'stage')} there is "
            f"nothing to balance."
        )
    return (
        f"Balancing was off: with --bpipe the fullest stage would hold about {bytes_text(max(after))} of activations "
        f"instead of "
        f"{bytes_text(max(before))}."
    )
