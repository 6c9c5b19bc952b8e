"""What every pipeline rank holds in memory, by parts, in bytes of one device; and lower bounds of it.

Weights, gradients and optimizer state follow Megatron's byte counts; numbers of micro-batches come from the schedule
that runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from operator import gt
from typing import NamedTuple

from bpipe.predict.activations import activations, after_input_bytes, again_bytes, held_of, stage_bytes
from bpipe.predict.cluster import GIB, Cluster
from bpipe.predict.exchanges import exchange_bytes
from bpipe.predict.layers.ends import last_saved, loss_working_bytes, shard_bytes, shard_working_bytes
from bpipe.predict.layers.layer import layer_working_bytes
from bpipe.predict.layout import EVENLY, Setup
from bpipe.predict.sizes import element_bytes, num_tokens, sent_bytes, sent_from, total
from bpipe.predict.slices import kept_memory, slice_setups
from bpipe.predict.states import over_replicas, parameter_bytes, rank_experts, rank_parameters, weight_bytes
from bpipe.predict.training import CUDA_GRAPHS
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.families.turns import WarmUp
from bpipe.schedule.hosts import PAIR, POOL
from bpipe.schedule.layout import Vocabulary

MIB = 2**20
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
# Above this share of a device's memory torch's allocator may give back and ask again in every iteration, and the
# prediction's own error may be what does not fit. The cost was never measured: three configurations of GPT-3 96B took
# 1.3 to 1.6 times as long as with half the micro-batch (Kim et al. 2023, table 7), perhaps for that reason.
TIGHT = 0.95


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One device of a pipeline rank at its fullest."""

    rank: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    update_bytes: int
    """Temporaries of the weights' update, if they may use memory of the pipeline."""
    activations_bytes: int
    """Of the rank's own micro-batches."""
    hosted_bytes: int
    """Host buffers."""
    working_bytes: int
    """Temporaries of a micro-batch."""
    fragmentation_bytes: int
    """Reserved by the allocator and not usable."""
    overhead_bytes: int
    """CUDA context and communicators; and, if an iteration is captured in a CUDA graph, temporaries of the update."""
    limit_bytes: int
    """Bytes that it may hold."""
    device_bytes: int
    """Bytes that the device has."""

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
        return self.fits and self.peak_bytes > TIGHT * self.device_bytes


def working_bytes(setup: Setup) -> tuple[int, ...]:
    """Return the peak of temporaries while one micro-batch, or slice, is computed, for every rank."""
    of_slices = (_working_bytes(part) for part in slice_setups(setup))
    return tuple(map(max, zip(*of_slices, strict=True)))


def _working_bytes(setup: Setup) -> tuple[int, ...]:
    # A layer's backward: gradients of a matrix's input and output over the whole sequence, and what a part makes.
    around = 2 * element_bytes(setup) * num_tokens(setup) * setup.model.hidden_size
    kinds = [kind for kind, _ in setup.model.kinds()]
    inside = max(layer_working_bytes(setup, kind) for kind in kinds)
    usual, with_further = (
        max(around + inside + again_bytes(setup, some), exchange_bytes(setup))
        for some in ([kind for kind in kinds if not kind.further], kinds)
    )
    further = {placement[setup.further_stage] for placement in setup.placements if setup.further_stage is not None}
    layers = [with_further if rank in further else usual for rank in range(setup.pipeline)]
    loss = loss_working_bytes(setup)
    # Of further tokens only a stage that predicts them apart from the loss sends values.
    sent = sent_bytes(setup) if setup.mtp_stage is None else sent_from(setup, setup.mtp_stage)
    buffers = 2 * sent if setup.pipeline > 1 else 0
    if setup.is_sharded:
        # A layer's backward may run between S and T.
        return tuple(shard_bytes(setup) + max(layer, shard_working_bytes(setup)) + buffers for layer in layers)
    # By then the loss has freed what it saved.
    freed, last = total(last_saved(setup)), {placement[-1] for placement in setup.placements}
    return tuple((max(loss, layer - freed) if rank in last else layer) + buffers for rank, layer in enumerate(layers))


def roomy_bytes(cluster: Cluster, kernels: str) -> int:
    """Return the bytes of a device up to which it is not tight, in whole tenths of a GiB; a CPU's are never."""
    device = cluster.device.memory_bytes
    return int(10 * TIGHT * device / GIB) * GIB // 10 if kernels == "gpu" else device


def overhead_bytes(setup: Setup) -> int:
    """Return bytes of the CUDA context and of all communicators, a pair's included. A CPU has none."""
    if setup.kernels == "cpu":
        return 0
    t, p, d = setup.tensor, setup.pipeline, setup.replicas
    groups = [t, setup.context, p, d]
    if t > 1 and p > 1:
        groups.append(t * p)
    if setup.is_sharded:
        # Messages of both directions apart, and each sort of collectives.
        groups += [p] * (4 if setup.input_shards else 3)
    if setup.balance is not None:
        # One communicator for each direction.
        groups += [2, 2]
    sizes = [COMMUNICATOR_BYTES if size > 2 else COMMUNICATOR_OF_TWO_BYTES for size in groups if size > 1]
    return CONTEXT_BYTES + sum(sizes)


