"""Predict what every pipeline rank holds in memory.

In: a Setup. Out: one `RankMemory` a rank, by parts, in bytes of one device.

Weights, gradients and optimizer state by Megatron's byte counts; what a forward saves from `saved`; how many
micro-batches are held, own and hosted, from the very schedule that runs. Knows no tensors and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from operator import gt

from bpipe.balance.pairs import allocated_bytes
from bpipe.build import orders_of, unchecked
from bpipe.generate.families import FAMILIES
from bpipe.ir.hosts import ALL, HOST, PAIR, POOL
from bpipe.ir.memory import RESERVE, Memory, StageMemory, peak_of_order
from bpipe.models.context_parallel import exchange_bytes
from bpipe.models.held import HeldCounts, held_within
from bpipe.models.layout import EVENLY, Setup
from bpipe.models.parameters import layer_parameters
from bpipe.models.parts import LayerKind
from bpipe.models.routed import routed_tokens
from bpipe.models.saved import (
    STATISTICS,
    STATISTICS_BYTES,
    after_input_bytes,
    again_bytes,
    moved_bytes,
    saved_within,
    shard_bytes,
    stage_bytes,
)
from bpipe.models.scan import scan_working_bytes
from bpipe.models.sizes import element_bytes, num_keys, num_tokens, sent_bytes, shard_size, total
from bpipe.models.slices import kept_memory, slice_setups

MIB = 2**20

# In so many steps what leaves of a micro-batch grows, where a stage has more layers: each is tried.
_MOST_PARTS = 8

# What a process takes before the first tensor: context, kernels, library workspaces. About 0.5 GiB on data-centre GPUs.
CONTEXT_BYTES = 512 * MIB
# Buffers of one NCCL communicator on A100s with NVLink, measured by a user in NVIDIA/nccl issue 964: 544 MB between two
# devices, 688 MB among more.
COMMUNICATOR_OF_TWO_BYTES = 544 * MIB
COMMUNICATOR_BYTES = 688 * MIB
# What the caching allocator has reserved and cannot use, as a share of what comes and goes (activations and working
# memory): weights are allocated once and do not fragment. Runs that failed report up to 20 % of all memory (Vad-R1
# issue 11 on GitHub: 14.15 of 70.85 GiB).
FRAGMENTATION = Fraction(3, 20)

# Above this share of a device's memory torch's allocator may give back and ask again in every iteration. Three
# configurations of GPT-3 96B took 1.3 to 1.6 times as long as with half the micro-batch (Kim et al. 2023, table 7), and
# their devices must have been nearly full.
TIGHT = 0.95

# Bytes a parameter: weight, gradient, optimizer state (main weights and two moments), and what exists only while
# weights are updated: a copy of 16-bit gradients in 32 bit. They add up to Megatron's 18, 20 and 16 (its guide to the
# distributed optimizer), which divides the last two by the data-parallel size.
PARAMETER_BYTES = {"bf16": (2, 4, 12, 0), "fp16": (2, 2, 12, 4), "fp32": (4, 4, 8, 0)}

# Beside what the loss saves, logits in 16 bit and their gradient in 32 bit come and go.
LOSS_WORKING_BYTES = 6

# Of a shard's logits so many are in 32 bit at once, as bpipe.vocabulary.output takes them.
WIDE_AT_ONCE = 2**23


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One device of one pipeline rank at its fullest.

    `peak_bytes` is the most of the pipeline's and of the update's.
    """

    rank: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    update_bytes: int
    activations_bytes: int
    hosted_bytes: int
    working_bytes: int
    fragmentation_bytes: int
    overhead_bytes: int
    limit_bytes: int

    @property
    def state_bytes(self) -> int:
        """Bytes that stay throughout: weights, gradients, optimizer state."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def peak_bytes(self) -> int:
        pipeline = self.activations_bytes + self.hosted_bytes + self.working_bytes + self.fragmentation_bytes
        return self.state_bytes + self.overhead_bytes + max(pipeline, self.update_bytes)

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.limit_bytes

    @property
    def is_tight(self) -> bool:
        """Whether it fits with so little to spare that the allocator may have to give memory back and ask again."""
        return TIGHT * self.limit_bytes < self.peak_bytes <= self.limit_bytes


def parameter_bytes(setup: Setup) -> tuple[int, int, int, int]:
    """Return a row of `PARAMETER_BYTES`: with gradients in 16 bit bf16 has what fp16 has."""
    return PARAMETER_BYTES["fp16" if setup.switches.grad_reduce_in_bf16 else setup.precision]


def stage_parameters(setup: Setup) -> tuple[int, ...]:
    """Return the parameters of every stage on one device."""
    model, t = setup.model, setup.tensor
    embedding = shard_size(setup.vocabulary * model.hidden_size, t)
    layer = {
        kind: _layer_parameters(setup, kind)
        for kind in dict.fromkeys(kind for kinds in setup.stage_kinds for kind, _ in kinds)
    }
    counts = [sum(number * layer[kind] for kind, number in kinds) for kinds in setup.stage_kinds]
    counts[0] += setup.sequence * model.hidden_size * model.learned_positions
    counts[-1] += model.norm_parameters
    if not setup.input_shards:
        counts[0] += embedding
    # A tied output layer in another stage's chunk than the embedding is a copy of it.
    if not setup.is_sharded and (not model.tied_embedding or setup.pipeline > 1):
        counts[-1] += embedding
    return tuple(counts)


def _layer_parameters(setup: Setup, kind: LayerKind) -> int:
    """Of a layer on one device, its experts included."""
    found = layer_parameters(setup.model, kind)
    return shard_size(found.matrices + found.biases, setup.tensor) + found.replicated + _of_experts(setup, kind)


def _of_experts(setup: Setup, kind: LayerKind) -> int:
    """Of the experts of a layer, on one device."""
    return shard_size(layer_parameters(setup.model, kind).experts, setup.routing.expert * setup.expert_tensor)


def stage_experts(setup: Setup) -> tuple[int, ...]:
    """Return how many parameters of every stage on one device are experts'."""
    if setup.model.experts is None:
        return (0,) * setup.num_stages
    return tuple(sum(number * _of_experts(setup, kind) for kind, number in kinds) for kinds in setup.stage_kinds)


