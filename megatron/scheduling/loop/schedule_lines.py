"""Lines for the training log about a schedule: what it moves, or why it moves nothing, and what was chosen.

In the log a rank of the schedule is called a stage, by its position. Imports no torch and no Megatron.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import groupby

from bpipe.balance.pairs import allocated_counts, balance
from bpipe.build import ScheduleConfig, choice_for_bound
from bpipe.record.report.memory import without_transfers
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.families.family import ALIKE, UnitCosts
from bpipe.schedule.families.timing import iteration_time
from bpipe.schedule.host_buffers import num_buffers_for, num_host_memory_buffers, residencies_by_host
from bpipe.schedule.hosts import Host
from bpipe.schedule.memory import moves_anything, peak_counts, plain
from bpipe.schedule.schedule import Schedule


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
    fullest = f"{plain(max(peaks))} micro-batches{' of a chunk' * (schedule.num_chunks > 1)}"
    if min(peaks) == max(peaks):
        return f"every stage holds {fullest}, so there is nothing to share"
    # A bound may have been given that is higher than what pairs can keep.
    if max(balance(without_transfers(schedule)).bounds or ()) < max(peaks):
        return "no stage holds more than its bound"
    return f"pairing stages cannot get all of them below the {fullest} that the fullest stage holds alone"


def grouped(program: ScheduleConfig, schedule: Schedule) -> list[str]:
    """Return lines about an order that was chosen for a bound, or about the default groups.

    Peaks and bounds are in micro-batches of a chunk. The bubble is that of the costs that the choice assumed; shards have
    none, so no bubble is given.
    """
    family = None if program.written is not None else FAMILIES[program.schedule]
    if family is None or family.within is None or program.group_size is not None:
        return []
    choice = choice_for_bound(program)
    if choice is None:
        usual = min(family.usual_group(program.num_ranks), program.num_microbatches)
        return [
            f"{schedule.name}: groups of {usual} micro-batches (the default); --bpipe with --bpipe-bound N chooses "
            "them for the bound"
        ]
    assert program.limit is not None
    groups = ", ".join(f"{len(list(same))} of {size}" for size, same in groupby(choice.groups))
    bubble = ""
    if not schedule.layout.shard_kinds:
        bubble = f", bubble {float(iteration_time(schedule, program.costs).bubble_percent):.1f} %"
    return [
        f"{schedule.name}, chosen for a bound of {program.limit.bound} micro-batches of a chunk{_at(program.costs)}: "
        f"groups: {groups}; {choice.rule}; {_held(schedule)}{bubble}"
    ]


def _at(costs: UnitCosts) -> str:
    if costs == ALIKE:
        return ""
    hop = f" and a hop of {_number(costs.hop)}" if costs.hop else ""
    return f" at costs of {','.join(map(_number, (costs.forward, costs.backward_input, costs.backward_weight)))}{hop}"


def _number(cost: int | Fraction) -> str:
    return f"{float(cost):g}"


def _held(schedule: Schedule) -> str:
    """Return the most that any rank holds. Host buffers stay, even if the rank is full at another time."""
    held, occupied = max(peak_counts(schedule)), max(allocated_counts(schedule))
    buffers = f" ({plain(occupied)} with host buffers, which stay)" if occupied > held else ""
    return f"at most {plain(held)} held{buffers}"