def link_bytes(setup: Setup) -> int:
    """Return bytes of a rank's two communicators with one more rank; a node's peer copies need none."""
    return 0 if setup.kernels == "cpu" else 2 * COMMUNICATOR_OF_TWO_BYTES


@dataclass(frozen=True, slots=True)
class DeviceBesides:
    """Memory of one device of every rank besides activations of micro-batches, predicted or measured."""

    fixed_bytes: tuple[int, ...]
    """Held throughout."""
    working_bytes: tuple[int, ...]
    """Held next to micro-batches."""
    update_bytes: tuple[int, ...]
    """Held during the weights' update, without micro-batches."""
    fragmentation: Fraction = Fraction(0)
    """Share of what comes and goes that is lost in addition."""

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


def peak_bytes(setup: Setup) -> int:
    """Return the peak of the fullest rank."""
    return max(rank.peak_bytes for rank in predict_memory(setup))


def rank_states(setup: Setup) -> tuple[int, ...]:
    """Return the state bytes of every rank."""
    _, gradient, state, _ = parameter_bytes(setup)
    overhead, counts = overhead_bytes(setup), zip(rank_parameters(setup), rank_experts(setup), strict=True)
    return tuple(
        weights + gradient * count + over_replicas(setup, state, count, experts) + overhead
        for weights, (count, experts) in zip(weight_bytes(setup), counts, strict=True)
    )


def least_saved_bytes(setup: Setup) -> list[int]:
    """Return, for every stage, what a forward of one micro-batch, or slice, saves at least."""
    return [min(of_stage) for of_stage in zip(*map(stage_bytes, slice_setups(setup)), strict=True)]


def least_bytes(setup: Setup, states: tuple[int, ...] | None = None) -> int:
    """Return a lower bound for the fullest rank without a schedule: state, or the first rank's activations."""
    states, family = states or rank_states(setup), FAMILIES[setup.schedule]
    least = max(states)
    if family.ahead is None or (setup.slices > 1 and family.sliced_warm_up is not None):
        # For slices in turns the warm-up says more (`least_warm_bytes`).
        return least
    saved, width = least_saved_bytes(setup), setup.num_microbatches * setup.slices
    held_bytes = family.ahead(setup.pipeline, width, setup.num_chunks, setup.turn_size)
    held_bytes *= min(saved[stage] for stage in setup.stages_of(0))
    return max(least, _least_of_held(setup, states, [held_bytes]))


def least_shared_bytes(setup: Setup, states: tuple[int, ...] | None = None) -> int:
    """Return a lower bound for the fullest rank of a balanced setup: at a rank's peak, it or its partner has half."""
    states = states or rank_states(setup)
    if FAMILIES[setup.schedule].fill is None:
        return least_bytes(setup, states)
    held_bytes = [own for own, _ in activations(replace(setup, balance=None))]
    return max(least_bytes(setup, states), _least_of_held(setup, states, held_bytes))


def least_sharded_bytes(setup: Setup, states: tuple[int, ...]) -> int:
    """Return a lower bound for the fullest rank of a setup with shards of the vocabulary, from the order without them.

    With shards ranks run further ahead, so they hold no fewer micro-batches as saved; of what waits for its W, which
    with full recomputation is larger, they may hold fewer. The order without is made once for all kinds of shards.
    """
    saved = stage_bytes(setup)
    after_input = list(map(min, saved, after_input_bytes(setup)))
    whole = replace(setup, vocabulary=Vocabulary.WHOLE, input_shards=False, balance=None)
    return _least_of_held(setup, states, [held.num_bytes(saved, after_input)[0] for held in held_of(whole)])


