"""What a forward saves for its backward, and what ranks hold of micro-batches, their own and hosted ones.

With kernels `gpu` a layer is that of Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer
Models", table 2), extended by GQA, SwiGLU, flash attention and missing sequence parallelism. With kernels `cpu` it is
what Megatron's local layers keep without a GPU, where nothing is fused: exact to the byte on the first tensor-parallel
rank.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import gt, mul
from typing import Any

from bpipe.balance.pairs import allocated_bytes
from bpipe.build import ScheduleConfig, orders_of, unchecked
from bpipe.predict.layer_variants import LayerKind
from bpipe.predict.layers.attention import core_bytes
from bpipe.predict.layers.ends import embedding_saved, final_norm_saved, last_saved
from bpipe.predict.layers.layer import layer_after_input, layer_bytes, saved_within
from bpipe.predict.layout import EVENLY, Setup
from bpipe.predict.recompute import NO_RECOMPUTATION, LayerScope
from bpipe.predict.sizes import Saved, sent_bytes, total
from bpipe.predict.slices import kept_memory, slice_setups
from bpipe.predict.training import traced_sizes
from bpipe.schedule.action import SHARDS, Action, Kind
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.host_buffers import host_buffers, num_buffers_for, stages_in_buffers
from bpipe.schedule.hosts import ALL, HOST
from bpipe.schedule.memory import RESERVE, Memory, StageMemory, peak_of_order
from bpipe.schedule.schedule import Schedule

# Parts of a layer that are recomputed before the backward of its attention; of norms one is.
_BEHIND_ATTENTION = frozenset(("mlp", "layernorm", "moe_act", "moe", "shared_experts"))


def stage_saved(setup: Setup, stage: int) -> tuple[Saved, ...]:
    """Return what a forward of one micro-batch saves on a stage."""
    layers = setup.stage_layers[stage]
    rows = [
        Saved(name, nbytes, num * number)
        for kind, scope, number in layers
        for name, nbytes, num in saved_within(setup, kind, scope)
    ]
    if stage == 0:
        rows += embedding_saved(setup)
    if stage == setup.norm_stage:
        rows += final_norm_saved(setup)
    if stage == setup.num_stages - 1:
        rows += last_saved(setup)
    return tuple(rows)


def stage_bytes(setup: Setup) -> tuple[int, ...]:
    """Return bytes saved of one micro-batch by every stage, as traced or by formula."""
    traced = traced_sizes(setup)
    if traced is not None:
        return traced.saved_bytes
    saved = layers_bytes(setup)
    saved[0] += total(embedding_saved(setup))
    saved[setup.norm_stage] += total(final_norm_saved(setup))
    saved[-1] += total(last_saved(setup))
    return tuple(saved)


def layers_bytes(setup: Setup) -> list[int]:
    """Return bytes that the layers of every stage save of one micro-batch, without embedding and output layer."""
    stages = setup.stage_layers
    sizes = {
        sort: total(saved_within(setup, *sort))
        for sort in dict.fromkeys((kind, scope) for layers in stages for kind, scope, _ in layers)
    }
    return [sum(number * sizes[kind, scope] for kind, scope, number in layers) for layers in stages]


def after_input_bytes(setup: Setup) -> tuple[int, ...]:
    """Return, by stage, bytes held between dgrad and wgrad; 0 if no wgrad is deferred."""
    if not setup.keeps_halves:
        return (0,) * setup.num_stages
    of_kind = {kind: total(layer_after_input(setup, kind)) for kind, _ in setup.model.kinds()}
    return tuple(sum(number * of_kind[kind] for kind, _, number in layers) for layers in setup.stage_layers)


def moved_bytes(setup: Setup, stage: int, minimum_bytes: int) -> int:
    """Return bytes that a transfer moves: storages of at least `minimum_bytes` that the loop does not hold."""
    received = sent_bytes(setup) if stage and setup.layers[stage] and _shares_input(setup) else 0
    moved = total(tuple(row for row in stage_saved(setup, stage) if row.nbytes >= minimum_bytes))
    return moved - (received if received >= minimum_bytes else 0)


def _shares_input(setup: Setup) -> bool:
    """Whether a stage's input is saved as another tensor of the same storage, as Megatron does for recomputation."""
    alone = setup.kernels == "cpu" or setup.model.latent is not None
    return alone and "layernorm" in setup.recomputed.modules