def shard_parameters(setup: Setup) -> int:
    """Return the parameters of the shards of the vocabulary's layers on one device of any rank."""
    if not setup.is_sharded:
        return 0
    # A tied shard is one for both layers, and beside a whole embedding a copy of some of its rows.
    num_shards = 1 if setup.model.tied_embedding or not setup.input_shards else 2
    return num_shards * shard_size(shard_size(setup.vocabulary * setup.model.hidden_size, setup.tensor), setup.pipeline)


def stage_matrices(setup: Setup) -> tuple[int, ...]:
    """Return how many parameters of every stage on one device belong to matrices that FP8 multiplies; none without
    FP8."""
    if setup.fp8 is None:
        return (0,) * setup.num_stages
    model = setup.model
    down = 0 if model.latent is None else model.hidden_size * model.latent.down_size
    of_kind = {
        kind: shard_size(layer_parameters(model, kind).matrices, setup.tensor) + down + _of_experts(setup, kind)
        for kind, _ in model.kinds()
    }
    return tuple(sum(number * of_kind[kind] for kind, number in kinds) for kinds in setup.stage_kinds)


def weight_bytes(setup: Setup) -> tuple[int, ...]:
    """Return the weights one device of every rank holds. In FP8 those of matrices are there in 8 bit, too, or alone."""
    weight, *_ = parameter_bytes(setup)
    counts = rank_parameters(setup)
    if setup.fp8 is None:
        return tuple(weight * count for count in counts)
    matrices = stage_matrices(setup)
    each = setup.fp8.copies(setup.cluster.device.fp8_blocks) * setup.fp8.value_bytes - weight * setup.fp8.param_gather
    low = (sum(matrices[stage] for stage in setup.stages_of(rank)) for rank in range(setup.pipeline))
    return tuple(weight * count + int(each * part) for count, part in zip(counts, low, strict=True))


def rank_parameters(setup: Setup) -> tuple[int, ...]:
    """Return the parameters one device of every rank holds: with two pipes those of both."""
    counts, shards = stage_parameters(setup), shard_parameters(setup)
    return tuple(sum(counts[stage] for stage in setup.stages_of(rank)) + shards for rank in range(setup.pipeline))


