"""Predict what every pipeline rank holds in memory. In: a Setup. Out: one `RankMemory` a rank, by parts, in bytes of one device.

Weights, gradients and optimizer state by Megatron's byte counts; what a forward saves from `saved`; how many micro-batches are held, own
and hosted, from the very schedule that runs. Knows no tensors and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from bpipe.generate.families import FAMILIES
from bpipe.ir.host_buffers import num_host_buffers
from bpipe.ir.memory import live_bytes, memory_of
from bpipe.ir.schedule import Schedule
from bpipe.models.layout import Setup
from bpipe.models.saved import core_bytes, element_bytes, layer_bytes, num_tokens, sent_bytes, shared, stage_bytes
from bpipe.program import ScheduleConfig, built

MIB = 2**20

# What a process takes before the first tensor: context, kernels, library workspaces. About 0.5 GiB on data-centre GPUs.
CONTEXT_BYTES = 512 * MIB
# Buffers of one NCCL communicator on A100s with NVLink, measured by a user in NVIDIA/nccl issue 964: 544 MB between two devices, 688 MB
# among more.
COMMUNICATOR_OF_TWO_BYTES = 544 * MIB
COMMUNICATOR_BYTES = 688 * MIB
# What the caching allocator has reserved and cannot use, as a share of what comes and goes (activations and working memory): weights are
# allocated once and do not fragment. Runs that failed report up to 20 % of all memory (Vad-R1 issue 11 on GitHub: 14.15 of 70.85 GiB).
FRAGMENTATION = 0.15

# Bytes a parameter: weight, gradient, optimizer state (main weights and two moments), and what exists only while weights are updated: a
# copy of 16-bit gradients in 32 bit. They add up to Megatron's 18, 20 and 16 (its guide to the distributed optimizer), which divides the
# last two by the data-parallel size.
PARAMETER_BYTES = {"bf16": (2, 4, 12, 0), "fp16": (2, 2, 12, 4), "fp32": (4, 4, 8, 0)}

# Beside what the loss saves, logits in 16 bit and their gradient in 32 bit come and go.
LOSS_WORKING_BYTES = 6


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One device of one pipeline rank at its fullest. `peak_bytes` is the most of the pipeline's and of the update's."""

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
        """What is there all the time: weights, gradients, optimizer state."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def peak_bytes(self) -> int:
        pipeline = self.activations_bytes + self.hosted_bytes + self.working_bytes + self.fragmentation_bytes
        return self.state_bytes + self.overhead_bytes + max(pipeline, self.update_bytes)

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.limit_bytes


def rank_parameters(setup: Setup) -> tuple[int, ...]:
    """Parameters one device of every rank holds."""
    model, t = setup.model, setup.tensor
    embedding = shared(setup.vocabulary * model.hidden_size, t)
    layer = shared(model.sharded_layer_parameters + model.sharded_layer_biases, t) + model.replicated_layer_parameters
    counts = [0] * setup.pipeline
    for stage, num_layers in enumerate(setup.layers):
        counts[stage % setup.pipeline] += num_layers * layer
    counts[0] += embedding + setup.sequence * model.hidden_size * model.learned_positions
    # A tied output layer on another rank than the embedding is a copy of it.
    if not model.tied_embedding or setup.pipeline > 1:
        counts[-1] += embedding
    counts[-1] += model.norm_parameters
    return tuple(counts)


def working_bytes(setup: Setup) -> tuple[int, ...]:
    """What comes and goes while one micro-batch is computed, at its fullest, for every rank."""
    model, element, tokens = setup.model, element_bytes(setup), num_tokens(setup)
    # A layer's backward: gradients of a matrix's input and output over the whole sequence, and of the MLP's inside.
    layer = 2 * element * tokens * model.hidden_size
    layer += shared(element * tokens * (model.first_mlp_size + model.ffn_hidden_size), setup.tensor)
    if setup.attention == "unfused":
        layer += shared(2 * element * tokens * model.num_attention_heads * setup.sequence, setup.tensor)
    # What recomputation makes anew for one layer at a time.
    layer += layer_bytes(setup, "none") - layer_bytes(setup) if setup.recompute == "full" else 0
    layer += core_bytes(setup) if setup.recompute == "selective" else 0
    loss = shared(LOSS_WORKING_BYTES * tokens * setup.vocabulary, setup.tensor)
    buffers = 2 * sent_bytes(setup) if setup.pipeline > 1 else 0
    return (*(layer + buffers,) * (setup.pipeline - 1), max(layer, loss) + buffers)


def overhead_bytes(setup: Setup) -> int:
    """Context and communicators: tensor, pipeline and data parallel, model parallel (the gradients' norm), and a pair's."""
    t, p, d = setup.tensor, setup.pipeline, setup.data
    groups = [t, p, d]
    if t > 1 and p > 1:
        groups.append(t * p)
    if setup.balance != "none":
        # One communicator for each direction.
        groups += [2, 2]
    sizes = [COMMUNICATOR_BYTES if size > 2 else COMMUNICATOR_OF_TWO_BYTES for size in groups if size > 1]
    return CONTEXT_BYTES + sum(sizes)


def held_bytes(schedule: Schedule, saved: tuple[int, ...], rank: int) -> tuple[int, int]:
    """The most a rank's own micro-batches occupy, and its host buffers, which are allocated throughout."""
    owner = schedule.layout.only_placement
    own = [size if of == rank else 0 for size, of in zip(saved, owner, strict=True)]
    partner = schedule.partners[rank] if schedule.partners else rank
    largest = max(size for size, of in zip(saved, owner, strict=True) if of == partner)
    return max(live_bytes(schedule, rank, memory_of(own))), num_host_buffers(schedule, rank) * largest


@lru_cache(maxsize=1024)
def held_counts(config: ScheduleConfig) -> tuple[tuple[int, int, int], ...]:
    """For every rank its own micro-batches at most, its host buffers, and for whom they are, with one stage a rank."""
    schedule = built(config)
    ones, partners = (1,) * schedule.num_ranks, schedule.partners or range(schedule.num_ranks)
    return tuple((*held_bytes(schedule, ones, rank), partners[rank]) for rank in range(schedule.num_ranks))


def activations(setup: Setup) -> tuple[tuple[int, int], ...]:
    """For every rank the bytes of its own micro-batches at their most, and of its host buffers.

    No more micro-batches are looked at than fill the pipeline. Balanced interleaved schedules need, with some other numbers of
    micro-batches, one host buffer fewer.
    """
    saved, p, m = stage_bytes(setup), setup.pipeline, setup.num_microbatches
    fill = FAMILIES[setup.schedule].fill
    if fill is None:
        return tuple((m * sum(saved[rank::p]), 0) for rank in range(p))
    if setup.chunks == 1:
        # Equal stages hold equal bytes: thousands of setups share a few counts.
        counts = held_counts(setup.program(min(m, fill * p)))
        return tuple((own * saved[rank], buffers * saved[partner]) for rank, (own, buffers, partner) in enumerate(counts))
    schedule = built(setup.program(min(m, fill * p)))
    return tuple(held_bytes(schedule, saved, rank) for rank in range(p))


def state_bytes(setup: Setup) -> int:
    """Weights, gradients, optimizer state and overhead of the rank with most parameters: it holds no less than this."""
    weight, gradient, state, _ = PARAMETER_BYTES[setup.precision]
    count = max(rank_parameters(setup))
    replicas = setup.data if setup.distributed_optimizer else 1
    return (weight + gradient) * count + shared(state * count, replicas) + overhead_bytes(setup)


def predict_memory(setup: Setup) -> tuple[RankMemory, ...]:
    """One a rank. What a transfer moves is taken to be all that a micro-batch saves."""
    held_by_rank = activations(setup)
    weight, gradient, state, update = PARAMETER_BYTES[setup.precision]
    replicas = setup.data if setup.distributed_optimizer else 1
    working, overhead = working_bytes(setup), overhead_bytes(setup)
    rows = []
    for rank, count in enumerate(rank_parameters(setup)):
        own, hosted = held_by_rank[rank]
        rows.append(
            RankMemory(
                rank=rank,
                weights_bytes=weight * count,
                gradients_bytes=gradient * count,
                optimizer_bytes=shared(state * count, replicas),
                update_bytes=shared(update * count, replicas),
                activations_bytes=own,
                hosted_bytes=hosted,
                working_bytes=working[rank],
                fragmentation_bytes=int(FRAGMENTATION * (own + hosted + working[rank])),
                overhead_bytes=overhead,
                limit_bytes=setup.cluster.device.memory_bytes,
            )
        )
    return tuple(rows)
