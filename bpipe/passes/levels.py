"""Level memory over all ranks, in bytes. In: a compute-only Schedule, what each rank holds beside activations, sizes. Out: bounds.

Ranks weigh differently: embedding on the first, output layer and logits on the last, uneven layers. For every pair the smallest level is
searched that fixed bytes plus balanced activations of both ranks can keep; the heaviest pair's level is that of the whole pipeline. Where
layers are given, only some layers of a micro-batch may move, which levels finer than a whole micro-batch. Knows no tensors, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bpipe.ir.memory import Memory, live_bytes
from bpipe.ir.schedule import Schedule
from bpipe.passes.balance import choose_partners, pairs_of, share


@dataclass(frozen=True, slots=True)
class Levels:
    """`bound_bytes[rank]` for `balance_bytes`, with `memory`: what moves. `level_bytes[rank]` is what the rank then holds in all."""

    bound_bytes: tuple[int, ...]
    memory: Memory
    level_bytes: tuple[int, ...]


def level_bytes(
    schedule: Schedule,
    fixed_bytes: Sequence[int],
    memory: Memory,
    num_layers: Sequence[int] | None = None,
    partners: Sequence[int] | None = None,
) -> Levels:
    """Bounds that level the bytes of every pair as far as moving micro-batches can.

    `fixed_bytes[rank]`: weights, gradients, optimizer. `memory`: activations of one micro-batch of each stage. With `num_layers[stage]` a
    transfer may move any whole number of a stage's layers, taken to be of equal size.
    """
    chosen = choose_partners(schedule, partners)
    _check_input(schedule, fixed_bytes, memory, num_layers)
    bounds, levels, sizes = [0] * schedule.num_ranks, [0] * schedule.num_ranks, list(memory.stages)
    for pair in pairs_of(chosen):
        stages = sorted({stage for rank in pair for stage in schedule.layout.stages_of(rank)})
        best, peaks = _best(schedule, pair, fixed_bytes, _shares(memory, num_layers, stages))
        for rank, peak in zip(pair, peaks, strict=True):
            bounds[rank], levels[rank] = peak, fixed_bytes[rank] + peak
        for stage in stages:
            sizes[stage] = best.stages[stage]
    return Levels(tuple(bounds), replace(memory, stages=tuple(sizes)), tuple(levels))


def _best(
    schedule: Schedule, pair: tuple[int, int], fixed_bytes: Sequence[int], shares: Sequence[Memory]
) -> tuple[Memory, tuple[int, ...]]:
    """The sizes of a transfer, and the peaks with them, that give the lowest level; of equal ones those that move least at a time."""
    best: tuple[tuple[int, int], Memory, tuple[int, ...]] | None = None
    for memory in shares:
        peaks = _level_pair(schedule, pair, fixed_bytes, memory)
        level = max(fixed_bytes[rank] + peak for rank, peak in zip(pair, peaks, strict=True))
        rating = (level, sum(size.moved_bytes for size in memory.stages))
        if best is None or rating < best[0]:
            best = (rating, memory, peaks)
    assert best is not None, "there is at least one share to try"
    return best[1:]


def _check_input(schedule: Schedule, fixed_bytes: Sequence[int], memory: Memory, num_layers: Sequence[int] | None) -> None:
    if len(fixed_bytes) != schedule.num_ranks:
        raise ValueError(f"fixed_bytes has {len(fixed_bytes)} entries, the schedule needs {schedule.num_ranks}")
    memory.check(schedule.num_stages)
    if num_layers is not None and (len(num_layers) != schedule.num_stages or min(num_layers) < 1):
        raise ValueError(f"num_layers {tuple(num_layers)} must give each of the {schedule.num_stages} stages at least one layer")


def _shares(memory: Memory, num_layers: Sequence[int] | None, stages: Sequence[int]) -> list[Memory]:
    """What a transfer may move, to try: as much as it can, or that of every number of layers of the pair's stages."""
    if num_layers is None:
        return [memory]
    most = max(num_layers[stage] for stage in stages)
    return [
        replace(
            memory,
            stages=tuple(
                replace(size, moved_bytes=size.moved_bytes * min(moving, layers) // layers)
                for size, layers in zip(memory.stages, num_layers, strict=True)
            ),
        )
        for moving in range(most, 0, -1)
    ]


def _level_pair(schedule: Schedule, pair: tuple[int, int], fixed_bytes: Sequence[int], memory: Memory) -> tuple[int, ...]:
    """The two ranks' peaks at the smallest level both can keep. They reach their own peaks without transfers, so there is one."""
    peaks = tuple(max(live_bytes(schedule, rank, memory)) for rank in pair)
    fixed = [fixed_bytes[rank] for rank in pair]
    low, high = min(fixed), max(own + peak for own, peak in zip(fixed, peaks, strict=True))
    while high - low > 1 and pair[0] != pair[1]:
        middle = (low + high) // 2
        outcome = share(schedule, pair, [max(0, middle - own) for own in fixed], memory)
        if outcome.refusal is None:
            peaks = outcome.peaks
            high = max(own + peak for own, peak in zip(fixed, peaks, strict=True))
        else:
            low = middle
    return peaks