def rank_experts(setup: Setup) -> tuple[int, ...]:
    """Return how many parameters of every rank on one device are experts'."""
    experts = stage_experts(setup)
    return tuple(sum(experts[stage] for stage in setup.stages_of(rank)) for rank in range(setup.pipeline))


def _over_replicas(setup: Setup, each: int, count: int, experts: int) -> int:
    """So many bytes of every parameter; where the optimizer is distributed replicas have a part each, and of experts
    there are fewer."""
    if not setup.distributed_optimizer:
        return each * count
    return shard_size(each * (count - experts), setup.replicas) + shard_size(each * experts, setup.expert_replicas)


def working_bytes(setup: Setup) -> tuple[int, ...]:
    """Return the peak of temporaries while one micro-batch, or slice, is computed, for every rank."""
    of_slices = (_working_bytes(one) for one in slice_setups(setup))
    return tuple(map(max, zip(*of_slices, strict=True)))


def _working_bytes(setup: Setup) -> tuple[int, ...]:
    model, element, tokens = setup.model, element_bytes(setup), num_tokens(setup)
    # A layer's backward: gradients of a matrix's input and output over the whole sequence, and of the MLP's inside.
    layer = 2 * element * tokens * model.hidden_size
    layer += max(_inside_bytes(setup, kind) for kind, _ in model.kinds())
    if setup.attention == "unfused" and any(kind.attends for kind, _ in model.kinds()):
        layer += shard_size(2 * element * tokens * model.num_attention_heads * num_keys(setup), setup.tensor)
    if setup.span is not None:
        # The gradients of all keys and values so far, before they are added to what is kept.
        layer += shard_size(element * num_keys(setup) * setup.micro_batch * model.key_value_size, setup.tensor)
    layer += again_bytes(setup)
    layer = max(layer, exchange_bytes(setup))
    loss = shard_size(LOSS_WORKING_BYTES * tokens * setup.vocabulary, setup.tensor)
    buffers = 2 * sent_bytes(setup) if setup.pipeline > 1 else 0
    if setup.is_sharded:
        # A layer's backward may run between S and T.
        return (shard_bytes(setup) + max(layer, _shard_working_bytes(setup)) + buffers,) * setup.pipeline
    last = {placement[-1] for placement in setup.placements}
    return tuple((max(layer, loss) if rank in last else layer) + buffers for rank in range(setup.pipeline))


def _inside_bytes(setup: Setup, kind: LayerKind) -> int:
    """Return the gradients of an MLP's inside; of experts also of what enters and leaves them; in a Mamba layer what
    its scan takes."""
    if kind.is_mamba:
        return scan_working_bytes(setup)
    model, experts, element = setup.model, setup.model.experts, element_bytes(setup)
    gates = 2 if model.gated else 1
    if not kind.has_mlp:
        # Of queries, keys and values.
        return shard_size(element * num_tokens(setup) * (model.query_size + model.key_value_size), setup.tensor)
    if not kind.experts or experts is None:
        return shard_size(element * num_tokens(setup) * (model.first_mlp_size + model.ffn_hidden_size), setup.tensor)
    routed = element * routed_tokens(setup)
    return 2 * routed * model.hidden_size + shard_size(
        (1 + gates) * routed * experts.ffn_hidden_size, setup.expert_tensor
    )


def _shard_working_bytes(setup: Setup) -> int:
    """What comes and goes in S and T beside the logits, whose gradient takes their place: a part of them in 32 bit,
    twice, the part of the input's gradient, as it is computed and in 32 bit, and the statistics of all shards."""
    logits = shard_size(num_tokens(setup) * setup.vocabulary, setup.vocabulary_shards)
    part = num_tokens(setup) * setup.model.hidden_size
    statistics = STATISTICS * STATISTICS_BYTES * num_tokens(setup) * setup.vocabulary_shards
    return 2 * 4 * min(logits, WIDE_AT_ONCE) + (element_bytes(setup) + 4) * part + statistics