def again_bytes(setup: Setup, kinds: Sequence[LayerKind]) -> int:
    """Return the peak bytes of recomputation for these kinds of layers."""
    together = setup.recomputed.together
    if together:
        # Megatron recomputes no layer for a further token if it recomputes some of the others.
        kinds = [kind for kind in kinds if not kind.further or setup.recomputed.further_scope.whole]
        number = min(together, max(setup.layers))
        return number * layer_bytes(setup, "none", kinds) - layer_bytes(setup, "full", kinds)
    modules = setup.recomputed.scope(0).modules
    core = core_bytes(setup) if "core_attn" in modules else 0
    return max(
        core + max(_freed(setup, kind, modules & {"mla_up_proj"}) for kind in kinds),
        *(_freed(setup, kind, modules & _BEHIND_ATTENTION) for kind in kinds),
    )


def _freed(setup: Setup, kind: LayerKind, modules: frozenset[str]) -> int:
    return (
        total(saved_within(setup, kind, NO_RECOMPUTATION)) - total(saved_within(setup, kind, LayerScope(modules)))
        if modules
        else 0
    )


# Of slices there are hundreds of moments, of which few exceed most others: to compare all took a sixth of a search.
_MOST_COMPARED = 16
# What takes and gives nothing of a rank's own stages, and what does of what is kept of a micro-batch in slices.
_ELSEWHERE = frozenset((*SHARDS, Kind.HOST, Kind.RETURN))
_WITH_KEPT = frozenset((Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT))


@dataclass(frozen=True, slots=True)
class HeldCounts:
    """What one rank of a schedule holds at its fullest, for any sizes of its stages."""

    stages: tuple[int, ...]
    """Its own stages."""
    moments: tuple[tuple[int, ...], ...]
    """Moments that no other exceeds, and with slices some more: for every stage the micro-batches held as saved, then
    those between the halves of their backward, and of slices those whose keys and gradients are kept."""
    hosted: tuple[tuple[int, tuple[int, ...]], ...]
    """Host buffers: how many, and the stages that any of them is for."""

    @property
    def num_buffers(self) -> int:
        return sum(count for count, _ in self.hosted)

    def num_bytes(self, saved: Sequence[int], after_input: Sequence[int], *kept: Sequence[int]) -> tuple[int, int]:
        """Return peak bytes of own micro-batches, and of host buffers. Sizes are by stage; `kept`: keys, gradients."""
        sizes = [of_all[stage] for of_all in (saved, after_input, *kept) for stage in self.stages]
        own = max(sum(map(mul, moment, sizes)) for moment in self.moments)
        return own, sum(count * max(saved[stage] for stage in stages) for count, stages in self.hosted)


def held_by(schedule: Schedule) -> tuple[HeldCounts, ...]:
    """Return the counts of each rank."""
    slices, stages = schedule.layout.slices, [schedule.layout.stages_of(rank) for rank in range(schedule.num_ranks)]
    return tuple(
        HeldCounts(
            stages[rank],
            _moments([(*slot.computations, *slot.transfers) for slot in slots], stages[rank], slices),
            _buffers(schedule, rank, stages),
        )
        for rank, slots in enumerate(schedule.ranks)
    )


def held_by_orders(config: ScheduleConfig) -> tuple[HeldCounts, ...]:
    """Return the counts of each rank without transfers, from its order alone: bubbles change nothing."""
    layout = config.layout
    return tuple(
        HeldCounts(own, _moments([(action,) for action in order], own, config.slices), ())
        for own, order in ((layout.stages_of(rank), order) for rank, order in enumerate(orders_of(config)))
    )