def _least_of_held(setup: Setup, states: Sequence[int], held_bytes: Sequence[int]) -> int:
    """Return the least bytes of the fullest rank if the first ranks hold these bytes of activations unbalanced.

    If balanced, a rank or one of those who host for it holds at least a part; a node's memory may hold all of it.
    """
    working = working_bytes(setup)
    if setup.balance is None:
        return max(
            with_state(setup, state, sum(going)) for state, *going in zip(states, held_bytes, working, strict=False)
        )
    largest = max(held_bytes)
    part = {PAIR: largest // 2, POOL: largest // setup.pipeline}.get(setup.hosts, 0)
    return with_state(setup, min(states), part + min(working))


def with_state(setup: Setup, state: int, going: int) -> int:
    """Return state plus temporaries plus what the allocator loses of these."""
    return state + going + int(_fragmentation(setup) * going)


def besides_of(setup: Setup) -> DeviceBesides:
    """Return the predicted memory besides activations."""
    rows = predict_memory(replace(setup, balance=None if setup.balance is None else EVENLY, budget_bytes=None))
    return DeviceBesides(
        tuple(row.state_bytes + row.overhead_bytes for row in rows),
        tuple(row.working_bytes for row in rows),
        tuple(row.update_bytes for row in rows),
        _fragmentation(setup),
    )


def _fragmentation(setup: Setup) -> Fraction:
    """None is known for a CPU's memory."""
    return FRAGMENTATION if setup.kernels == "gpu" else Fraction(0)


def predict_memory(setup: Setup) -> tuple[RankMemory, ...]:
    """Return the memory of each rank."""
    held_by_rank, weights = activations(setup), weight_bytes(setup)
    _, gradient, state, update = parameter_bytes(setup)
    working, overhead = working_bytes(setup), overhead_bytes(setup)
    rows = []
    shares_memory = setup.cuda_graph_impl == CUDA_GRAPHS[0]
    for rank, (count, experts) in enumerate(zip(rank_parameters(setup), rank_experts(setup), strict=True)):
        own, hosted = held_by_rank[rank]
        temporary = over_replicas(setup, update, count, experts)
        rows.append(
            RankMemory(
                rank=rank,
                weights_bytes=weights[rank],
                gradients_bytes=gradient * count,
                optimizer_bytes=over_replicas(setup, state, count, experts),
                update_bytes=temporary if shares_memory else 0,
                activations_bytes=own,
                hosted_bytes=hosted,
                working_bytes=working[rank],
                fragmentation_bytes=int(_fragmentation(setup) * (own + hosted + working[rank])),
                overhead_bytes=overhead if shares_memory else overhead + temporary,
                limit_bytes=setup.limit_bytes[rank],
                device_bytes=setup.cluster.device.memory_bytes,
            )
        )
    return tuple(rows)


def least_warm_bytes(setup: Setup, states: tuple[int, ...] | None = None) -> int:
    """Return the least bytes held when backwards begin, without making an order; 0 if the family does not say."""
    told = _told(setup)
    if told is None:
        return 0
    sizes, states = _sizes(setup), states or rank_states(setup)
    if setup.balance is not None and _shares_surely(setup, told):
        return _of_pairs(setup, told, sizes, states)
    if setup.balance is not None and setup.slices == 1:
        # The first rank's part comes from its order (`least_shared_bytes`).
        return 0
    held_bytes = [_held(sizes[rank], told.at_first_backward(rank)) for rank in range(setup.pipeline)]
    return _least_of_held(setup, states, held_bytes)


def _told(setup: Setup) -> WarmUp | None:
    family, sizes = FAMILIES[setup.schedule], (setup.pipeline, setup.num_microbatches, setup.num_chunks)
    if setup.slices == 1:
        return None if family.warm_up is None else family.warm_up(*sizes, setup.turn_size)
    return None if family.sliced_warm_up is None else family.sliced_warm_up(*sizes, setup.group_size, setup.slices)


class _Size(NamedTuple):
    """Bytes of a stage: what a slice saves at least, and what is kept of a micro-batch while any slice is held."""

    saved: int
    kept: int
    slices: int

    def held(self, count: int) -> int:
        return count * self.saved + -(-count // self.slices) * self.kept


def _sizes(setup: Setup) -> list[list[_Size]]:
    """By rank and chunk."""
    saved = least_saved_bytes(setup)
    kept = [stage.keys_bytes for stage in kept_memory(setup)] or [0] * setup.num_stages
    sizes = [_Size(*both, setup.slices) for both in zip(saved, kept, strict=True)]
    return [sizes[rank :: setup.pipeline] for rank in range(setup.pipeline)]


def _held(sizes: Sequence[_Size], counts: Sequence[int]) -> int:
    return sum(size.held(count) for size, count in zip(sizes, counts, strict=True))


def _shares_surely(setup: Setup, warm_up: WarmUp) -> bool:
    """Whether pairs are mirror images, of which the first has something to share.

    That needs steadily shorter warm-ups of whole groups, in which all ranks take the same turns. With one chunk and
    split backwards ranks may hold alike, because what waits for its W is not in the warm-up.
    """
    family, falls = FAMILIES[setup.schedule], all(map(gt, warm_up.lengths, warm_up.lengths[1:]))
    width, turn = setup.num_microbatches * setup.slices, warm_up.group_size
    are_whole = width % turn == 0 or warm_up.lengths[0] <= warm_up.num_chunks * (width - width % turn - turn)
    told = falls and are_whole and not (family.splits and family.max_chunks == 1)
    return setup.hosts == PAIR and setup.pipeline > 3 and told


def _of_pairs(setup: Setup, warm_up: WarmUp, sizes: Sequence[Sequence[_Size]], states: Sequence[int]) -> int:
    """One of two partners has half of what both hold; by a budget the first two ranks may have any partner."""
    working, largest = working_bytes(setup), 0
    for rank in (0, 1):
        own, least = _held(sizes[rank], warm_up.at_first_backward(rank)), []
        # Mostly half of its own is too much already, whatever its partner holds.
        alone = with_state(setup, min(states), own // 2 + min(working))
        if alone > min(setup.limit_bytes):
            return alone
        for partner in range(rank + 1, setup.pipeline):
            others = min(_held(sizes[partner], counts) for counts in warm_up.meanwhile(rank, partner))
            half = (own + others) // 2 + min(working[rank], working[partner])
            least.append(with_state(setup, min(states[rank], states[partner]), half))
        largest = max(largest, min(least))
    return largest