def overhead_bytes(setup: Setup) -> int:
    """Return bytes of the CUDA context and communicators: tensor, context, pipeline, data and model parallel, and a
    pair's. A CPU has none."""
    if setup.kernels == "cpu":
        return 0
    t, p, d = setup.tensor, setup.pipeline, setup.replicas
    groups = [t, setup.context, p, d]
    if t > 1 and p > 1:
        groups.append(t * p)
    if setup.is_sharded:
        # Messages of both directions apart, and each sort of collectives.
        groups += [p] * (4 if setup.input_shards else 3)
    if setup.balance != "none":
        # One communicator for each direction.
        groups += [2, 2]
    sizes = [COMMUNICATOR_BYTES if size > 2 else COMMUNICATOR_OF_TWO_BYTES for size in groups if size > 1]
    return CONTEXT_BYTES + sum(sizes)


def link_bytes(setup: Setup) -> int:
    """Return bytes of a rank's communicators with one more rank of another node, one for each direction; inside a
    node peer copies need none."""
    return 0 if setup.kernels == "cpu" else 2 * COMMUNICATOR_OF_TWO_BYTES


@dataclass(frozen=True, slots=True)
class DeviceBesides:
    """Memory of one device of every rank besides activations of micro-batches, predicted or measured, in bytes.

    `fixed_bytes` all the time; `working_bytes` beside micro-batches; `update_bytes` while weights are updated, when
    there are none. Of what comes and goes the share `fragmentation` is lost on top.
    """

    fixed_bytes: tuple[int, ...]
    working_bytes: tuple[int, ...]
    update_bytes: tuple[int, ...]
    fragmentation: Fraction = Fraction(0)

    def activation_bytes(self, rank: int, budget_bytes: int) -> int:
        """Return bytes for micro-batches and host buffers; 0 where nothing is left."""
        rest = budget_bytes - self.fixed_bytes[rank]
        if rest < self.update_bytes[rank]:
            return 0
        return max(0, int(rest / (1 + self.fragmentation)) - self.working_bytes[rank])

    def need_bytes(self, rank: int, held_bytes: int) -> int:
        """Return bytes of the device where micro-batches and host buffers take `held_bytes`."""
        going = held_bytes + self.working_bytes[rank]
        return self.fixed_bytes[rank] + max(self.update_bytes[rank], going + int(self.fragmentation * going))


def activations(setup: Setup) -> tuple[tuple[int, int], ...]:
    """Return, for every rank, the peak bytes of its own micro-batches and the bytes of its host buffers.

    No more micro-batches are looked at than fill the pipeline. Balanced interleaved schedules need, with some other
    numbers of micro-batches, one host buffer fewer.
    """
    if setup.slices > 1:
        return _of_slices(setup)
    saved, after_input, m = stage_bytes(setup), after_input_bytes(setup), setup.num_microbatches
    if setup.balance != "none" and setup.how.activation_budget is not None:
        schedule = unchecked(setup.program())
        return tuple(
            allocated_bytes(schedule, rank, setup.how.activation_budget.memory) for rank in range(setup.pipeline)
        )
    if FAMILIES[setup.schedule].fill is None:
        if keeps_own(setup):
            return tuple(one.num_bytes(saved, after_input) for one in held_within(setup.program()))
        return tuple((m * sum(saved[stage] for stage in setup.stages_of(rank)), 0) for rank in range(setup.pipeline))
    held = [one.num_bytes(saved, after_input) for one in _held_of(setup)]
    reserve = RESERVE if setup.differs else 0
    return tuple((own, hosted + int(hosted * reserve)) for own, hosted in held)


def _of_slices(setup: Setup) -> tuple[tuple[int, int], ...]:
    """The same of slices, whose sizes may differ, and of what is kept beside them.

    Bubbles change nothing that is held, so without transfers the orders tell.
    """
    if setup.balance == "none":
        memory, config = memory_of_setup(setup), setup.program(_num_filling(setup))
        return tuple((peak_of_order(order, memory), 0) for order in orders_of(config))
    budget = setup.how.activation_budget
    whole = budget is not None or keeps_own(setup)
    schedule = unchecked(setup.program(setup.num_microbatches if whole else _num_filling(setup)))
    memory = memory_of_setup(setup) if budget is None else budget.memory
    return tuple(allocated_bytes(schedule, rank, memory) for rank in range(setup.pipeline))


def _held_of(setup: Setup) -> tuple[HeldCounts, ...]:
    """With no more micro-batches than fill the pipeline."""
    return held_within(setup.program(_num_filling(setup)))