def _buffers(
    schedule: Schedule, rank: int, stages: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    if schedule.layout.slices == 1:
        return tuple((count, stages[guest]) for guest, count in num_buffers_for(schedule, rank).items())
    counts = Counter(stages_in_buffers(host_buffers(schedule, rank)))
    return tuple((count, tuple(sorted(stages_held))) for stages_held, count in counts.items())


def _moments(slots: Sequence[Sequence[Action]], stages: tuple[int, ...], slices: int) -> tuple[tuple[int, ...], ...]:
    """Return what is held in each slot by the memory rule (`schedule.memory`): actions take at its start and give at
    its end. An I holds the larger of what was saved and of what it leaves, so both are tried."""
    import numpy as np

    num = len(stages)
    saved = {stage: place for place, stage in enumerate(stages)}
    width = num * (2 if slices == 1 else 4)
    keys, gradients = 2 * num, 3 * num
    takes: list[int] = []
    gives: list[int] = []
    halves: list[int] = []
    for number, actions in enumerate(slots):
        for action in actions:
            kind = action.kind
            if kind in _ELSEWHERE:
                continue
            place = number * width + saved[action.stage]
            if kind is Kind.FORWARD or kind is Kind.LOAD:
                takes.append(place)
            elif kind is Kind.BACKWARD_WEIGHT:
                gives.append(place + num)
            elif kind is Kind.BACKWARD_INPUT:
                halves.append(place)
            else:
                gives.append(place)
            if slices > 1 and kind in _WITH_KEPT:
                part = action.microbatch % slices
                if kind is Kind.FORWARD:
                    takes += [place + keys] * (part == 0)
                else:
                    takes += [place + gradients] * (part == slices - 1)
                    gives += [place + keys, place + gradients] * (part == 0)
    taken, freed, halved = (
        np.bincount(places, minlength=width * len(slots)).reshape(-1, width) for places in (takes, gives, halves)
    )
    halved = np.roll(halved, num, axis=1) - halved
    totals = np.cumsum(taken - freed + halved, axis=0) + freed
    return _highest(np.concatenate((totals - halved, totals)), None if slices == 1 else _MOST_COMPARED)


def _highest(rows: Any, max_kept: int | None) -> tuple[tuple[int, ...], ...]:
    """Return all moments that no other exceeds; with `max_kept`, after that number some that others do."""
    kept: list[Any] = []
    sums = rows.sum(axis=1)
    while len(rows) and len(kept) != max_kept:
        highest = rows[sums.argmax()]
        kept.append(highest)
        left = (rows > highest).any(axis=1)
        rows, sums = rows[left], sums[left]
    return tuple(tuple(row.tolist()) for row in (*kept, *rows))


@lru_cache(maxsize=4096)
def held_within(config: ScheduleConfig) -> tuple[HeldCounts, ...]:
    """Return the counts of each rank of a configuration, building no more of the schedule than that takes."""
    return held_by_orders(config) if config.balance is None else held_by(unchecked(config))


# Most sizes of the part of a micro-batch that leaves which are tried.
_MOST_PARTS = 8


def activations(setup: Setup) -> tuple[tuple[int, int], ...]:
    """Return, for every rank, the peak bytes of its own micro-batches and the bytes of its host buffers.

    Only as many micro-batches are counted as fill the pipeline; with more, interleaved schedules may need a host buffer
    fewer, or in slices one more on a rank that is not the fullest.
    """
    if setup.activation_budget is not None:
        return _allocated(setup, setup.num_microbatches, setup.activation_budget.memory)
    if setup.slices > 1:
        return _of_slices(setup)
    saved, after_input = stage_bytes(setup), after_input_bytes(setup)
    if FAMILIES[setup.schedule].fill is None and not keeps_own(setup):
        m = setup.num_microbatches
        return tuple((m * sum(saved[stage] for stage in setup.stages_of(rank)), 0) for rank in range(setup.pipeline))
    rows = [counts.num_bytes(saved, after_input) for counts in held_of(setup)]
    reserve = RESERVE if setup.differs and FAMILIES[setup.schedule].fill is not None else 0
    return tuple((own, hosted + int(hosted * reserve)) for own, hosted in rows)


def _of_slices(setup: Setup) -> tuple[tuple[int, int], ...]:
    """Orders alone tell what is held without transfers; if all slices have one size, counts do."""
    memory = memory_of_setup(setup)
    count = setup.num_microbatches if keeps_own(setup) else _num_filling(setup)
    rows = _alike(memory, setup.num_stages)
    if rows is not None:
        return tuple(counts.num_bytes(*rows) for counts in held_within(setup.program(count)))
    if setup.balance is not None:
        return _allocated(setup, count, memory)
    return tuple((peak_of_order(order, memory), 0) for order in orders_of(setup.program(count)))


def _alike(memory: Memory, num_stages: int) -> tuple[Sequence[int], ...] | None:
    """Return by stage what a slice saves, keeps after its input, and of keys and gradients; None if slices differ."""
    sizes = [set(memory.sizes(stage)) for stage in range(num_stages)]
    if memory.reserved or max(map(len, sizes)) > 1:
        return None
    saved, after_input = zip(*((size.saved_bytes, size.after_input_bytes) for (size,) in sizes), strict=True)
    keys, gradients = zip(*((one.keys_bytes, one.gradients_bytes) for one in memory.kept), strict=True)
    return saved, after_input, keys, gradients


def _allocated(setup: Setup, num_microbatches: int, memory: Memory) -> tuple[tuple[int, int], ...]:
    schedule = unchecked(setup.program(num_microbatches))
    return tuple(allocated_bytes(schedule, rank, memory) for rank in range(setup.pipeline))


def held_of(setup: Setup) -> tuple[HeldCounts, ...]:
    """Return what ranks hold with no more micro-batches than fill the pipeline."""
    return held_within(setup.program(_num_filling(setup)))


def _num_filling(setup: Setup) -> int:
    fill = FAMILIES[setup.schedule].fill
    if fill is None:
        return setup.num_microbatches
    # Shards lengthen a micro-batch's way, by up to half of the pipeline. All slices of a micro-batch run forward before the
    # first runs backward, on the rank that hosts some, too. Groups stay whole.
    further = 0 if setup.slices == 1 else -(-2 // setup.turn_size) * setup.turn_size
    return min(setup.num_microbatches, (fill + setup.is_sharded) * setup.stride + further + setup.delay)


def keeps_own(setup: Setup) -> bool:
    """Whether ranks may keep what leaves in their own node's memory, so that all can hold less."""
    return setup.hosts in (HOST, ALL)


def moves_anything(setup: Setup) -> bool:
    """Whether balancing moves anything: not if all ranks hold alike, or no pair can hold less together."""
    plain, balanced = replace(setup, balance=None), replace(setup, balance=setup.balance or EVENLY)
    if keeps_own(balanced):
        return any(map(gt, (own for own, _ in activations(plain)), (own for own, _ in activations(balanced))))
    if setup.slices > 1:
        return FAMILIES[setup.schedule].fill is not None and any(hosted for _, hosted in activations(balanced))
    if (
        setup.pipeline == 1
        or FAMILIES[setup.schedule].fill is None
        or len({max(map(sum, counts.moments)) for counts in held_of(plain)}) == 1
    ):
        return False
    return any(counts.num_buffers for counts in held_of(balanced))


def sizes_of(setup: Setup, minimum_bytes: int) -> Memory:
    """Return what one micro-batch, or slice, of each stage holds; storages below `minimum_bytes` stay."""
    stages = range(setup.num_stages)
    moved = [[moved_bytes(part, stage, minimum_bytes) for stage in stages] for part in slice_setups(setup)]
    return _memory(setup, moved)


def memory_of_setup(setup: Setup) -> Memory:
    """Return what one micro-batch, or slice, of each stage holds, where a transfer moves all that is saved."""
    return _memory(setup, [stage_bytes(part) for part in slice_setups(setup)])


def _memory(setup: Setup, moved: Sequence[Sequence[int]]) -> Memory:
    """`moved[slice][stage]`."""
    slices = slice_setups(setup)
    saved, after = ([of(part_setup) for part_setup in slices] for of in (stage_bytes, after_input_bytes))
    places = [(part, stage) for stage in range(setup.num_stages) for part in range(setup.slices)]
    sizes = tuple(StageMemory(saved[part][stage], moved[part][stage], after[part][stage]) for part, stage in places)
    return Memory(sizes, reserved=setup.differs, slices=setup.slices, kept=kept_memory(setup))


def parts_of(setup: Setup, minimum_bytes: int) -> tuple[tuple[int, ...], ...]:
    """Return, by stage, the bytes of ever more layers of a micro-batch to evict, in at most `_MOST_PARTS` steps."""
    if len(set(slice_setups(setup))) > 1 and setup.differs:
        # Every transfer of a stage moves the same part, and of slices of other sizes there is none.
        return ()
    parts = []
    setup = slice_setups(setup)[0]
    for stage, layers in enumerate(setup.layers):
        rows = (saved_within(setup, kind, scope) for kind, scope, _ in setup.stage_layers[stage])
        layer = max(
            (total(tuple(row for row in of_layer if row.nbytes >= minimum_bytes)) for of_layer in rows), default=0
        )
        whole, steps = moved_bytes(setup, stage, minimum_bytes), min(layers, _MOST_PARTS)
        some = (min(whole, layer * (layers * step // steps)) for step in range(1, steps) if layer)
        # If layers differ, this number of the largest may be more than all.
        parts.append(tuple(dict.fromkeys((*some, whole))))
    return tuple(parts)