def _num_filling(setup: Setup) -> int:
    """Return how many micro-batches fill the pipeline, or all where ranks never stop holding more."""
    fill = FAMILIES[setup.schedule].fill
    if fill is None:
        return setup.num_microbatches
    # Shards lengthen a micro-batch's way, by up to half of the pipeline.
    return min(setup.num_microbatches, (fill + setup.is_sharded) * setup.stride + setup.delay)


def keeps_own(setup: Setup) -> bool:
    """Return whether ranks may keep what leaves in their own nodes' memory: then a schedule is balanced in which all
    ranks hold alike, too."""
    return setup.balance != "none" and setup.how.hosts in (HOST, ALL)


def moves_anything(setup: Setup) -> bool:
    """Return whether balancing would move any of this setup's activations: not where all ranks hold alike, or no
    pair can keep less together."""
    plain, balanced = replace(setup, balance="none", how=EVENLY), replace(setup, balance="bpipe")
    if keeps_own(balanced):
        return any(map(gt, (own for own, _ in activations(plain)), (own for own, _ in activations(balanced))))
    if setup.slices > 1:
        return FAMILIES[setup.schedule].fill is not None and any(hosted for _, hosted in activations(balanced))
    if (
        setup.pipeline == 1
        or FAMILIES[setup.schedule].fill is None
        or len({max(map(sum, one.moments)) for one in _held_of(plain)}) == 1
    ):
        return False
    return any(one.num_buffers for one in _held_of(balanced))


def peak_bytes(setup: Setup) -> int:
    """Return the peak of the fullest rank."""
    return max(rank.peak_bytes for rank in predict_memory(setup))


def state_bytes(setup: Setup) -> int:
    """Return the weights, gradients, optimizer state and overhead of the rank with most parameters: it holds no less
    than this."""
    return max(rank_states(setup))


def rank_states(setup: Setup) -> tuple[int, ...]:
    """Return the state bytes of every rank."""
    _, gradient, state, _ = parameter_bytes(setup)
    overhead, parameters = (
        overhead_bytes(setup),
        zip(weight_bytes(setup), rank_parameters(setup), rank_experts(setup), strict=True),
    )
    return tuple(
        weights + gradient * count + _over_replicas(setup, state, count, experts) + overhead
        for weights, count, experts in parameters
    )


def least_bytes(setup: Setup, states: tuple[int, ...] | None = None) -> int:
    """Return a lower bound for the fullest rank, without making a schedule.

    It is the state alone, or the first rank's with its activations at their most, or its pair's mean. `states`: those
    of all ranks, if known.
    """
    states, family = states or rank_states(setup), FAMILIES[setup.schedule]
    least = max(states)
    if family.ahead is None or setup.slices > 1:
        return least
    saved, working = stage_bytes(setup), working_bytes(setup)
    held = family.ahead(setup.pipeline, setup.num_microbatches, setup.chunks, setup.group_size)
    held *= min(saved[stage] for stage in setup.stages_of(0))
    if setup.balance == "none":
        return max(least, with_state(setup, states[0], held + working[0]))
    return max(least, with_state(setup, min(states), _part(setup, held) + min(working)))


def least_shared_bytes(setup: Setup, states: tuple[int, ...] | None = None) -> int:
    """Return a lower bound for the fullest rank of a balanced setup, without balancing.

    Wherever a rank's micro-batches are at its peak, it or its partner has half; of a pool one rank has as large a part.
    """
    states = states or rank_states(setup)
    if FAMILIES[setup.schedule].fill is None:
        return least_bytes(setup, states)
    working = working_bytes(setup)
    held = max(own for own, _ in activations(replace(setup, balance="none", how=EVENLY)))
    return max(least_bytes(setup, states), with_state(setup, min(states), _part(setup, held) + min(working)))


def _part(setup: Setup, held: int) -> int:
    """Whoever has the rest of it, one of those who share it holds as large a part; a node's memory may have all of
    it."""
    return {PAIR: held // 2, POOL: held // setup.pipeline}.get(setup.how.hosts, 0)


def with_state(setup: Setup, state: int, going: int) -> int:
    """Return state plus temporaries plus what the allocator loses of these."""
    return state + going + int(_fragmentation(setup) * going)


def sizes_of(setup: Setup, minimum_bytes: int) -> Memory:
    """Return what one micro-batch, or slice, of each stage holds; storages below `minimum_bytes` stay where they
    are."""
    stages = range(setup.num_stages)
    moved = [[moved_bytes(one, stage, minimum_bytes) for stage in stages] for one in slice_setups(setup)]
    return _memory(setup, moved)


def memory_of_setup(setup: Setup) -> Memory:
    """Return what one micro-batch, or slice, of each stage holds, where a transfer moves all that is saved."""
    return _memory(setup, [stage_bytes(one) for one in slice_setups(setup)])


def _memory(setup: Setup, moved: Sequence[Sequence[int]]) -> Memory:
    """`moved[slice][stage]`."""
    slices = slice_setups(setup)
    saved, after = ([of(one) for one in slices] for of in (stage_bytes, after_input_bytes))
    places = [(part, stage) for stage in range(setup.num_stages) for part in range(setup.slices)]
    sizes = tuple(StageMemory(saved[part][stage], moved[part][stage], after[part][stage]) for part, stage in places)
    return Memory(sizes, reserved=setup.differs, slices=setup.slices, kept=kept_memory(setup))


def parts_of(setup: Setup, minimum_bytes: int) -> tuple[tuple[int, ...], ...]:
    """Return, by stage, the sizes that may leave in place of a whole micro-batch: some of its layers.

    Ascending; the last is all.

    There are as many steps as layers, at most `_MOST_PARTS`.
    """
    if len(set(slice_setups(setup))) > 1 and setup.differs:
        # Every transfer of a stage moves the same part, and of slices of other sizes there is none.
        return ()
    found = []
    setup = slice_setups(setup)[0]
    for stage, layers in enumerate(setup.layers):
        rows = (saved_within(setup, kind, scope) for kind, scope, _ in setup.stage_layers[stage])
        layer = max(
            (total(tuple(row for row in of_layer if row.nbytes >= minimum_bytes)) for of_layer in rows), default=0
        )
        whole, steps = moved_bytes(setup, stage, minimum_bytes), min(layers, _MOST_PARTS)
        some = (min(whole, layer * (layers * step // steps)) for step in range(1, steps) if layer)
        # Where layers differ so many of the largest may be more than all.
        found.append(tuple(dict.fromkeys((*some, whole))))
    return tuple(found)


def besides_of(setup: Setup) -> DeviceBesides:
    """Return the predicted memory besides activations."""
    rows = predict_memory(replace(setup, how=EVENLY, budget_bytes=None))
    return DeviceBesides(
        tuple(row.state_bytes + row.overhead_bytes for row in rows),
        tuple(row.working_bytes for row in rows),
        tuple(row.update_bytes for row in rows),
        _fragmentation(setup),
    )


def _fragmentation(setup: Setup) -> Fraction:
    """Of a CPU's memory nobody says what is lost."""
    return FRAGMENTATION if setup.kernels == "gpu" else Fraction(0)


def predict_memory(setup: Setup) -> tuple[RankMemory, ...]:
    """Return the memory of each rank.

    A transfer is taken to move all that a micro-batch saves, unless another size is given.
    """
    held_by_rank, weights = activations(setup), weight_bytes(setup)
    _, gradient, state, update = parameter_bytes(setup)
    working, overhead = working_bytes(setup), overhead_bytes(setup)
    rows = []
    for rank, (count, experts) in enumerate(zip(rank_parameters(setup), rank_experts(setup), strict=True)):
        own, hosted = held_by_rank[rank]
        rows.append(
            RankMemory(
                rank=rank,
                weights_bytes=weights[rank],
                gradients_bytes=gradient * count,
                optimizer_bytes=_over_replicas(setup, state, count, experts),
                update_bytes=_over_replicas(setup, update, count, experts),
                activations_bytes=own,
                hosted_bytes=hosted,
                working_bytes=working[rank],
                fragmentation_bytes=int(_fragmentation(setup) * (own + hosted + working[rank])),
                overhead_bytes=overhead,
                limit_bytes=setup.limit_bytes[rank],
            )
        )
    return tuple(rows)
